"""Mistakes of a model with tools, and tools that cannot be used, from the sampled text to what the user sees."""

from __future__ import annotations

import warnings

import pytest

from lgrpo import Sampling, TransformersEngine
from lgrpo.data.collate import completions_of
from lgrpo.engines import EnvironmentEngine
from lgrpo.environments import ToolEnvironment
from lgrpo.rewards import EnvironmentReward
from lgrpo.tasks import EnvironmentTask, SortDigits
from tests.environments.test_tool_environment import hermes
from tests.helpers import MODEL, fit, tiny_policy

CHARACTERS = "".join(map(chr, range(32, 127))) + "\n"


class Register:
    """Adds numbers, and does not know others."""

    def reset(self, **row):
        self.total = 0

    def add(self, number: int) -> int:
        """Add a number to the total.

        Args:
            number: Number to add, not negative.
        """
        if number < 0:
            raise ArithmeticError("a number is negative")
        self.total += number
        return self.total

    def get_reward(self) -> float:
        return float(self.total)


class Untyped:
    def add(self, number) -> int:
        """Add a number.

        Args:
            number: Number to add.
        """


class Scripted(TransformersEngine):
    """Writes the same texts in every episode, one for each turn, the last one for ever."""

    def __init__(self, *texts):
        super().__init__()
        self.texts = texts

    def sample(self, generation):
        tokenizer = generation.tokenizer
        for index, prompt in enumerate(generation.prompts):
            turn = sum(token == tokenizer.eos_token_id for token in prompt.token_ids)
            token_ids = [*tokenizer(self.texts[min(turn, len(self.texts) - 1)]).input_ids, tokenizer.eos_token_id]
            completion = generation.completion(token_ids, [-1.0] * len(token_ids), "stop")
            generation.keep(index, [completion] * generation.num_samples)


def run_of(*texts, environment=Register, **settings):
    """Train on a rollout of 16 episodes in which the model writes these texts; return them as text, and the run."""
    tools = ToolEnvironment(environment, parser="hermes", result_text="\n{content}\n")
    source = SortDigits(num_digits=2, num_held_out=20, reward=EnvironmentReward())
    engine = EnvironmentEngine(None, Scripted(*texts), **{"limits": None} | settings)
    policy = tiny_policy(config=MODEL | {"max_position_embeddings": 1024}, characters=CHARACTERS)
    data = {"task": EnvironmentTask(tools, source), "engine": engine, "sampling": Sampling(max_tokens=900)}
    run = fit(v=1, rollouts=1, policy=policy, data=data)
    (batch,) = run.recorder.rollouts
    return completions_of(batch, run.data.tokenizer, run.data.sampling), run


def shown(episode, run):
    """Return the observations of an episode."""
    return [run.data.tokenizer.decode(episode.token_ids[start:stop]) for start, stop in episode.observed]


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (hermes("add", number=-1), "tool_failed", "add failed with ArithmeticError: a number is negative"),
        (hermes("add", number="two"), "wrong_type", 'must be an integer, but it is "two"'),
        (hermes("add"), "missing_argument", "lacks the argument 'number'"),
        (hermes("add", number=1, times=2), "unknown_argument", "no argument 'times'"),
        (hermes("subtract", number=1), "unknown_tool", "there is no tool 'subtract'"),
        ("<tool_call>add 1</tool_call>", "malformed_call", "cannot be read"),
    ],
)
def test_a_wrong_call_is_an_observation_a_count_and_an_example(call, kind, text):
    """The episode goes on: the next call is executed, and its reward counts."""
    with pytest.warns(UserWarning, match=rf"mistakes that it sees as observations: 16 x {kind}, for example: ") as seen:
        episodes, run = run_of(call, hermes("add", number=3), "The total is 3.")
    assert any(text in str(warning.message) for warning in seen)
    for episode in episodes:
        first, second = shown(episode, run)
        assert first.startswith("\nError: ")
        assert text in first
        assert second == "\n3\n"
        assert episode.turn_rewards == (0.0, 0.0, 3.0)
        assert episode.finish_reason == "stop"
    metrics = run.recorder.rollouts[0].metrics
    assert metrics["rollout/model_errors"] == 16
    assert metrics["environment/failures"] == 0


def test_right_calls_have_no_errors():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        _, run = run_of(hermes("add", number=3), "The total is 3.")
    assert not any("mistakes" in str(warning.message) or "max_turns" in str(warning.message) for warning in seen)
    assert run.recorder.rollouts[0].metrics["rollout/model_errors"] == 0


def test_endless_turns_are_cut_counted_and_shown():
    """The reward is that of the state in which the limit leaves the episode."""
    expected = r"16 of 16 episodes did not end within max_turns \(4\); the last turn of one is '<tool_call>.*\"add\""
    with pytest.warns(UserWarning, match=rf"(?s){expected}.*rollout/truncated_fraction counts them"):
        episodes, run = run_of(hermes("add", number=1), max_turns=4)
    assert run.recorder.rollouts[0].metrics["rollout/truncated_fraction"] == 1
    for episode in episodes:
        assert (len(episode.turns), episode.finish_reason) == (4, "length")
        assert shown(episode, run) == ["\n1\n", "\n2\n", "\n3\n"]
        assert episode.turn_rewards == (0.0, 0.0, 0.0, 4.0)


def test_a_tool_without_types_is_refused_before_the_run():
    with pytest.raises(ValueError, match=r"tool Untyped.add: argument 'number' has no type"):
        run_of("", environment=Untyped)
