"""Tests of collating completions into a batch."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

from lgrpo import ClippedLoss
from lgrpo.callbacks import ImprovementMonitor, RolloutLog
from lgrpo.data.collate import Group, collate_rollout, completions_of, concatenate
from lgrpo.engines import Sampling, TransformersEngine
from lgrpo.recordings import Recording, ReplayEngine, RolloutRecorder
from lgrpo.types import RECORDED, Completion, Prompt, RolloutBatch, Span
from tests.helpers import fit, tiny_policy


def collate(prompts, completions):
    given = [Prompt(text="…", token_ids=ids, row={}, position=index) for index, ids in enumerate(prompts)]
    found = [
        Completion(token_ids=ids, logprobs=logprobs, text="…", finish_reason="stop", behaviour_step=3, version=0)
        for ids, logprobs in completions
    ]
    groups = [Group(prompt, [completion], [0.0]) for prompt, completion in zip(given, found, strict=True)]
    return collate_rollout(groups, pad_token_id=9, sampling=Sampling(max_tokens=4), rollout=0)


def test_prompt_completion_padding():
    batch = collate([[1, 2], [3], [4, 5, 6]], [([7], [-0.5]), ([8, 150_000], [-1.25, math.nan]), ([], [])])
    assert batch.tokens.tolist() == [[1, 2, 7], [3, 8, 150_000], [4, 5, 6]]
    assert batch.tokens.dtype == torch.int64
    assert batch.completion_mask.tolist() == [[False, False, True], [False, True, True], [False] * 3]
    assert batch.behaviour_logprobs.dtype == torch.float32
    assert batch.behaviour_logprobs[0].tolist() == [0, 0, -0.5]
    assert batch.behaviour_logprobs[1, 1] == -1.25
    assert batch.behaviour_logprobs[1, 2].isnan(), "not known"
    assert collate([[1]], [([2, 3], [-1, -2])]).behaviour_logprobs.tolist() == [[0, -1, -2]]


def with_spans():
    """Return a batch with a completion of three versions, a whole one and a recorded one."""
    made = [
        Completion(
            token_ids=[11, 12, 13, 14, 15],
            logprobs=[-1.0] * 5,
            text="",
            finish_reason="stop",
            behaviour_step=7,
            version=4,
            earlier=(Span(2, 3, 2), Span(1, 5, 3)),
        ),
        Completion(token_ids=[11], logprobs=[-1.0], text="", finish_reason="stop", behaviour_step=7, version=4),
        Completion(token_ids=[12], logprobs=[-1.0], text="", finish_reason="stop", behaviour_step=RECORDED),
    ]
    prompts = [Prompt(text="", token_ids=[1, 2], row={}, position=index) for index in range(3)]
    groups = [Group(prompt, [completion], [0.0]) for prompt, completion in zip(prompts, made, strict=True)]
    return made, collate_rollout(groups, pad_token_id=9, sampling=Sampling(max_tokens=8), rollout=0)


def test_each_token_has_its_behaviour_step():
    made, batch = with_spans()
    assert made[0].spans == (Span(2, 3, 2), Span(1, 5, 3), Span(2, 7, 4))
    assert batch.token_steps[0].tolist() == [3, 3, 3, 3, 5, 7, 7], "a prompt has its first token's"
    assert batch.first_step.tolist() == [3, 7, RECORDED]
    assert batch.is_recorded.tolist() == [False, False, True]
    assert batch.lag(8)[:2].tolist() == [5, 1]
    assert batch.token_lag(8)[0].tolist() == [5, 5, 5, 5, 3, 1, 1]
    assert bool(batch.token_lag(8)[2].isnan().all())
    again = RolloutBatch.from_state_dict(batch.state_dict())
    assert torch.equal(again.token_steps, batch.token_steps)
    found = completions_of(batch, tiny_policy().tokenizer, Sampling(max_tokens=8))
    assert [[span[:2] for span in c.spans] for c in found] == [[span[:2] for span in c.spans] for c in made]


def test_whole_and_continued_completions_in_one_batch():
    whole, continued = collate([[1, 2]], [([7], [-0.5])]), with_spans()[1]
    assert whole.behaviour_step.ndim == 1, "no memory for what all tokens share"
    joined = concatenate([whole, continued])
    assert joined.token_steps[joined.completion_mask].tolist() == [3, 3, 3, 5, 7, 7, 7, RECORDED]
    assert torch.equal(joined.select(torch.tensor([1])).token_steps, continued.token_steps[:1])


class Reticent(TransformersEngine):
    """An engine of the user's own that returns some completions without a token."""

    def __init__(self, every):
        super().__init__()
        self.every = every

    def sample(self, generation):
        sampled = replace(generation, on_group=None, groups={})
        super().sample(sampled)
        for index, group in sampled.groups.items():
            first = generation.prompts[index].position * len(group)
            nothing = generation.completion([], [], "stop")
            generation.keep(index, [c if (first + j) % self.every else nothing for j, c in enumerate(group)])


