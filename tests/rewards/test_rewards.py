"""Scores of each reward for completions as models write them."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from lgrpo import Completion, Prompt
from lgrpo.commands.fit import LGRPOCLI
from lgrpo.rewards import (
    AsyncReward,
    CountdownEquation,
    ExactMatch,
    FunctionReward,
    Isolated,
    MathVerify,
    NumericMatch,
    RegexMatch,
    Reward,
    Scoring,
    Shortest,
    TagFormat,
    WeightedSum,
    as_reward,
)
from lgrpo.rewards.base import checked_rewards
from lgrpo.tasks import DatasetTask, SortDigits
from tests.helpers import LowDigits, fit


def prompts_and_answers(text, **row):
    prompt = Prompt(text="", token_ids=[1], row=row, position=0)
    answer = Completion(token_ids=[1], logprobs=[0.0], text=text, finish_reason="stop", behaviour_step=0)
    return [prompt], [answer]


def score(reward, text, **row):
    (value,) = reward(*prompts_and_answers(text, **row))
    return value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("(53 + 21) - 29", 1),
        ("53+21-29 = 45", 1),
        ("I try 53 - 29.\nThat leaves 24.\n\n53 - 29 + 21", 1),
        ("<think>53*21?</think><answer>21 + (53 - 29)</answer> done", 1),
        ("<answer>1</answer><answer>21 + 53 - 29</answer>", 1),
        ("53 + 21 - 29 = 46", 1),  # the part after the equals sign is ignored
        ("53 + 21", 0),  # a number is missing
        ("53 + 21 - 29 + 0", 0),  # one number too many
        ("53 + 21 - 29 - 29 + 29", 0),
        ("45", 0),
        ("53 + 21 - 29.0", 0),
        ("-29 + 53 + 21", 0),  # a unary minus is not allowed
        ("53 // 21 - 29", 0),
        ("29 ** 21 ** 53", 0),
        ("53 + 21 / 0 - 29", 0),
        ("__import__('os').system('true')", 0),
        ("(" * 10_000, 0),
        ("9" * 100_000, 0),
        ("", 0),
        ("True + 53", 0),
    ],
)
def test_countdown_scores_equations(text, expected):
    assert score(CountdownEquation(), text, nums=[29, 21, 53], target=45) == expected


def test_countdown_is_exact_and_gives_partial_credit():
    assert score(CountdownEquation(), "1 / 3 * 3 * 9", nums=[1, 3, 3, 9], target=9) == 1
    assert score(CountdownEquation(partial=0.1), "29 + 21 + 53", nums=[29, 21, 53], target=45) == 0.1
    assert score(CountdownEquation(partial=0.1), "29 + 21", nums=[29, 21, 53], target=50) == 0
    with pytest.raises(ValueError, match="partial is 1"):
        CountdownEquation(partial=1.0)


@pytest.mark.parametrize(
    ("gold", "text", "expected"),
    [
        (r"\frac{1}{2}", r"So the answer is $\boxed{\frac{1}{2}}$.", 1),
        (r"\frac{1}{2}", r"The answer is $0.5$", 1),
        (r"\frac{1}{2}", r"\boxed{1/3}", 0),
        ("12", "Therefore it is 12", 1),
        ("12", r"12 was wrong, it is \boxed{13}", 0),
        (r"2\sqrt{3}", r"\boxed{\sqrt{12}}", 1),
        ("(1,2)", r"\boxed{(1, 2)}", 1),
        ("(1,2)", r"\boxed{(2, 1)}", 0),
        (r"x^2+2x+1", r"\boxed{(x+1)^2}", 1),
        ("5", "", 0),
        ("5", "no idea", 0),
    ],
)
def test_math_verify_compares_values(gold, text, expected):
    assert score(MathVerify(), text, answer=gold) == expected


def test_math_verify_takes_the_last_box():
    """The library would take any of several boxes that it can read."""
    right = "So \\boxed{49}."
    assert score(MathVerify(), right, answer="49") == 1
    assert score(MathVerify(), right + "\nThe answer is \\boxed{\\text{(B)}}", answer="49") == 0
    assert score(MathVerify(), right + "\nNo: it is \\boxed{50}.", answer="49") == 0
    assert score(MathVerify(), "Hm, \\boxed{50}.\nNo: " + right, answer="49") == 1
    assert score(MathVerify(), "It is \\boxed{1} and \\boxed{2}.", answer="\\{1, 2\\}") == 1


def test_math_verify_works_in_a_thread_and_in_a_worker():
    """With generation ahead of training, scoring runs in a thread, where the library's timeout would fail."""
    found = []
    thread = threading.Thread(target=lambda: found.append(score(MathVerify(), r"\boxed{7}", answer="7")))
    thread.start()
    thread.join()
    assert found == [1.0]
    isolated = Isolated(MathVerify(), Scoring(num_workers=1))
    assert score(isolated, r"\boxed{7}", answer="7") == 1.0
    isolated.close()


