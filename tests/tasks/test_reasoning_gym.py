"""Tasks over reasoning-gym's generators."""

from __future__ import annotations

import os

import pytest

from lgrpo.rewards import ExactMatch
from lgrpo.rewards.reasoning_gym import ReasoningGymScore
from lgrpo.tasks import ReasoningGym
from lgrpo.tasks.reasoning_gym import UNSTABLE

pytest.importorskip("reasoning_gym")


def test_rows_come_from_the_generator():
    task = ReasoningGym("spell_backward", num_train=20, num_validation=5, seed=2)
    train, validation = task.rows("train"), task.rows("validation")
    assert (len(train), len(validation)) == (20, 5)
    assert not {row["question"] for row in train} & {row["question"] for row in validation}
    assert train[0]["metadata"]["source_dataset"] == "spell_backward"
    assert train == ReasoningGym("spell_backward", num_train=20, num_validation=5, seed=2).rows("train")
    assert train != ReasoningGym("spell_backward", num_train=20, num_validation=5, seed=3).rows("train")
    assert isinstance(task.reward, ReasoningGymScore)
    assert "<answer>" in task.template.prompt


def test_config_reaches_the_generator():
    task = ReasoningGym("chain_sum", config={"min_digits": 6, "max_digits": 6}, num_train=3, num_validation=0)
    assert all(row["metadata"]["difficulty"]["num_digits"] == (6, 6) for row in task.rows("train"))
    assert task.rows("validation") == []


def test_validation_problems_are_left_out_of_the_training_set():
    """With sums of single digits, most questions of one set are in the other."""
    config = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    task = ReasoningGym("chain_sum", config=config, num_train=50, num_validation=50)
    train = [row["question"] for row in task.rows("train")]
    assert len(train) == 50
    assert not set(train) & {row["question"] for row in task.rows("validation")}
    with pytest.raises(ValueError, match=r"'chain_sum' only .* are not in the validation set, but num_train is 50"):
        ReasoningGym("chain_sum", config=config, num_train=50, num_validation=2000).rows("train")


def test_composite_mixes_generators():
    datasets = [{"name": "spell_backward"}, {"name": "chain_sum", "weight": 2.0, "config": {"max_terms": 3}}]
    task = ReasoningGym("composite", config={"datasets": datasets}, num_train=30, num_validation=0)
    assert {row["metadata"]["source_dataset"] for row in task.rows("train")} == {"spell_backward", "chain_sum"}


def test_wrong_names_and_settings_are_rejected():
    with pytest.raises(ValueError, match=r"no generator 'spell_backwards'; similar names: .*'spell_backward'"):
        ReasoningGym("spell_backwards")
    with pytest.raises(ValueError, match="'chain_sum' rejects the config"):
        ReasoningGym("chain_sum", config={"min_term": 3})
    with pytest.raises(ValueError, match="'chain_sum' rejects the config"):
        ReasoningGym("chain_sum", config={"min_terms": 9, "max_terms": 2}, reward=ExactMatch())
    with pytest.raises(ValueError, match=r"config may not set \['seed'\]"):
        ReasoningGym("chain_sum", config={"seed": 3})


def test_unstable_generators_require_a_hash_seed(monkeypatch):
    """They iterate over a set, whose order differs between processes."""
    (name, *_) = UNSTABLE
    monkeypatch.delitem(os.environ, "PYTHONHASHSEED", raising=False)
    with pytest.raises(ValueError, match=f"{name!r} makes different problems in every process: set PYTHONHASHSEED"):
        ReasoningGym(name)
    monkeypatch.setitem(os.environ, "PYTHONHASHSEED", "0")
    assert ReasoningGym(name, num_train=2, num_validation=0).rows("train")
