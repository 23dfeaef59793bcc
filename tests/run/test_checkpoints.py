"""Checkpoints on disk: one copy of each moment."""

from __future__ import annotations

import errno
import os

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lgrpo.callbacks import ExactResume
from lgrpo.run.checkpoints import PART, newest_checkpoint
from tests.helpers import build, fit, largest_difference


def settings(folder):
    checkpoint = ModelCheckpoint(
        dirpath=folder,
        filename="{step}",
        every_n_train_steps=1,
        save_top_k=-1,
        save_last=True,
        enable_version_counter=False,
    )
    return {
        "v": 2,
        "rollouts": 4,
        "callbacks": [ExactResume(), checkpoint],
        "trainer": {"enable_checkpointing": True, "default_root_dir": str(folder)},
    }


def is_same_file(a, b):
    return a.stat().st_ino == b.stat().st_ino


def test_last_is_a_link_to_the_checkpoint_of_its_step(tmp_path):
    run = fit(**settings(tmp_path))
    last, newest, older = (tmp_path / f"{name}.ckpt" for name in ("last", "step=4", "step=3"))
    assert is_same_file(last, newest)
    assert not is_same_file(last, older)
    assert not list(tmp_path.glob(f"*{PART}"))
    newest.unlink()
    assert newest_checkpoint(tmp_path) == last
    resumed = build(**settings(tmp_path) | {"epochs": 2})
    resumed.trainer.fit(resumed.module, datamodule=resumed.data, ckpt_path=str(last))
    whole = fit(**settings(tmp_path / "whole") | {"epochs": 2})
    assert largest_difference(resumed.weights, whole.weights) == 0
    assert largest_difference(run.weights, whole.weights) > 0
    assert torch.load(older, weights_only=True)["global_step"] == 3, "not overwritten through a link"


def test_a_checkpoint_of_changed_weights_is_written(tmp_path):
    run = fit(v=1, rollouts=1, callbacks=[ExactResume()], trainer={"default_root_dir": str(tmp_path)})
    first, second, third = (tmp_path / f"{name}.ckpt" for name in ("first", "second", "third"))
    run.trainer.save_checkpoint(first)
    run.trainer.save_checkpoint(second)
    with torch.no_grad():
        next(run.module.policy.parameters()).add_(1.0)
    run.trainer.save_checkpoint(third)
    assert is_same_file(first, second)
    assert not is_same_file(second, third)
    run.trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert (tmp_path / "weights.ckpt").stat().st_size < third.stat().st_size


def test_each_checkpoint_has_its_callbacks_state(tmp_path):
    """A second ModelCheckpoint has another best model when it saves."""
    best = ModelCheckpoint(
        dirpath=tmp_path / "best", filename="{step}", monitor="rollout/reward", mode="max", every_n_train_steps=1
    )
    own = settings(tmp_path)
    fit(**own | {"callbacks": [*own["callbacks"], best]})
    states = torch.load(best.best_model_path, weights_only=True)["callbacks"].values()
    assert [state["best_model_path"] for state in states if state.get("monitor")] == [best.best_model_path]


@pytest.mark.parametrize("number", [errno.EPERM, errno.EXDEV])
def test_a_file_system_without_links(tmp_path, monkeypatch, number):
    def link(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", link)
    fit(**settings(tmp_path))
    last, newest = tmp_path / "last.ckpt", tmp_path / "step=4.ckpt"
    assert not is_same_file(last, newest)
    assert last.read_bytes()[:2] == newest.read_bytes()[:2] == b"PK"