def test_unreadable_gold_answer_raises_an_error():
    with pytest.raises(ValueError, match="is not mathematics: ''"):
        score(MathVerify(), "5", answer="")
    with pytest.raises(ValueError, match="holds no number"):
        score(NumericMatch(), "5", answer="five")


@pytest.mark.parametrize("text", ["{}", "1 + {}", "<answer>{}</answer>", r"\boxed{{{}}}", "-{}.5e99999"])
def test_numbers_of_thousands_of_digits(text):
    """Python raises an error when it prints or reads an integer of more than 4,300 digits."""
    text = text.format("9" * 5000)
    row = {"answer": "5", "nums": [1, 2], "target": 3}
    for reward in (ExactMatch(), NumericMatch(), CountdownEquation(), MathVerify()):
        assert score(reward, text, **row) == 0
        assert isinstance(reward.final_answer(text), str)


@pytest.mark.parametrize(
    ("reward", "row", "message"),
    [
        (NumericMatch(), {"answer": "9" * 5000}, "a number beyond the range of floating point, '9999"),
        (MathVerify(), {"answer": "9" * 5000}, "a number of more than 4300 digits"),
        (CountdownEquation(), {"nums": [1, 2], "target": "9" * 5000}, r"^numbers \[1, 2\] and target 9{200} are not"),
        (CountdownEquation(), {"nums": ["9" * 5000, 2], "target": 3}, "are not a Countdown problem"),
        (CountdownEquation(), {"nums": [1, 2], "target": "1e999999999"}, "are not a Countdown problem"),
        (CountdownEquation(), {"nums": [1, 2], "target": "1e-999999999"}, "are not a Countdown problem"),
        (CountdownEquation(), {"nums": [float("inf"), 2], "target": 3}, "are not a Countdown problem"),
    ],
)
def test_answers_of_thousands_of_digits_are_refused(reward, row, message):
    with pytest.raises(ValueError, match=message):
        reward.check_row(row)


def test_an_integer_is_no_finite_score():
    class Huge(Reward):
        def score(self, prompt, completion):
            return 10**5000

    with pytest.raises(ValueError, match="Huge returned inf, not a finite number"):
        checked_rewards(Huge(), *prompts_and_answers("1"))


def test_missing_math_verify_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lgrpo\[math\]'"):
        MathVerify()


def test_format_rewards_match_the_whole_pattern():
    tags = TagFormat()
    assert score(tags, "<think>\nhm\n</think>\n<answer>5</answer>") == 1
    for text in ("<answer>5</answer>", "<think>a</think><think>b</think><answer>5</answer>", "<think>a</think> 5", ""):
        assert score(tags, text) == 0
    assert score(TagFormat(["a.b"]), "<a.b>x</a.b>") == 1
    assert score(TagFormat(["a.b"]), "<axb>x</axb>") == 0
    assert score(RegexMatch(r"\d+$"), "it is 12") == 1
    assert score(RegexMatch(r"\d+", whole=True), "it is 12") == 0
    with pytest.raises(ValueError, match="is not a regular expression"):
        RegexMatch("(")


