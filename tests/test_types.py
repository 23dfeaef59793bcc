"""Tests of RolloutBatch: splitting, trimming, checkpointing."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from lgrpo import RolloutBatch
from lgrpo.types import StepTotals
from tests.helpers import a_batch


def test_pieces_hold_every_row_once_and_are_balanced():
    batch = a_batch(size=40, width=60)
    pieces = batch.split(4)
    rows = torch.cat([piece.rows for piece in pieces])
    assert sorted(rows.tolist()) == list(range(40))
    tokens = [int(piece.lengths.sum()) for piece in pieces]
    assert max(tokens) - min(tokens) <= int(batch.lengths.max())


def test_pieces_are_trimmed_to_their_longest_row():
    for piece in a_batch(size=12, width=40).split(5):
        assert piece.tokens.shape[1] == int(piece.lengths.max())
        assert bool(piece.attention_mask.any(0).all())


def test_rows_keep_their_values():
    batch = a_batch(size=12, width=30)
    for piece in batch.split(3):
        width = piece.tokens.shape[1]
        for f in fields(batch):
            whole, part = getattr(batch, f.name), getattr(piece, f.name)
            if isinstance(whole, Tensor):
                expected = whole[piece.rows, :width] if whole.ndim == 2 else whole[piece.rows]
                assert torch.equal(expected, part), f.name


def test_rows_keep_their_notes():
    batch = a_batch(size=12)
    batch.notes = [{"row": row} if row % 2 else None for row in range(12)]
    for piece in batch.split(3):
        assert piece.notes == [batch.notes[row] for row in piece.rows.tolist()]


def test_rows_without_loss_are_left_out_but_no_piece_is_empty():
    batch = a_batch(size=8)
    batch.loss_mask[2:] = False
    assert sorted(r for piece in batch.split(2) for r in piece.rows.tolist()) == [0, 1]
    assert [len(piece) for piece in batch.split(5)] == [1] * 5
    batch.loss_mask[:] = False
    assert [len(piece) for piece in batch.split(3)] == [1] * 3


def test_a_batch_without_rows():
    batch = a_batch(size=8)
    batch.totals, batch.metrics = StepTotals(all_tokens=5.0), {"rollout/reward": 1.0}
    batch.contexts = batch.attention_mask.long()
    batch.kept_ids, batch.kept_counts = torch.zeros(8, 3, dtype=torch.int32), torch.zeros(8, 10, dtype=torch.int32)
    batch.reward_parts, batch.notes = torch.zeros(8, 2, 3), [None] * 8
    empty = batch.empty()
    for f in fields(empty):
        value = getattr(empty, f.name)
        assert not isinstance(value, Tensor) or len(value) == 0, f.name
    assert (len(empty), len(empty.num_read), empty.notes) == (0, 0, None)
    assert (empty.totals, empty.metrics, empty.rollout) == (batch.totals, batch.metrics, batch.rollout)
    assert len(empty.lag(3)) == len(empty.token_lag(3)) == len(empty.is_known) == 0


def test_more_pieces_than_rows_is_refused():
    with pytest.raises(ValueError, match=r"8 completions .* 9 micro-batches"):
        a_batch(size=8).split(9)


def test_survives_a_checkpoint_without_executing_code(tmp_path):
    batch = a_batch()
    batch.totals = StepTotals(all_tokens=5.0)
    batch.metrics = {"rollout/reward": 0.5}
    torch.save(batch.state_dict(), tmp_path / "batch.pt")
    again = RolloutBatch.from_state_dict(torch.load(tmp_path / "batch.pt", weights_only=True))
    for f in fields(batch):
        a, b = getattr(batch, f.name), getattr(again, f.name)
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b, f.name


def test_lightning_moves_it_without_losing_the_original():
    from lightning.fabric.utilities import move_data_to_device

    batch = a_batch()
    moved = move_data_to_device(batch, torch.device("meta"))
    assert moved.tokens.device.type == "meta"
    assert batch.tokens.device.type == "cpu"
    assert moved.group_size == 4


def test_the_last_step_of_a_completion():
    batch = a_batch(size=4)
    assert batch.last_step.tolist() == [0] * 4
    batch.behaviour_step = torch.where(batch.completion_mask.cumsum(1) > 1, 7, 2)
    several = batch.completion_mask.sum(1) > 1
    assert batch.last_step.tolist() == torch.where(several, 7, 2).tolist()
    assert batch.first_step.tolist() == [2] * 4
