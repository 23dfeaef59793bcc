"""Named datasets: rows with the fields of the hub, and rows with separate fields."""

from __future__ import annotations

import json

import pytest
from jsonargparse import ArgumentParser

from lgrpo import Completion, Prompt
from lgrpo.rewards import CountdownEquation, MathVerify, NumericMatch, RegexMatch
from lgrpo.tasks import AIME24, GSM8K, MATH, MATH500, Countdown, DeepScaleR, GeneratedCountdown, Task, Template


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def score(task: Task, row, text: str) -> float:
    completion = Completion(token_ids=[1], logprobs=[0.0], text=text, finish_reason="stop", behaviour_step=0)
    return task.reward([Prompt(token_ids=[1], text="", row=row, position=0)], [completion])[0]


def test_gsm8k_separates_solution_and_answer(tmp_path):
    hub = {"question": "6 boxes of 250?", "answer": "Each has 250.\nIn all 6*250=<<6*250=1500>>1500.\n#### 1,500"}
    apart = {"question": "6 boxes of 250?", "answer": "1500", "solution": "Each has 250.\nIn all 6*250=1500."}
    task = GSM8K(train=write(tmp_path / "hub.jsonl", [hub]), validation=write(tmp_path / "own.jsonl", [apart]))
    assert task.rows("train") == task.rows("validation") == [apart]
    assert isinstance(task.reward, NumericMatch)
    assert score(task, apart, "so 1,500") == 1.0
    assert task.template.prompt.format_map(apart).startswith("6 boxes of 250?\n\n")
    shown = GSM8K(train=[hub, {**hub, "question": "again?"}], num_examples=1).template
    assert shown.example_answer.format_map(shown.examples[0]) == apart["solution"] + "\nThe answer is 1500."
    assert GSM8K(train=[{"question": "?", "answer": "-3 #### -3"}]).rows("train")[0]["answer"] == "-3"


def test_math_reads_the_answer_from_the_box():
    solution = r"Since $x=\boxed{2}$, the answer is $\boxed{\frac{1}{2^{3}}}$."
    hub = {"problem": "What is $x$?", "solution": solution, "level": "Level 5", "type": "Algebra"}
    (row,) = MATH(train=[hub]).rows("train")
    assert (row["question"], row["answer"], row["solution"]) == ("What is $x$?", r"\frac{1}{2^{3}}", solution)
    task = MATH(train=[hub], reward=MathVerify())
    assert score(task, row, r"I find \boxed{1/8}") == 1.0
    assert score(task, row, r"I find \boxed{1/2}") == 0.0
    assert "\\boxed{}" in task.template.prompt.format_map(row)
    apart = {"question": "What?", "answer": "3", "solution": r"\boxed{4}"}
    assert MATH(train=[apart]).rows("train") == [apart]
    assert MATH(train=[apart], answer_from_solution=True).rows("train") == [{**apart, "answer": "4"}]


def test_math_reads_boxes_without_braces_and_rejects_missing_ones():
    def answers(*solutions):
        rows = MATH(train=[{"problem": "?", "solution": s} for s in solutions]).rows("train")
        return [row["answer"] for row in rows]

    assert answers(r"\boxed 7", r"\fbox{B}", r"$\boxed{3}$ or $\boxed 4$.") == ["7", "B", "4"]
    assert answers(r"$\boxed 4$ or $\boxed{3}$.") == ["3"]
    assert answers(r"\boxed{}", r"\boxed{1}") == ["1"]
    with pytest.raises(ValueError, match=r"row 1: the row has no answer, and its solution no \\boxed"):
        answers(r"\boxed{1}", "four")
    with pytest.raises(ValueError, match="row 0: the row has neither an answer nor a solution"):
        MATH(train=[{"problem": "?"}]).rows("train")
    with pytest.raises(ValueError, match="no row of the train set is left"):
        answers(r"\boxed{}")


@pytest.mark.parametrize("name", [MATH500, AIME24])
def test_validation_sets_have_no_training_rows_by_default(name, tmp_path):
    path = write(tmp_path / "test.jsonl", [{"problem": "?", "answer": "204", "solution": "…"}])
    assert [(row["question"], row["answer"]) for row in name(path).rows("validation")] == [("?", "204")]
    with pytest.raises(ValueError, match=f"{name.__name__} has no training set"):
        name(path).rows("train")
    assert len(name(path, train=path).rows("train")) == 1


