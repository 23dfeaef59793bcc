"""A check that the engine samples from the policy it was given."""

from __future__ import annotations

import warnings
from typing import Any, Literal

import lightning as L
import torch

from lgrpo.callbacks.self_mismatch import self_mismatch
from lgrpo.checks import check_count, check_range
from lgrpo.hooks import policy_owner, rollout_owner

FLOAT32, REDUCED = 0.01, 0.03
"""Default tolerances, if policy and engine compute in float32, and if one of them does not."""
ROUNDING = 5
"""Default tolerance as a multiple of the policy's mean difference from itself, if that is larger."""


class EngineMismatchError(RuntimeError):
    """The engine and the policy disagree about the probability of sampled tokens."""


class MismatchGuard(L.Callback):
    """Warns, or stops the run, if engine and policy disagree about tokens that were sampled from the same weights.

    At lag 0 the engine's log-probabilities differ from the policy's by rounding only. A larger difference means that
    the engine samples from something else: other weights, another temperature, raw log-probabilities, a stale cache.
    The run then still learns something, from wrong ratios.

    The guard warns if the mean difference exceeds the tolerance, or the 99th percentile ten times the tolerance. If the
    mean exceeds ten times the tolerance, it stops the run before the optimizer step. It also checks steps that are
    skipped because no completion has an advantage, as a wrong engine may be the reason. Steps without completions of
    lag 0 are not checked.

    How large rounding is depends on the model and its precision. So at the first step, and then every ``period`` steps,
    the policy is compared with itself, computed in other micro-batches (``train/self_mismatch_…``). The default
    tolerance is at least five times this difference.
    """

    def __init__(
        self,
        tolerance: float | None = None,
        action: Literal["stop", "warn"] = "stop",
        period: int | None = 100,
    ) -> None:
        """
        Args:
            tolerance: Largest expected mean of |log π_α - log π_θ| at lag 0. By default 0.01 if policy and engine
                compute in float32, otherwise 0.03; more if the policy differs by a fifth of that from itself.
            action: Whether to stop the run at ten times the tolerance, or to warn at most.
            period: Optimizer steps between comparisons of the policy with itself, each two passes without gradient
                over a micro-batch; null: none.
        """
        check_range("mismatch_guard.tolerance", tolerance, above=0)
        check_count("mismatch_guard.period", period, at_least=1)
        self.tolerance = tolerance
        self.action: Literal["stop", "warn"] = action
        self.period = period
        self._self_mismatch = 0.0
        """Mean difference of the policy from itself, as last measured."""
        self._has_warned = False
        self._step = 0
        """Optimizer steps before the current one."""
        self._is_checked = False

    def state_dict(self) -> dict[str, Any]:
        return {"self_mismatch": self._self_mismatch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._self_mismatch = state_dict["self_mismatch"]

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._step = trainer.global_step

    def on_before_optimizer_step(self, trainer: L.Trainer, *_: Any) -> None:
        self._measure(trainer)
        self._check(trainer)
        self._is_checked = True

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step > self._step:
            if not self._is_checked:  # the step was skipped
                self._check(trainer)
            self._is_checked = False

    def _measure(self, trainer: L.Trainer) -> None:
        """Compare the policy with itself, if it is time to."""
        if self.period is None or self._step % self.period:
            return
        found = self_mismatch(trainer)
        self._self_mismatch = found.get("mismatch_mean", 0.0)
        for name, value in found.items():
            policy_owner(trainer).add_metric(f"train/self_{name}", value)
        policy_owner(trainer).policy.free_gathered()  # a sharded policy is about to be changed by the optimizer

    def _check(self, trainer: L.Trainer) -> None:
        found = policy_owner(trainer).step_metrics.compute()  # over all ranks; the module logs the same values
        if "engine_mismatch_mean" not in found:
            return
        mean, p99 = found["engine_mismatch_mean"], found.get("engine_mismatch_p99")
        tolerance = self.tolerance or max(default_tolerance(trainer), ROUNDING * self._self_mismatch)
        stops = mean > 10 * tolerance and self.action == "stop"
        is_large = mean > tolerance or (p99 or 0.0) > 10 * tolerance
        if not is_large or (self._has_warned and not stops):
            return
        message = (
            f"at step {self._step}, engine and policy disagree about tokens sampled from the same weights: their "
            f"log-probabilities differ by {mean:.3g} on average, where at most {tolerance:g} is expected"
            + ("" if p99 is None else f", with a 99th percentile of {p99:.3g} instead of at most {10 * tolerance:g}")
            + (f" (the policy differs by {self._self_mismatch:.3g} from itself)" if self._self_mismatch else "")
            + f".{self._example(trainer)} Ratios and metrics are wrong by as much. {advice(trainer)}"
        )
        if stops:
            raise EngineMismatchError(
                f"{message} The run was stopped before the weights changed; mismatch_guard.action: warn continues"
            )
        self._has_warned = True
        warnings.warn(message, stacklevel=2)

    def _example(self, trainer: L.Trainer) -> str:
        """Return the fresh token of this rank's step with the largest difference. All ranks must call it."""
        largest, text = -1.0, ""
        for batch in rollout_owner(trainer).micro_batches:
            policy = policy_owner(trainer).policy_logprobs(batch)
            is_fresh = batch.completion_mask & (batch.token_lag(self._step) == 0)
            difference = torch.where(is_fresh, (policy - batch.behaviour_logprobs).abs().float(), -1.0)
            row, column = divmod(int(difference.argmax()), difference.shape[1])
            if (value := float(difference[row, column])) > largest:
                token = rollout_owner(trainer).tokenizer.decode([int(batch.tokens[row, column])])
                position = int(batch.completion_mask[row, :column].sum())
                text = (
                    f" For example, token {position} ({token!r}) of a completion of prompt {int(batch.positions[row])} "
                    f"has {float(batch.behaviour_logprobs[row, column]):.3f} in the engine and "
                    f"{float(policy[row, column]):.3f} in the policy."
                )
                largest = value
        policy_owner(trainer).policy.free_gathered()  # a sharded policy is about to be changed by the optimizer
        return text


def default_tolerance(trainer: L.Trainer) -> float:
    """Return the tolerance for the precisions in which policy and engine compute."""
    dtypes = policy_owner(trainer).policy.dtype, rollout_owner(trainer).engine.dtype or torch.float32
    is_float32 = set(dtypes) == {torch.float32} and str(trainer.precision) in ("32-true", "64-true")
    return FLOAT32 if is_float32 else REDUCED


def advice(trainer: L.Trainer) -> str:
    """Return what to look at, as a sentence."""
    return (
        f"The engine is {type(rollout_owner(trainer).engine).__name__}. Check that it samples at "
        "data.sampling.temperature and returns log-probabilities at that temperature (vLLM: --logprobs-mode "
        "processed_logprobs), that it computes in the trainer's precision (data.engine.dtype), and that nobody else "
        "loads weights into it. data.behaviour_logprobs: policy computes log π_α with the policy instead."
    )
