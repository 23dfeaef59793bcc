"""Checkpoints omit a reference that is the model the policy was loaded from."""

from __future__ import annotations

import shutil

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lgrpo import ClippedLoss, ReferenceRefresh, RolloutCallback
from lgrpo.callbacks import ExactResume
from lgrpo.cli import is_user_error
from lgrpo.policy import CausalPolicy
from lgrpo.run.resume import ResumeError
from tests.helpers import build, largest_difference, tiny_policy


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Return the folder of a model."""
    folder = tmp_path_factory.mktemp("model")
    policy = tiny_policy()
    policy.build()
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    return folder


def run(folder, source, *, resume=None, callbacks=(), built=False, rollouts=4, **changes):
    """Train a policy that is loaded from a folder, with a checkpoint after each step."""
    save = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    policy = CausalPolicy(str(source))
    own = build(
        v=2,
        rollouts=rollouts,
        loss=ClippedLoss(kl_coef=0.1),
        policy=tiny_policy(),
        optimizer=torch.optim.AdamW,
        callbacks=[*callbacks, ExactResume(), save],
        trainer={"default_root_dir": str(folder), "enable_checkpointing": True},
        **changes,
    )
    own.module.policy = policy
    if built:
        policy.build()
        with torch.no_grad():
            next(policy.parameters()).add_(1.0)
    own.trainer.fit(own.module, datamodule=own.data, ckpt_path=resume)
    return own


def saved(path):
    state = torch.load(path, weights_only=True)
    return [name for name in state["state_dict"] if name.startswith("reference.")], state["grpo"]["initial_reference"]


def assert_same(one, other):
    assert largest_difference(one.weights, other.weights) == 0
    assert largest_difference(dict(one.module.reference_weights()), dict(other.module.reference_weights())) == 0


@pytest.fixture(scope="module")
def straight(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    return folder, run(folder, source)


@pytest.mark.parametrize("step", [1, 2, 3])
def test_omitted_and_restored_exactly(source, straight, tmp_path, step):
    folder, whole = straight
    weights, checksum = saved(folder / f"step={step}.ckpt")
    assert not weights
    assert checksum
    resumed = run(tmp_path, source, resume=str(folder / f"step={step}.ckpt"))
    assert_same(resumed, whole)
    assert largest_difference(dict(whole.module.reference_weights()), dict(whole.module.policy_weights())) > 0
    assert saved(tmp_path / "step=4.ckpt") == ([], checksum), "it still is that model"


def test_a_refreshed_reference_is_stored(source, tmp_path):
    whole = run(tmp_path, source, callbacks=[ReferenceRefresh(period=2)])
    assert [bool(saved(tmp_path / f"step={step}.ckpt")[0]) for step in (1, 2, 3, 4)] == [False, False, True, True]
    for step in (1, 3):
        checkpoint = str(tmp_path / f"step={step}.ckpt")
        assert_same(run(tmp_path / str(step), source, callbacks=[ReferenceRefresh(period=2)], resume=checkpoint), whole)


def test_a_reference_that_other_code_changed_is_stored(source, tmp_path):
    class Changes(RolloutCallback):
        def on_rollout_start(self, trainer, pl_module, rollout):
            if rollout == 1:
                next(pl_module.reference.parameters()).data.add_(1.0)

    whole = run(tmp_path, source, callbacks=[Changes()])
    assert [bool(saved(tmp_path / f"step={step}.ckpt")[0]) for step in (1, 2)] == [False, True]
    assert_same(run(tmp_path / "again", source, resume=str(tmp_path / "step=2.ckpt")), whole)


def test_a_policy_whose_weights_were_changed_before_the_run(source, straight, tmp_path):
    folder, whole = straight
    run(tmp_path, source, built=True, rollouts=1)
    assert saved(tmp_path / "step=1.ckpt")[0], "the source does not have them"
    assert_same(run(tmp_path / "again", source, built=True, resume=str(folder / "step=2.ckpt")), whole)


def test_a_changed_source_is_refused(source, straight, tmp_path):
    folder, _ = straight
    shutil.copytree(source, tmp_path / "model")
    policy = CausalPolicy(str(source))
    policy.build()
    with torch.no_grad():
        policy.model.model.norm.weight[0] += 1e-3
    policy.model.save_pretrained(tmp_path / "model")
    with pytest.raises(ResumeError, match=r"the reference of this run is the model .* that now has other weights") as e:
        run(tmp_path, tmp_path / "model", resume=str(folder / "step=2.ckpt"))
    assert is_user_error(e.value)


def test_a_source_without_weights_is_one_sentence(source, straight, tmp_path):
    folder, _ = straight
    shutil.copytree(source, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"the weights of policy\.name '.*' cannot be loaded: ") as error:
        run(tmp_path, tmp_path / "model", resume=str(folder / "step=2.ckpt"))
    assert "\n" not in str(error.value)
    assert is_user_error(error.value)


def test_an_evaluation_needs_no_reference(source, straight):
    folder, whole = straight
    own = build(loss=ClippedLoss(kl_coef=0.1), trainer={"limit_val_batches": 1.0})
    own.module.policy = CausalPolicy(str(source))
    own.trainer.validate(own.module, datamodule=own.data, ckpt_path=str(folder / "step=4.ckpt"), verbose=False)
    assert largest_difference(own.weights, whole.weights) == 0
