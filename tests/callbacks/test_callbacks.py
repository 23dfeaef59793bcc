"""Check the effect of each callback on a run."""

from __future__ import annotations

import json

import lightning as L
import pytest
import torch

from lgrpo import (
    CausalPolicy,
    ClippedLoss,
    Evaluation,
    ReferenceRefresh,
    RolloutCallback,
    RolloutLog,
    Sampling,
    SupervisedWarmStart,
    ZeroVarianceMask,
)
from lgrpo.tasks import SortDigits
from tests.helpers import LowDigits, build, fit, largest_difference


class Snapshots(L.Callback):
    """Copies of policy and reference at the beginning of every step."""

    def __init__(self):
        self.policy, self.reference = [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.policy.append({n: p.detach().clone() for n, p in pl_module.policy.named_parameters()})
        self.reference.append({n: p.detach().clone() for n, p in pl_module.reference.named_parameters()})


def snapshots(refresh, rollouts=3, epochs=2, lead=0):
    seen = Snapshots()
    callbacks = [refresh, seen] if refresh else [seen]
    fit(
        rollouts=rollouts,
        epochs=epochs,
        loss=ClippedLoss(kl_coef=0.1),
        callbacks=callbacks,
        data={"lead": lead},
    )
    return seen


class TestReferenceRefresh:
    def test_without_it_the_reference_never_changes(self):
        seen = snapshots(None)
        assert all(largest_difference(seen.reference[0], later) == 0 for later in seen.reference)
        assert largest_difference(seen.policy[0], seen.policy[-1]) > 1e-4

    def test_once_per_stage(self):
        seen = snapshots(ReferenceRefresh())
        for k in range(6):
            expected = seen.policy[0] if k < 3 else seen.policy[3]
            assert largest_difference(seen.reference[k], expected) == 0

    def test_every_two_rollouts(self):
        seen = snapshots(ReferenceRefresh(period=2))
        for k in range(6):
            assert largest_difference(seen.reference[k], seen.policy[k // 2 * 2]) == 0

    @pytest.mark.parametrize("lead", [1, 2])
    def test_a_lead_of_sampling_does_not_move_it(self, lead):
        """The reference follows training, also in the last rollouts, when nothing is left to sample."""
        for refresh, period in ((ReferenceRefresh(), 3), (ReferenceRefresh(period=2), 2), (ReferenceRefresh(5), 5)):
            seen = snapshots(refresh, lead=lead)
            for k in range(6):
                expected = seen.policy[k // period * period]
                assert largest_difference(seen.reference[k], expected) == 0, (period, k)

    def test_a_stage_that_ends_inside_a_rollout(self):
        """With i = 2 an epoch of five batches ends after the first step on its third rollout."""
        seen = Snapshots()
        loss, trainer = ClippedLoss(kl_coef=0.1), {"limit_train_batches": 5}
        fit(i=2, rollouts=3, epochs=3, loss=loss, callbacks=[ReferenceRefresh(), seen], trainer=trainer)
        for step in range(15):
            assert largest_difference(seen.reference[step], seen.policy[step // 5 * 5]) == 0, step

    def test_a_second_fit_with_the_same_callback(self):
        callback = ReferenceRefresh(period=2)
        first, second = snapshots(callback), snapshots(callback)
        assert all(largest_difference(a, b) == 0 for a, b in zip(first.reference, second.reference, strict=True))

    def test_moving_average(self):
        seen = snapshots(ReferenceRefresh(period=1, decay=0.75))
        for k in range(1, 6):
            for name, tensor in seen.reference[k].items():
                expected = 0.75 * seen.reference[k - 1][name] + 0.25 * seen.policy[k][name]
                assert torch.allclose(tensor, expected, atol=1e-6)

    def test_the_reference_is_not_trained(self):
        run = fit(loss=ClippedLoss(kl_coef=0.1))
        assert all(not p.requires_grad for p in run.module.reference.parameters())
        optimized = {id(p) for group in run.trainer.optimizers[0].param_groups for p in group["params"]}
        assert optimized == {id(p) for p in run.module.policy.parameters()}

    def test_no_reference_without_kl(self):
        assert fit().module.reference is None

    @pytest.mark.parametrize("i", [1, 3])
    def test_the_reference_runs_once_per_rollout(self, monkeypatch, i):
        settings = {"v": 1, "i": i, "rollouts": 3, "loss": ClippedLoss(kl_coef=0.1)}
        settings["trainer"] = {"accumulate_grad_batches": 2}

        class ClearCache(L.Callback):
            def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
                pl_module._reference_logprobs.clear()

        num_passes = {}
        forward = CausalPolicy.forward

        def counted(policy, *arguments, **options):
            is_trained = next(policy.parameters()).requires_grad
            num_passes[name, is_trained] = num_passes.get((name, is_trained), 0) + 1
            return forward(policy, *arguments, **options)

        monkeypatch.setattr(CausalPolicy, "forward", counted)
        name = "cached"
        cached = fit(callbacks=[ReferenceRefresh(1)], **settings)
        name = "cleared"
        cleared = fit(callbacks=[ReferenceRefresh(1), ClearCache()], **settings)
        assert num_passes["cached", True] == num_passes["cleared", True] == num_passes["cleared", False] == 3 * i * 2
        assert num_passes["cached", False] == 3 * 2
        assert largest_difference(cached.weights, cleared.weights) == 0


class TestZeroVarianceMask:
    def test_only_groups_with_variance_stay(self):
        class TwoDigitAnswers(LowDigits):
            def score(self, prompt, completion):
                return 1.0 if int(prompt.row["question"]) % 2 else super().score(prompt, completion)

        task = SortDigits(num_digits=2, num_held_out=20, reward=TwoDigitAnswers())
        run = fit(callbacks=[ZeroVarianceMask()], data={"task": task})
        num_masked = 0
        for batch in run.recorder.rollouts:
            for rewards, mask, sampled in zip(
                batch.rewards.split(4), batch.loss_mask.split(4), batch.completion_mask.split(4), strict=True
            ):
                varied = bool(rewards.max() > rewards.min())
                assert torch.equal(mask, sampled & varied)
                num_masked += not varied
        assert 0 < num_masked < 16
        assert run.logged[0]["train/live_tokens"] == float(run.recorder.rollouts[0].loss_mask.sum())

    def test_tolerance(self):
        strict = fit(rollouts=1, callbacks=[ZeroVarianceMask(10.0)])
        assert not strict.recorder.rollouts[0].loss_mask.any()


class TestValidation:
    def test_amplification_is_the_gain_over_the_reference(self):
        class Scores(RolloutCallback):
            def __init__(self):
                self.rows = []

            def on_validation_end(self, trainer, pl_module):
                if not trainer.sanity_checking:
                    m = trainer.callback_metrics
                    self.rows.append((float(m["val/pass@1"]), float(m["val/pass@1_over_reference"])))

        scores = Scores()
        run = build(
            rollouts=4,
            epochs=3,
            learning_rate=2.0,
            loss=ClippedLoss(kl_coef=0.001),
            callbacks=[scores, ReferenceRefresh()],
            trainer={"limit_val_batches": 1.0, "num_sanity_val_steps": -1},
            data={"evaluation": Evaluation(success_reward=0.3)},
        )
        run.trainer.fit(run.module, datamodule=run.data)
        assert len(scores.rows) == 3
        (first, _), (second, gain_2), (third, gain_3) = scores.rows
        assert gain_2 == pytest.approx(second - first)
        assert gain_3 == pytest.approx(third - second)
        assert len({first, second, third}) == 3

    def test_seed(self):
        """It decides which samples are drawn."""

        def pass_at_1(seed):
            evaluation = Evaluation(num_samples=4, num_problems=10, success_reward=0.3, seed=seed)
            run = build(data={"evaluation": evaluation}, trainer={"limit_val_batches": 1.0})
            (metrics,) = run.trainer.validate(run.module, datamodule=run.data, verbose=False)
            return metrics["val/pass@1"]

        scores = [pass_at_1(seed) for seed in (0, 1, 2, 3)]
        assert pass_at_1(0) == scores[0]
        assert len(set(scores)) > 1

    def test_reference_is_measured_again_after_an_average(self):
        """A reference that is no copy of a measured policy has its own score, which its samples decide."""
        measured = []

        class Measured(L.Callback):
            def on_validation_start(self, trainer, pl_module):
                measured.append(pl_module.needs_reference_score(""))

        fit(
            rollouts=2,
            epochs=3,
            learning_rate=0.5,
            loss=ClippedLoss(kl_coef=0.1),
            callbacks=[Measured(), ReferenceRefresh(period=2, decay=0.5)],
            trainer={"limit_val_batches": 1.0, "num_sanity_val_steps": 0},
        )
        assert measured == [True, True, True]  # after step 0 nothing is known; then it moved at steps 2 and 4

    def test_separate_sampling_settings(self):
        evaluation = Evaluation(
            num_samples=3,
            num_problems=7,
            sampling=Sampling(temperature=0.5, top_k=1, max_tokens=4),
            success_reward=0.01,
        )
        run = build(data={"evaluation": evaluation}, trainer={"limit_val_batches": 1.0})
        (metrics,) = run.trainer.validate(run.module, datamodule=run.data, verbose=False)
        shares = {f"val/pass@{k}{what}" for k in (1, 2, 3) for what in ("", "_stderr")}
        assert set(metrics) == shares | {"val/maj@3"}
        assert metrics["val/pass@1"] == metrics["val/pass@3"], "top_k of 1 is deterministic"
        assert run.data.engine.state.step is None


def test_rollout_log_shows_the_final_mask_for_any_order(tmp_path):
    for i, callbacks in enumerate(([RolloutLog(2), ZeroVarianceMask(9.0)], [ZeroVarianceMask(9.0), RolloutLog(2)])):
        folder = tmp_path / str(i)
        fit(rollouts=5, callbacks=callbacks, trainer={"default_root_dir": str(folder)})
        rows = [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]
        assert [row["rollout"] for row in rows] == [0] * 4 + [3] * 4 + [4] * 4
        assert not any(row["live"] for row in rows)


class TestWarmStart:
    def test_it_learns_and_refreshes_the_reference(self):
        run = build(
            loss=ClippedLoss(kl_coef=0.1),
            callbacks=[SupervisedWarmStart(num_steps=40, batch_size=32, learning_rate=1e-2)],
            data={"task": SortDigits(num_digits=2, num_held_out=20)},
            trainer={"limit_val_batches": 1.0, "num_sanity_val_steps": 0},
        )
        (before,) = run.trainer.validate(run.module, datamodule=run.data, verbose=False)
        run.trainer.fit(run.module, datamodule=run.data)
        assert before["val/pass@1"] < 0.05
        assert float(run.recorder.rollouts[0].rewards.mean()) > 0.2
        assert run.logged[0]["train/kl_reference"] < 1e-6

    def test_rows_without_solutions(self):
        from lgrpo.rewards import ExactMatch
        from lgrpo.tasks import DatasetTask

        rows = [{"question": "1>", "answer": "1"}]
        with pytest.raises(ValueError, match="needs the field 'solution'"):
            fit(callbacks=[SupervisedWarmStart()], data={"task": DatasetTask(ExactMatch(), rows, rows)})

    def test_a_solution_that_cannot_fit(self):
        from lgrpo.rewards import ExactMatch
        from lgrpo.tasks import DatasetTask

        rows = [{"question": "1>", "answer": "1", "solution": "1" * 161}]
        with pytest.raises(ValueError, match="has 161 characters, more than the 32 tokens of the model's context"):
            fit(callbacks=[SupervisedWarmStart()], data={"task": DatasetTask(ExactMatch(), rows, rows)})

    def test_no_steps(self):
        with pytest.raises(ValueError, match="num_steps is 0; it must be at least 1: leave the callback out"):
            SupervisedWarmStart(num_steps=0)
