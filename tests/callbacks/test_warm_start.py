"""Warm starts on episodes: the environment answers the turns of a solution."""

from __future__ import annotations

import pytest

from lgrpo.callbacks import SupervisedWarmStart
from lgrpo.callbacks.demonstrations import Demonstrations
from lgrpo.engines import EnvironmentEngine, Sampling
from lgrpo.environments import Calculator, Environment, ToolEnvironment, Turn
from lgrpo.policy.loading import character_tokenizer
from lgrpo.rewards import ExactMatch
from lgrpo.tasks import Arithmetic, DatasetTask, EnvironmentTask
from lgrpo.types import Prompt
from tests.helpers import MODEL, fit, tiny_policy

CHARACTERS = '0123456789*=[]()"calute'


class AsyncEcho(Environment):
    """Repeats each text; a text with 9 ends the episode."""

    async def reset(self, row):
        self.turns = 0

    async def step(self, text):
        self.turns += 1
        return Turn(observation=f"{self.turns}{text}=", done="9" in text)


def calculator():
    return ToolEnvironment(tools=[Calculator()], parser="python", result_text="{content}=")


def shown(environment, solution, question="12*3="):
    tokenizer = character_tokenizer(CHARACTERS)
    demonstrations = Demonstrations(tokenizer, environment)
    prompt = Prompt(token_ids=[2], text=question, row={"solution": solution}, position=0)
    token_ids, is_trained = demonstrations(prompt)
    return [(tokenizer.decode([token]), is_trained[index]) for index, token in enumerate(token_ids)]


def joined(pairs, trained):
    return "".join(token for token, is_trained in pairs if is_trained is trained)


def test_the_environment_answers_between_the_turns():
    pairs = shown(calculator(), ['[calculate("12*3")]', "36"])
    assert "".join(token for token, _ in pairs) == '[calculate("12*3")]<eos>36=36<eos>'
    assert joined(pairs, trained=True) == '[calculate("12*3")]<eos>36<eos>'
    assert joined(pairs, trained=False) == "36="


def test_an_async_environment_and_its_reset():
    echo = AsyncEcho()
    for _ in range(2):  # the second begins at its reset
        assert joined(shown(echo, ["4", "5", "9"]), trained=False) == "14=25="


def test_a_text_needs_no_environment():
    assert joined(shown(None, "36"), trained=True) == "36<eos>"


def test_solutions_that_do_not_fit_the_environment():
    with pytest.raises(ValueError, match=r"'12\*3=' has 2 turns, but the task has no environment"):
        shown(None, ["1", "2"])
    with pytest.raises(ValueError, match=r"has 2 turns, but the episode ends after turn 1: '9'"):
        shown(AsyncEcho(), ["9", "2"])


def test_a_task_has_templates_of_the_turns():
    source = Arithmetic(num_digits=1, operations=["*"], num_held_out=10)
    task = EnvironmentTask(calculator(), source=source, solution=['[calculate("{question}")]', "{answer}"])
    for row in task.rows("train"):
        assert row["solution"] == [f'[calculate("{row["question"]}")]', row["answer"]]
    task = EnvironmentTask(calculator(), source=source, solution=["{nothing}"])
    with pytest.raises(ValueError, match=r"solution cannot be filled in \(KeyError: 'nothing'\)"):
        task.rows("train")


def test_a_warm_start_teaches_an_episode():
    """On one problem; observed tokens have no loss, so the model learns only what it writes."""
    rows = [{"question": "2*3=", "answer": "6", "solution": ['[calculate("2*3")]', "6"]}]
    task = EnvironmentTask(calculator(), source=DatasetTask(ExactMatch(), rows, rows))
    run = fit(
        rollouts=1,
        policy=tiny_policy(characters=CHARACTERS, config=MODEL | {"max_position_embeddings": 64}),
        callbacks=[SupervisedWarmStart(num_steps=60, batch_size=2, learning_rate=1e-2)],
        data={
            "task": task,
            "engine": EnvironmentEngine(max_turns=2, max_tokens_per_turn=24, limits=None),
            "sampling": Sampling(max_tokens=40),
        },
    )
    assert float(run.recorder.rollouts[0].rewards.mean()) > 0.9