def test_deepscaler_leaves_out_excluded_problems(tmp_path):
    test = [{"problem": "Find  $x+1$.", "answer": "1", "solution": ""}]
    train = [{"problem": f"Find $x+{i}$", "answer": "1", "solution": ""} for i in range(5)]
    path = write(tmp_path / "test.jsonl", test)
    task = DeepScaleR(train=train, exclude=path, validation=path)
    assert [row["question"][-2] for row in task.rows("train")] == ["0", "2", "3", "4"]
    assert [row["question"] for row in task.rows("validation")] == ["Find  $x+1$."]
    assert len(DeepScaleR(train=train).rows("train")) == 5
    assert DeepScaleR(train=train).rows("validation") == []
    stream = DeepScaleR(train=train, exclude=path, streaming=True).train_stream()
    assert len(list(stream)) == 4
    with pytest.raises(ValueError, match=r"line 1: a row of task\.exclude has no question or problem"):
        DeepScaleR(train=train, exclude=write(tmp_path / "other.jsonl", [{"text": "?"}])).rows("train")


def test_countdown_holds_out_rows_and_scores_equations():
    rows = [{"nums": [44, 19, 35], "target": 98 + i} for i in range(5)]
    task = Countdown(train=rows, num_held_out=2)
    assert (len(task.rows("train")), len(task.rows("validation"))) == (3, 2)
    text = task.template.prompt.format_map(rows[0])
    assert "[44, 19, 35]" in text
    assert "98" in text
    assert score(task, rows[0], "<answer> 44 + 19 + 35 </answer>") == 1.0
    assert len(Countdown(train=rows, validation=rows[:2]).rows("train")) == 5
    assert len(list(Countdown(train=rows, streaming=True).train_stream())) == 5
    with pytest.raises(ValueError, match="row 0: nums is text, not a list of numbers"):
        Countdown(train=[{"nums": "1, 2", "target": 3}], num_held_out=0).rows("train")


def test_generated_countdown_is_solvable_and_reproducible():
    task = GeneratedCountdown(num_train=300, num_validation=50, seed=3)
    train, validation = task.rows("train"), task.rows("validation")
    assert (len(train), len(validation)) == (300, 50)
    assert {len(row["nums"]) for row in train} == {3, 4}
    for row in (*train, *validation):
        assert 10 <= row["target"] <= 99
        assert score(task, row, f"<answer>{row['solution']}</answer>") == 1.0
    problems = [(tuple(sorted(row["nums"])), row["target"]) for row in (*train, *validation)]
    assert len(set(problems)) == 350
    assert {sign for row in train for sign in "+-*/" if sign in row["solution"]} == set("+-*/")
    assert GeneratedCountdown(num_train=300, num_validation=50, seed=3).rows("train") == train
    assert GeneratedCountdown(num_train=300, num_validation=50, seed=4).rows("train") != train
    with pytest.raises(ValueError, match="too few different problems"):
        GeneratedCountdown(num_train=100, num_numbers=[2], max_number=2)
    with pytest.raises(ValueError, match=r"num_numbers is \[9\]"):
        GeneratedCountdown(num_numbers=[9])
    with pytest.raises(ValueError, match="min_target is 100, above max_target"):
        GeneratedCountdown(min_target=100)


@pytest.mark.parametrize("name", [GSM8K, MATH, MATH500, AIME24, DeepScaleR, Countdown])
def test_named_tasks_are_built_by_class_path(name, tmp_path):
    """With their own and common settings, a partly changed template and another reward."""
    row = {"question": "?", "problem": "?", "answer": "1", "solution": r"\boxed{1}", "nums": [1], "target": 1}
    path = write(tmp_path / "a.jsonl", [row] * 4)
    parser = ArgumentParser()
    parser.add_subclass_arguments(Task, "task")
    configuration = {
        "class_path": f"lgrpo.tasks.{name.__name__}",
        "init_args": {
            "train": path,
            "validation": path,
            "num_train": 3,
            "subset_seed": 5,
            "template": {"system": "Be brief.", "chat": True},
            "reward": {"class_path": "lgrpo.rewards.RegexMatch", "init_args": {"pattern": "1"}},
        },
    }
    task = parser.instantiate(parser.parse_object({"task": configuration})).task
    assert type(task) is name
    assert (len(task.rows("train")), len(task.rows("validation"))) == (3, 4)
    assert isinstance(task.reward, RegexMatch)
    plain = name(train=[row], validation=[row])
    assert task.template == Template(
        prompt=plain.template.prompt, example_answer=plain.template.example_answer, system="Be brief.", chat=True
    )


def test_named_tasks_have_default_rewards():
    row = {"question": "?", "answer": "1", "nums": [1], "target": 1}
    rewards = {GSM8K: NumericMatch, MATH: MathVerify, DeepScaleR: MathVerify, Countdown: CountdownEquation}
    rewards |= {MATH500: MathVerify, AIME24: MathVerify}
    for name, reward in rewards.items():
        assert type(name(train=[row], validation=[row]).reward) is reward