def test_function_is_found_by_its_import_path(tmp_path, monkeypatch):
    (tmp_path / "graders.py").write_text("def half(text, row):\n    return row['weight'] * len(text) / 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert score(FunctionReward("graders.half"), "abcd", weight=3) == 6
    for path, message in (("graders.none", "no function graders.none"), ("nowhere.f", "nowhere"), ("f", "no function")):
        with pytest.raises(ValueError, match=message):
            FunctionReward(path)


def of_a_file(tmp_path):
    path = tmp_path / "my_rewards.py"
    path.write_text("from math import sqrt\n\ndef root(text, row):\n    return sqrt(len(text)) * row['weight']\n")
    return f"{path}:root"


def test_functions_as_rewards(tmp_path):
    """They may be given as they are, and run in workers, which import or unpickle them."""
    scale = 3.0
    rewards = [as_reward(lambda text, row: scale * len(text)), FunctionReward(of_a_file(tmp_path))]
    rewards.append(WeightedSum({"long": lambda text, row: len(text) / 2}))
    assert [score(reward, "abcd", weight=3) for reward in rewards] == [12, 6, 2]
    for reward in rewards[:2]:
        isolated = Isolated(reward)
        assert score(isolated, "abcd", weight=3) == score(reward, "abcd", weight=3)
        isolated.close()
    task = SortDigits(num_digits=2, num_held_out=20, reward=lambda text, row: text.count("1"))
    assert isinstance(task.reward, FunctionReward)


def by_trl(completions, **kwargs): ...


def also_by_trl(prompts, completions): ...


async def asynchronous(text, row): ...


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (by_trl, r"the reward by_trl\(completions, \*\*kwargs\) is called with two .* def by_trl\(text, row\)"),
        (also_by_trl, "the reward also_by_trl.* is called with two arguments, the text of one completion and the row"),
        (asynchronous, "the reward asynchronous is an async function: write a subclass of lgrpo.rewards.AsyncReward"),
        (ExactMatch, r"the reward is the class ExactMatch: give an instance of it, ExactMatch\(…\)"),
        ("exact", "the reward is 'exact': give a reward, such as .* or a function of the text"),
    ],
)
def test_what_is_no_reward(reward, message):
    with pytest.raises(ValueError, match=message):
        SortDigits(num_digits=2, num_held_out=20, reward=reward)


def test_a_function_inside_another_reward_and_in_a_file_with_a_dataclass(tmp_path):
    assert score(Shortest(lambda text, row: 1.0), "abcd") == 1
    (tmp_path / "dc.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n\n@dataclass\nclass Limit:\n"
        "    number: int = 3\n\ndef f(text, row):\n    return float(len(text) < Limit().number)\n"
    )
    reward = Isolated(FunctionReward(f"{tmp_path / 'dc.py'}:f"))
    assert [score(reward, text) for text in ("ab", "abc")] == [1, 0]
    reward.close()
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(ValueError, match=r"broken\.py of the reward .* cannot be imported: ZeroDivisionError"):
        FunctionReward(f"{tmp_path / 'broken.py'}:f")


def test_files_without_the_function(tmp_path):
    path = of_a_file(tmp_path)
    for wrong, message in ((f"{path}s", "has no attribute 'roots'"), ("nowhere.py:f", "there is no file nowhere.py")):
        with pytest.raises(ValueError, match=message):
            FunctionReward(wrong)


def test_async_scores_belong_to_async_rewards():
    with pytest.raises(TypeError, match=r"Waits\.score is async, but Waits is a Reward: subclass AsyncReward"):

        class Waits(Reward):
            async def score(self, prompt, completion): ...

    with pytest.raises(TypeError, match=r"Works\.score is not async, but Works is an AsyncReward: write async def"):

        class Works(AsyncReward):
            def score(self, prompt, completion): ...


