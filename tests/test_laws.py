"""Check the laws of the loop: properties that hold for all settings."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from lgrpo import (
    ClippedLoss,
    ReferenceRefresh,
    RolloutBatch,
    RolloutCallback,
    Sampling,
    TransformersEngine,
    ZeroVarianceMask,
)
from lgrpo.data.sampler import RolloutSampler
from lgrpo.engines import EngineError
from lgrpo.losses import PolicyLogprobs, SequenceMean, TokenMean
from lgrpo.recordings import Recording
from tests.helpers import a_batch, build, fit, largest_difference, tiny_policy
from tests.processes import two_processes


class TestLag:
    def test_on_policy_every_lag_is_zero_and_every_ratio_one(self):
        run = fit(v=1, i=1, rollouts=5)
        assert run.recorder.lags == [0] * 5
        for row in run.logged:
            assert row["train/lag"] == row["train/lag_max"] == 0
            assert abs(row["train/ratio_max"] - 1) <= 1e-5
            assert abs(row["train/ratio_min"] - 1) <= 1e-5

    def test_recomputed_logprobs_give_a_ratio_of_exactly_one(self):
        run = fit(v=1, i=1, rollouts=4, data={"behaviour_logprobs": "policy"}, trainer={"accumulate_grad_batches": 2})
        assert len(run.logged) == 4
        for row in run.logged:
            assert row["train/ratio_max"] == row["train/ratio_min"] == 1.0
            assert row["train/kl_behaviour"] == 0.0

    @pytest.mark.parametrize("share_prompts", [False, True])
    def test_logprobs_are_recomputed_for_the_micro_batches_of_the_first_step(self, share_prompts):
        """Rows that are computed together with others are rounded differently, and the ratio would not be exactly 1."""
        policy, data = tiny_policy(share_prompts=share_prompts), {"behaviour_logprobs": "policy"}
        run = build(v=1, rollouts=2, policy=policy, data=data, trainer={"accumulate_grad_batches": 3})
        recomputed, trained = [], []
        module, step = run.module, run.module.training_step
        policy_logprobs = module.policy_logprobs
        module.policy_logprobs = lambda b: recomputed.append(b.rows.tolist()) or policy_logprobs(b)
        module.training_step = lambda batch, batch_idx: trained.append(batch.rows.tolist()) or step(batch, batch_idx)
        run.trainer.fit(run.module, datamodule=run.data)
        assert len(trained) == 6
        assert recomputed == trained

    @pytest.mark.parametrize(("v", "i", "m"), [(4, 1, 1), (4, 2, 2), (1, 3, 1), (3, 2, 1)])
    def test_lag_is_j_times_i_plus_p(self, v, i, m):
        rollouts = 2 * v + 1
        run = fit(v=v, i=i, rollouts=rollouts, trainer={"accumulate_grad_batches": m})
        assert run.recorder.lags == [(k % v) * i + p for k in range(rollouts) for p in range(i)]
        assert [row["train/lag"] for row in run.logged] == run.recorder.lags

    def test_rollout_k_starts_after_k_times_i_steps(self):
        run = fit(v=2, i=3, rollouts=2, epochs=2, trainer={"accumulate_grad_batches": 2})
        assert run.recorder.started == [(k, 3 * k) for k in range(4)]

    def test_lag_continues_across_stages(self):
        run = fit(v=4, i=1, rollouts=3, epochs=3)
        assert run.recorder.lags == [0, 1, 2, 3, 0, 1, 2, 3, 0]

    @pytest.mark.parametrize("data", [{}, {"generate_ahead": True}, {"lead": 2}, {"lead": 1, "generate_ahead": True}])
    def test_a_schedule_of_v_counts_from_its_own_rollouts(self, data):
        """A change of v syncs; with a lead, rollouts that were sampled before it are trained on after it."""
        run = fit(v={0: 1, 3: 4, 8: None}, rollouts=12, data=data)
        lead = data.get("lead", 0)
        trained = [0, 1, 2, 3, 7, 8]  # number of rollouts trained on at each sync
        synced = [*([0] * (lead > 0)), *(k + lead for k in trained if k + lead < 12)]  # before these rollouts
        steps = [max(0, k - lead) for k in synced]
        assert [record.step for record in run.data.engine.state.ledger] == steps
        held = [max(step for first, step in zip(synced, steps, strict=True) if first <= k) for k in range(12)]
        assert run.recorder.lags == [k - step for k, step in enumerate(held)]

    def test_offline_never_syncs_again(self):
        assert fit(v=None, rollouts=5).recorder.lags == [0, 1, 2, 3, 4]


class TestAhead:
    """Rollouts that are sampled before they are trained on."""

    def test_a_cycle_is_recomputed_by_the_policy_before_its_first_step(self):
        plain = fit(v=3, rollouts=7)
        run = build(v=3, rollouts=7, data={"generate_ahead": True, "behaviour_logprobs": "policy"})
        generate = run.data.engine.generate

        def with_wrong_logprobs(*arguments):
            groups = generate(*arguments)
            for completion in (c for group in groups for c in group):
                completion.logprobs = [value - 0.5 for value in completion.logprobs]
            return groups

        run.data.engine.generate = with_wrong_logprobs
        run.trainer.fit(run.module, datamodule=run.data)
        assert run.recorder.lags == [0, 1, 2, 0, 1, 2, 0]
        for own, expected in zip(run.recorder.rollouts, plain.recorder.rollouts, strict=True):
            assert own.logprobs_from == "policy"
            assert torch.allclose(own.behaviour_logprobs, expected.behaviour_logprobs, atol=1e-5)

    @pytest.mark.parametrize(("v", "lead", "i"), [(3, 2, 1), (1, 2, 1), (2, 1, 2), (4, 1, 1), (1, 1, 2)])
    def test_recomputed_with_a_lead(self, v, lead, i):
        """Also for rollouts that are sampled while training on an earlier one begins."""
        rollouts, data = 9, {"lead": lead, "generate_ahead": True}
        plain = fit(v=v, i=i, rollouts=rollouts, data=data)
        run = fit(v=v, i=i, rollouts=rollouts, data=data | {"behaviour_logprobs": "policy"})
        assert run.recorder.lags == plain.recorder.lags
        for own, expected in zip(run.recorder.rollouts, plain.recorder.rollouts, strict=True):
            assert own.logprobs_from == "policy"
            assert torch.allclose(own.behaviour_logprobs, expected.behaviour_logprobs, atol=1e-5)

    def test_lead_follows_paper_b(self):
        for v, lead in ((4, 0), (3, 2), (2, 5), (1, 1)):
            rollouts = 11
            lags = fit(v=v, rollouts=rollouts, data={"lead": lead}).recorder.lags
            assert lags == [k - v * max(0, (k - lead) // v) for k in range(rollouts)], (v, lead)

    def test_generate_ahead_changes_nothing_but_the_calls(self):
        settings = {"v": 3, "i": 2, "rollouts": 4, "epochs": 2, "loss": ClippedLoss(kl_coef=0.1)}
        callbacks = {"callbacks": [ReferenceRefresh(period=2), ZeroVarianceMask(0.2)]}
        plain = fit(**settings, **callbacks)
        ahead = build(**settings, **callbacks, data={"generate_ahead": True})
        calls, generate = [], ahead.data.engine.generate

        def counted(prompts, *args):
            calls.append([p.position for p in prompts])
            return generate(prompts, *args)

        ahead.data.engine.generate = counted
        ahead.trainer.fit(ahead.module, datamodule=ahead.data)
        assert [len(c) for c in calls] == [12, 12, 8], "3, 3 and the last 2 rollouts of 4 prompts"
        assert largest_difference(plain.weights, ahead.weights) == 0
        assert plain.recorder.lags == ahead.recorder.lags
        assert plain.recorder.started == ahead.recorder.started
        assert [record.step for record in ahead.data.engine.state.ledger] == [0, 6, 12]
        for a, b in zip(plain.recorder.rollouts, ahead.recorder.rollouts, strict=True):
            assert torch.equal(a.tokens, b.tokens)
            assert torch.equal(a.behaviour_logprobs, b.behaviour_logprobs)

    @pytest.mark.parametrize("lead", [0, 1])
    @pytest.mark.parametrize("ahead", [False, True])
    @pytest.mark.parametrize("overlaps", [False, True])
    def test_offline_sampling_ahead_and_in_the_background(self, lead, ahead, overlaps):
        """Without a further sync, nothing but the calls changes: an epoch in one call, or each in the background."""
        settings = {"v": None, "i": 2, "rollouts": 3, "epochs": 2, "loss": ClippedLoss(kl_coef=0.1)}
        plain = fit(**settings)
        engine = TransformersEngine()
        run = build(**settings, data={"engine": engine, "overlap": overlaps, "lead": lead, "generate_ahead": ahead})
        calls, generate = [], engine.generate

        def counted(prompts, *args):
            calls.append(len(prompts))
            return generate(prompts, *args)

        engine.generate = counted
        run.trainer.fit(run.module, datamodule=run.data)
        assert calls == ([12] * 2 if ahead else [4] * 6), "rollouts of 4 prompts"
        assert plain.recorder.lags == run.recorder.lags == list(range(12))
        assert [record.step for record in engine.state.ledger] == [0]
        assert engine.state_dict()["weights"] is not None, "a run can be extended"
        assert largest_difference(plain.weights, run.weights) == 0
        for a, b in zip(plain.recorder.rollouts, run.recorder.rollouts, strict=True):
            assert torch.equal(a.tokens, b.tokens)
            assert torch.equal(a.behaviour_logprobs, b.behaviour_logprobs)

    def test_completions_beyond_max_lag_are_not_trained_on(self):
        run = fit(v=4, i=2, rollouts=4, data={"max_lag": 4})
        assert [row["train/step_skipped"] for row in run.logged] == [0, 0, 0, 0, 0, 1, 1, 1]
        assert max(row["train/lag_max"] for row in run.logged[:5]) == 4
        without = fit(v=4, i=2, rollouts=4, trainer={"max_steps": 5})
        assert largest_difference(run.weights, without.weights) == 0  # SGD does not move in a skipped step

    def test_passes_within_max_lag_are_trained_on(self):
        """With several passes over a rollout, the first of them may be young enough."""
        run = fit(v=1, i=3, rollouts=2, data={"max_lag": 1}, trainer={"accumulate_grad_batches": 2})
        assert [row["train/step_skipped"] for row in run.logged] == [0, 0, 1, 0, 0, 1]
        with pytest.raises(
            ValueError, match=r"data\.max_lag is 1, but with data\.lead 2 .* at least 2 optimizer steps"
        ):
            build(data={"max_lag": 1, "lead": 2})

    def test_an_exhausted_engine_does_not_sample(self):
        """After the last rollout of a cycle the engine may have dropped its weights: another request is an error."""
        run = fit(v=2, rollouts=4)
        engine = run.data.engine
        assert engine.state.exhausted
        assert engine.state_dict()["weights"] is None
        with pytest.raises(EngineError, match="waits for the next sync"):
            engine.generate([], 2, run.data.sampling, 0, run.data.tokenizer)

    def test_the_ledger_has_every_sync(self, tmp_path):
        run = fit(v=3, i=2, rollouts=7, trainer={"default_root_dir": str(tmp_path), "limit_val_batches": 1.0})
        ledger = run.data.engine.state.ledger
        assert [(r.version, r.step) for r in ledger] == [(0, 0), (1, 6), (2, 12)]
        assert len({r.checksum for r in ledger}) == 3
        assert all(r.num_bytes > 0 and r.seconds > 0 for r in ledger)
        written = [json.loads(line) for line in (tmp_path / "syncs.jsonl").read_text().splitlines()]
        assert written == [{**r.as_dict(), "rollout": r.step // 2} for r in ledger]


def test_a_cycle_equals_one_large_rollout_cut_into_mini_batches():
    v, prompts = 4, 4
    cycle = fit(v=v, rollouts=v)
    large = build(v=1, rollouts=1, data={"num_prompts": v * prompts})
    large.trainer.limit_train_batches = 1
    initial = build(v=1, rollouts=1)
    large.trainer.fit(large.module, datamodule=large.data)
    whole = large.recorder.rollouts[0]

    module, group = initial.module, 4 * prompts
    optimizer = torch.optim.SGD(module.policy.parameters(), lr=1e-2)
    assert largest_difference(dict(module.policy.named_parameters()), fresh_weights()) == 0
    for j, small in enumerate(cycle.recorder.rollouts):
        part = whole.select(torch.arange(j * group, (j + 1) * group))
        assert torch.equal(part.tokens, small.tokens)
        assert torch.equal(part.completion_mask, small.completion_mask)
        assert torch.allclose(part.behaviour_logprobs, small.behaviour_logprobs, atol=1e-6)
        part.totals = small.totals
        policy, entropy = module.policy(part.tokens, part.completion_mask, 1.0)
        optimizer.zero_grad()
        module.loss(part, PolicyLogprobs(policy=policy, entropy=entropy)).loss.backward()
        optimizer.step()
    assert largest_difference(cycle.weights, dict(module.policy.named_parameters())) <= 1e-6
    assert largest_difference(cycle.weights, fresh_weights()) > 1e-4, (
        "the weights did not change, so the comparison proves nothing"
    )


def fresh_weights():
    return build().weights


class TestSameGradient:
    @pytest.mark.parametrize("aggregation", [TokenMean("all"), TokenMean("live"), SequenceMean("all")])
    def test_micro_batches(self, aggregation):
        def gradients(m):
            loss = ClippedLoss(kl_coef=0.1, aggregation=aggregation)
            callbacks = [ZeroVarianceMask(0.2)]
            run = fit(v=3, i=2, rollouts=3, loss=loss, callbacks=callbacks, trainer={"accumulate_grad_batches": m})
            return run.recorder.gradients

        whole = gradients(1)
        assert any(float(g.abs().max()) > 1e-3 for g in whole[-1].values())
        for m in (2, 3, 7):
            for a, b in zip(whole, gradients(m), strict=True):
                assert largest_difference(a, b) <= 1e-5

    @pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.slow("starts four ranks"))])
    def test_several_processes(self, tmp_path, devices):
        """DDP over two or four ranks samples the same completions and steps to the same weights as one process."""
        outs = [tmp_path / "one.pt", tmp_path / "several.pt"]
        two_processes.main(1, str(outs[0]))
        command = [sys.executable, "-m", "tests.processes.two_processes", str(devices), str(outs[1])]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
        one, several = map(torch.load, outs)
        assert largest_difference(one["weights"], one["initial"]) > 1e-4
        assert several["world_size"] == devices
        assert largest_difference(one["weights"], several["weights"]) <= 1e-5
        assert len(one["logged"]) == len(several["logged"]) == 6
        for a, b in zip(one["logged"], several["logged"], strict=True):
            names = ("rollout/reward", "train/loss", "train/ratio_max", "train/kl_reference", "train/lag")
            for name in (*names, "train/grad_norm", "train/outside_band_fraction"):
                assert a[name] == pytest.approx(b[name], abs=1e-5), name
        assert one["val/pass@1"] == pytest.approx(several["val/pass@1"], abs=1e-6)
        assert len(list(Path(f"{outs[1]}-rollouts").iterdir())) == 3 * devices, "one file per rank and rollout"
        recorded = [Recording.read(f"{out}-rollouts").table for out in outs]
        for name in ("rollout", "position", "sibling", "token_ids", "reward", "behaviour_step"):
            assert recorded[0][name].to_pylist() == recorded[1][name].to_pylist(), name

    def test_shuffled_siblings(self, monkeypatch):
        """Permute the rows of every group before the rollout is split into micro-batches."""
        plain = fit(v=2, rollouts=3)
        run = build(v=2, rollouts=3)
        sample = RolloutSampler.__call__

        def shuffled(self, rollouts: range, deliver) -> None:
            def deliver_shuffled(batch: RolloutBatch) -> None:
                order = torch.cat([group[torch.randperm(4)] for group in torch.arange(len(batch)).split(4)])
                deliver(batch.select(order))

            sample(self, rollouts, deliver_shuffled)

        monkeypatch.setattr(RolloutSampler, "__call__", shuffled)
        run.trainer.fit(run.module, datamodule=run.data)
        assert not torch.equal(plain.recorder.rollouts[0].tokens, run.recorder.rollouts[0].tokens)
        for a, b in zip(plain.recorder.gradients, run.recorder.gradients, strict=True):
            assert largest_difference(a, b) <= 1e-6

    def test_order_of_callbacks(self):
        class DropLastToken(RolloutCallback):
            def on_rollout_end(self, trainer, pl_module, batch: RolloutBatch):
                last = batch.lengths - 1
                batch.loss_mask[torch.arange(len(batch)), last] = False

        def weights(reverse):
            callbacks = [ZeroVarianceMask(0.3), DropLastToken(), ReferenceRefresh(period=2)]
            callbacks = callbacks[::-1] if reverse else callbacks
            return fit(v=2, rollouts=5, loss=ClippedLoss(kl_coef=0.1), callbacks=callbacks).weights

        assert largest_difference(weights(False), weights(True)) == 0


@pytest.mark.parametrize("aggregation", [TokenMean("live"), SequenceMean("live")])
def test_masking_a_group_equals_deleting_it(aggregation):
    loss = ClippedLoss(kl_coef=0.3, aggregation=aggregation)
    batch = a_batch(size=12, group_size=4)
    torch.manual_seed(1)
    logits = torch.randn(12, 10, requires_grad=True)
    reference = torch.randn(12, 10)

    def gradient(batch: RolloutBatch, rows: torch.Tensor) -> torch.Tensor:
        batch.totals.live_tokens = float(batch.loss_mask.sum())
        batch.totals.live_sequences = float(batch.loss_mask.any(1).sum())
        width = batch.tokens.shape[1]
        logprobs = PolicyLogprobs(
            policy=logits[rows, :width], reference=reference[rows, :width], entropy=torch.zeros(len(rows), width)
        )
        return torch.autograd.grad(loss(batch, logprobs).loss, logits)[0]

    keep = torch.tensor([0, 1, 2, 3, 8, 9, 10, 11])
    deleted = gradient(batch.select(keep), keep)
    unmasked = gradient(batch, torch.arange(12))
    batch.loss_mask[4:8] = False
    masked = gradient(batch, torch.arange(12))
    assert torch.allclose(masked, deleted, atol=1e-7)
    assert not torch.allclose(unmasked, deleted, atol=1e-3)


def test_totals_count_what_is_sampled_and_what_is_trained():
    """The denominators of a run, which the test above sets itself."""
    run = fit(rollouts=3, callbacks=[ZeroVarianceMask(0.3)], trainer={"accumulate_grad_batches": 2})
    masked = 0
    for batch in run.recorder.rollouts:
        sampled, live = batch.completion_mask, batch.loss_mask
        assert batch.totals.all_tokens == sampled.sum()
        assert batch.totals.all_sequences == len(batch)
        assert batch.totals.live_tokens == live.sum()
        assert batch.totals.live_sequences == live.any(1).sum()
        assert batch.totals.signal_tokens == (live & (batch.advantages != 0)).sum()
        masked += int(sampled.sum() - live.sum())
    assert masked > 0


def test_metrics_of_a_rollout_are_those_of_its_rows():
    run = fit(rollouts=3, callbacks=[ZeroVarianceMask(0.3)], data={"sampling": Sampling(max_tokens=3)})
    for batch, row in zip(run.recorder.rollouts, run.logged, strict=True):
        rewards = batch.rewards.double()
        groups = rewards.view(-1, batch.group_size)
        expected = {
            "reward": rewards.mean(),
            "reward_std": rewards.std(correction=0),
            "reward_stderr": groups.mean(1).std() / len(groups) ** 0.5,
            "zero_variance_fraction": (groups.amax(1) == groups.amin(1)).double().mean(),
            "completion_length": batch.completion_mask.sum(1).double().mean(),
            "truncated_fraction": batch.truncated.double().mean(),
            "live_fraction": batch.loss_mask.any(1).double().mean(),
        }
        assert {name: row[f"rollout/{name}"] for name in expected} == pytest.approx(
            {name: float(value) for name, value in expected.items()}, abs=1e-6
        )
    assert {0.0, 1.0}.isdisjoint(row["rollout/truncated_fraction"] for row in run.logged)


def test_a_masked_group_has_no_kl_gradient():
    """An advantage of 0 alone would leave the gradient of the KL term."""
    batch = a_batch(size=4, group_size=4)
    batch.advantages.zero_()
    batch.totals.all_tokens = float(batch.completion_mask.sum())
    policy = torch.randn(4, 10, requires_grad=True)
    logprobs = PolicyLogprobs(policy=policy, reference=torch.randn(4, 10), entropy=torch.zeros(4, 10))
    unmasked = torch.autograd.grad(ClippedLoss(kl_coef=0.5)(batch, logprobs).loss, policy)[0]
    batch.rewards.fill_(1.0)
    ZeroVarianceMask().on_rollout_end(None, None, batch)
    masked = torch.autograd.grad(ClippedLoss(kl_coef=0.5)(batch, logprobs).loss, policy)[0]
    assert float(unmasked.abs().max()) > 0
    assert float(masked.abs().max()) == 0


def one_side_gradient(ratio, advantage, low, high):
    """Return the gradient of importance-weighted REINFORCE with the one-side gate: -A ρ M ∇log π."""
    keep = ((advantage >= 0) & (ratio <= 1 + high)) | ((advantage <= 0) & (ratio >= 1 - low))
    return -advantage * ratio * keep


def test_one_side_gate_with_importance_weight_has_the_gradient_of_the_clip():
    torch.manual_seed(0)
    size = 10_000
    batch = a_batch(size=size, group_size=4)
    mask = batch.completion_mask
    batch.totals.all_tokens = 1.0
    batch.advantages = torch.where(mask, torch.randn(size, 10), 0.0)
    policy = (batch.behaviour_logprobs + 0.5 * torch.randn(size, 10)).requires_grad_()
    output = ClippedLoss(0.2, 0.3)(batch, PolicyLogprobs(policy=policy, entropy=torch.zeros(size, 10)))
    (gradient,) = torch.autograd.grad(output.loss, policy)
    ratio = (policy - batch.behaviour_logprobs).exp().detach()
    assert torch.allclose(gradient, one_side_gradient(ratio, batch.advantages, 0.2, 0.3) * mask, atol=1e-6)
    assert 0.1 < float((output.clipped_low | output.clipped_high)[mask].float().mean()) < 0.9


@pytest.mark.parametrize("centre", ["proximal", "proximal_multiplicative"])
def test_proximal_centre_never_binds_at_one_pass(centre):
    never = fit(v=6, i=1, rollouts=6, learning_rate=3.0, loss=ClippedLoss(0.0, 0.0, centre=centre))
    binds = fit(v=6, i=1, rollouts=6, learning_rate=3.0, loss=ClippedLoss(0.0, 0.0, centre="one"))
    assert all(row["train/clip_fraction_low"] + row["train/clip_fraction_high"] == 0 for row in never.logged)
    assert any(row["train/clip_fraction_low"] + row["train/clip_fraction_high"] > 0 for row in binds.logged)


def test_proximal_centre_binds_from_the_second_pass_on():
    run = fit(v=2, i=3, rollouts=2, learning_rate=3.0, loss=ClippedLoss(0.0, 0.0, centre="proximal"))
    fractions = [row["train/clip_fraction_low"] + row["train/clip_fraction_high"] for row in run.logged]
    assert [f > 0 for f in fractions] == [False, True, True] * 2


def test_nothing_depends_on_global_random_state():
    class Disturb(RolloutCallback):
        def on_rollout_start(self, trainer, pl_module, rollout):
            torch.manual_seed(rollout * 991)
            torch.rand(7)

    assert largest_difference(fit(v=2, rollouts=4).weights, fit(v=2, rollouts=4, callbacks=[Disturb()]).weights) == 0


def test_validation_does_not_change_the_cycle():
    quiet = fit(v=3, i=2, rollouts=7, loss=ClippedLoss(kl_coef=0.1))
    busy = fit(
        v=3,
        i=2,
        rollouts=7,
        loss=ClippedLoss(kl_coef=0.1),
        trainer={"limit_val_batches": 1.0, "val_check_interval": 1, "num_sanity_val_steps": -1},
    )
    assert "val/pass@1" in busy.trainer.callback_metrics
    assert largest_difference(quiet.weights, busy.weights) == 0
    for a, b in zip(quiet.recorder.rollouts, busy.recorder.rollouts, strict=True):
        assert torch.equal(a.tokens, b.tokens)
        assert torch.equal(a.behaviour_step, b.behaviour_step)


def test_prompt_positions_are_consecutive_across_rollouts():
    run = fit(v=2, i=2, rollouts=3, epochs=2)
    positions = [p for batch in run.recorder.rollouts for p in batch.positions[::4].tolist()]
    assert positions == list(range(24))
    assert all(b.rollout == a.rollout + 1 for a, b in pairwise(run.recorder.rollouts))


def test_a_fused_optimizer_is_clipped_like_any_other():
    """Lightning refuses to clip a fused optimizer in bf16-mixed, although nothing is scaled there."""

    def clipped(**options):
        trainer = {"precision": "bf16-mixed", "gradient_clip_val": 1e-3}
        return fit(rollouts=2, trainer=trainer, optimizer=partial(torch.optim.SGD, **options))

    fused, plain = clipped(fused=True), clipped()
    assert largest_difference(fused.weights, plain.weights) < 1e-7
    unclipped = fit(rollouts=2, trainer={"precision": "bf16-mixed"}, optimizer=torch.optim.SGD)
    assert largest_difference(fused.weights, unclipped.weights) > 1e-5