class TestEmptyCompletions:
    @pytest.mark.parametrize("accumulate", [1, 3])
    @pytest.mark.parametrize("every", [1, 3])
    def test_they_are_logged_recorded_and_counted(self, tmp_path, every, accumulate):
        """One of three completions, or all of them; all of a micro-batch, too."""
        run = fit(
            rollouts=3,
            loss=ClippedLoss(kl_coef=0.1),
            callbacks=[RolloutLog(every=1, num_groups=4), RolloutRecorder(), ImprovementMonitor()],
            data={"engine": Reticent(every)},
            trainer={"default_root_dir": str(tmp_path), "accumulate_grad_batches": accumulate},
        )
        for batch in run.recorder.rollouts:
            lengths = batch.completion_mask.sum(1).double()
            num_empty = int((lengths == 0).sum())
            assert num_empty == 16 if every == 1 else 5 <= num_empty <= 6
            assert batch.totals.all_sequences == 16
            assert batch.metrics["rollout/completion_length"] == pytest.approx(float(lengths.mean()))
            assert batch.metrics["rollout/reward"] == pytest.approx(float(batch.rewards.double().mean()))
            assert batch.metrics["rollout/live_fraction"] == 1 - num_empty / 16
        assert [row["train/step_skipped"] for row in run.logged] == [float(every == 1)] * 3
        rows = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
        recorded = Recording.read(str(tmp_path / "rollouts")).table.to_pylist()
        assert len(rows) == len(recorded) == 48
        for row, again in zip(rows, recorded, strict=True):
            is_empty = not again["token_ids"]
            assert (row["advantage"] is None) == (again["advantage"] is None) == is_empty
            assert row["live"] is not is_empty
            assert (row["completion"] == again["completion"] == "") or not is_empty

    def test_a_recording_of_them_replays(self, tmp_path):
        trainer = {"default_root_dir": str(tmp_path)}
        fit(rollouts=2, callbacks=[RolloutRecorder()], data={"engine": Reticent(3)}, trainer=trainer)
        run = fit(rollouts=2, v=None, data={"engine": ReplayEngine(str(tmp_path / "rollouts"))})
        assert all(5 <= int((~batch.completion_mask.any(1)).sum()) <= 6 for batch in run.recorder.rollouts)

    def test_nothing_but_a_prompt_of_one_token(self):
        batch = collate([[1], [2]], [([], []), ([], [])])
        policy = tiny_policy()
        policy.build()
        for piece in (batch, *batch.split(2)):
            logprobs, _ = policy(piece.tokens, piece.completion_mask, 1.0)
            assert logprobs.shape == piece.tokens.shape
            assert not logprobs.any()


@pytest.mark.parametrize(("ids", "logprobs"), [([7, 8], [-0.5, None]), (["7", 8], [-0.5, -0.5]), ([7.5], [-0.5])])
def test_values_that_are_not_numbers_raise_an_error(ids, logprobs):
    """numpy would convert None to NaN, which trains as unknown, and a string to a token."""
    with pytest.raises(TypeError):
        collate([[1]], [(ids, logprobs)])
