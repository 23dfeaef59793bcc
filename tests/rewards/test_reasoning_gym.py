"""Scores of reasoning-gym's generators."""

from __future__ import annotations

import sys

import dill
import pytest

from lgrpo import Completion, Prompt
from lgrpo.rewards.reasoning_gym import ReasoningGymScore, generator


def score(reward, row, text):
    completion = Completion(token_ids=[1], logprobs=[0.0], text=text, finish_reason="stop", behaviour_step=0)
    return reward([Prompt(token_ids=[1], text="", row=row, position=0)], [completion])[0]


def first(name, **config):
    pytest.importorskip("reasoning_gym")
    return generator(name, config, seed=1, size=1)[0]


def test_answer_is_the_last_tagged_one_or_the_whole_text():
    reward, row = ReasoningGymScore(), first("chain_sum")
    answer = row["answer"]
    assert score(reward, row, answer) == score(reward, row, f" {answer}\n") == 1.0
    assert score(reward, row, f"<answer>1</answer> no, <answer>\n{answer} </answer>.") == 1.0
    assert score(reward, row, f"<answer>{answer}</answer> or <answer>1</answer>") < 1.0
    assert score(reward, row, "") == 0.0
    assert reward.final_answer(" a <answer> b </answer> c") == "b"
    assert reward.final_answer(" a ") == "a"
    assert reward.final_answer(" \n") is None


def test_every_valid_solution_is_right():
    """A puzzle with many solutions, whose row has no answer."""
    row = first("graph_color", min_num_vertices=3, max_num_vertices=3, edge_probability=0.9)
    assert row["answer"] is None
    colours = "{" + ", ".join(f'"{v}": {v + 1}' for v in range(3)) + "}"
    assert score(ReasoningGymScore(), row, f"<answer>{colours}</answer>") == 1.0
    assert score(ReasoningGymScore(), row, "<answer>{}</answer>") < 1.0
    assert score(ReasoningGymScore(), row, "I do not know") < 1.0


def test_answer_that_raises_an_error_scores_0():
    row = first("chain_sum")
    broken = {**row, "answer": 3}
    assert score(ReasoningGymScore(), broken, "<answer>4</answer>") == 0.0


def test_unknown_generators_are_rejected():
    pytest.importorskip("reasoning_gym")
    row = first("chain_sum")
    with pytest.raises(ValueError, match="names no generator"):
        ReasoningGymScore().check_row({"metadata": {}})
    with pytest.raises(ValueError, match=r"no generator 'chainsum'; similar names: .*'chain_sum'"):
        ReasoningGymScore().check_row({"metadata": {"source_dataset": "chainsum"}})
    with pytest.raises(ValueError, match="no generator 'chainsum'"):
        ReasoningGymScore("chainsum")
    with pytest.raises(ValueError, match="set its name, too"):
        ReasoningGymScore(config={"max_terms": 3})
    ReasoningGymScore().check_row(row)
    assert score(ReasoningGymScore("chain_sum"), {**row, "metadata": {}}, row["answer"]) == 1.0


def test_reward_can_be_pickled():
    reward, row = ReasoningGymScore(), first("chain_sum")
    reward.check_row(row)
    assert score(dill.loads(dill.dumps(reward)), row, row["answer"]) == 1.0


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lgrpo\[gym\]'"):
        ReasoningGymScore("chain_sum")