def test_weighted_sum_logs_each_reward_by_its_name():
    reward = WeightedSum({"low": LowDigits(), "form": RegexMatch("0")}, {"form": 0.5})
    run = fit(rollouts=2, data={"task": SortDigits(num_digits=2, num_held_out=20, reward=reward)})
    for batch, row in zip(run.recorder.rollouts, run.logged, strict=True):
        assert abs(row["reward/low"] + 0.5 * row["reward/form"] - float(batch.rewards.mean())) < 1e-5
        assert row["reward/low_std"] > 0
    ahead = fit(v=2, rollouts=2, data={"task": SortDigits(2, num_held_out=20, reward=reward), "generate_ahead": True})
    cycle = sum(float(batch.rewards.mean()) for batch in ahead.recorder.rollouts) / 2
    for row in ahead.logged:  # the mean over all rollouts that were sampled together
        assert abs(row["reward/low"] + 0.5 * row["reward/form"] - cycle) < 1e-5
    assert reward.required_fields() == set()
    assert WeightedSum({"a": ExactMatch("x"), "b": ExactMatch("y")}).required_fields() == {"x", "y"}
    with pytest.raises(ValueError, match=r"weights for \['b'\]"):
        WeightedSum({"a": ExactMatch()}, {"b": 1.0})
    with pytest.raises(ValueError, match="no rewards"):
        WeightedSum({})


def test_nested_rewards_are_built_from_yaml(tmp_path):
    (tmp_path / "overlay.yaml").write_text("""
data:
  task:
    class_path: lgrpo.tasks.SortDigits
    init_args:
      reward:
        class_path: lgrpo.rewards.WeightedSum
        init_args:
          rewards:
            right:
              class_path: lgrpo.rewards.ExactMatch
            math:
              class_path: lgrpo.rewards.Isolated
              init_args:
                scoring:
                  timeout: 5
                reward:
                  class_path: lgrpo.rewards.MathVerify
          weights:
            math: 0.5
""")
    configs = Path(__file__).parents[2] / "configs"
    files = [f"--config={configs / 'tiny.yaml'}", f"--config={tmp_path / 'overlay.yaml'}"]
    reward = LGRPOCLI([*files, "--trainer.logger=false"], run=False).datamodule.task.reward
    assert score(reward, "12", answer="12") == 1.5
    assert score(reward, "12.0", answer="12") == 0.5
    assert reward.report() == {
        "reward/right": 0.5,
        "reward/right_std": 0.5,
        "reward/math": 1.0,
        "reward/math_std": 0.0,
    }
    reward.rewards["math"].close()


@pytest.mark.parametrize("answer", [["1"], 1.0, {"value": 1}])
def test_answers_that_exact_match_cannot_match(answer):
    task = DatasetTask(ExactMatch(), [{"question": "1", "answer": answer}])
    with pytest.raises(
        ValueError, match=r"no answer to row 0 of the train set.*write answers as text or integers"
    ) as e:
        fit(data={"task": task})
    assert repr(answer) in str(e.value)
    ExactMatch().check_row({"answer": 1})


class Flaky(AsyncReward):
    """Fails at its first two calls."""

    max_retries = 2
    retry_delay = 0.01

    def __init__(self):
        self.num_calls = 0

    async def score(self, prompt, completion):
        self.num_calls += 1
        if self.num_calls <= 2:
            raise ConnectionError("busy")
        return 1.0


class Impatient(Flaky):
    max_retries = 1


@pytest.mark.parametrize("wrap", [lambda reward: reward, lambda reward: Isolated(reward, Scoring(num_workers=1))])
def test_failed_requests_are_repeated(wrap):
    reward = wrap(Flaky())
    assert score(reward, "a") == 1
    reward.close()


def test_the_last_attempt_may_fail():
    with pytest.raises(ConnectionError, match="busy"):
        score(Impatient(), "a")
