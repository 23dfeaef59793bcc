"""GRPO as a LightningModule: policy, reference, loss.

Not here: sampling (engines), scoring (rewards), advantages (advantages), when weights move (callbacks.weight_sync).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lightning as L
import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lgrpo.checks import check_function, check_instance
from lgrpo.functional import TeacherDivergence
from lgrpo.hooks import rollout_callbacks, rollout_owner
from lgrpo.losses import ClippedLoss, PolicyLogprobs, PolicyLoss, ProximalMemory
from lgrpo.metrics import Amplifications, StepMetrics
from lgrpo.policy import CausalPolicy
from lgrpo.policy.checkpoint import InitialReference, drop_omitted_weights, restore_omitted_weights
from lgrpo.policy.memory import check_memory, used_memory
from lgrpo.policy.reference import Reference, ReferenceLogprobs, make_reference
from lgrpo.policy.sequences import on_device, read_in_context
from lgrpo.policy.step_rules import StepRule, the_rule
from lgrpo.policy.strategy import check_precision, check_strategy, clip_gradients, compute_dtype, is_sharding, shard
from lgrpo.run.checkpoints import gather_ranks
from lgrpo.run.loggers import StepLog, log_evaluation, tolerate_failures
from lgrpo.run.resume import ResumeSettings, check_policy, describe, load_state, save_state
from lgrpo.types import EvaluationBatch, RolloutBatch
from lgrpo.weights import PolicyWeights


class GRPOModule(L.LightningModule):
    """Policy, reference and loss. Optimisation is Lightning's automatic one."""

    def __init__(
        self,
        policy: CausalPolicy,
        loss: PolicyLoss = ClippedLoss(),  # noqa: B008
        optimizer: OptimizerCallable = lambda parameters: torch.optim.AdamW(parameters, lr=1e-6),
        scheduler: LRSchedulerCallable | None = None,
        step_rule: StepRule | list[StepRule] | None = None,
    ) -> None:
        """
        Args:
            policy: Language model to train.
            loss: Loss that each optimizer step minimises.
            optimizer: Optimizer of the policy's parameters.
            scheduler: Learning-rate scheduler, stepped after every optimizer step. By default none.
            step_rule: Rule that scales or projects the update, such as EffectiveSampleSize (VCPO). By default none.
        """
        super().__init__()
        check_instance("policy", policy, CausalPolicy, "a CausalPolicy, such as CausalPolicy('Qwen/Qwen3-0.6B')")
        check_instance("loss", loss, PolicyLoss, "a PolicyLoss, such as ClippedLoss()")
        check_function("optimizer", optimizer, "lambda parameters: torch.optim.AdamW(parameters, lr=1e-6)")
        check_function("scheduler", scheduler, "lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer)")
        self.policy = policy
        self.reference: Reference | None = None
        self._initial_reference = InitialReference()
        self.loss = copy.deepcopy(loss)  # the default is one object that all modules share
        self.optimizer, self.scheduler = optimizer, scheduler
        self.step_rule = copy.deepcopy(the_rule(step_rule))
        if self.step_rule is not None:
            check_instance("step_rule", self.step_rule, StepRule, "a StepRule, such as EffectiveSampleSize()")
        self.step_metrics, self.amplifications = StepMetrics(), Amplifications()
        self.proximal = ProximalMemory()
        self._reference_logprobs, self._step_log = ReferenceLogprobs(), StepLog()
        self._step_is_empty, self._loaded_step = False, 0
        self._grad_norm: Tensor | None = None
        self._evaluation_started = 0.0

    # Interface of the data module and of callbacks (hooks.PolicyOwner)

    @property
    def policy_step(self) -> int:
        """Number of optimizer steps of the policy; in an evaluation, of the checkpoint it was loaded from."""
        return self.global_step or self._loaded_step

    def needs_reference_score(self, task: str) -> bool:
        """Return whether there is a reference whose pass@1 on a task is not known."""
        return self.reference is not None and self.amplifications[task].reference_score is None

    @torch.no_grad()
    def policy_logprobs(self, batch: RolloutBatch) -> Tensor:
        """Return log π_θ of a batch's tokens as ``training_step`` computes it, on the batch's device."""
        device = self.trainer.strategy.root_device  # with FSDPStrategy self.device is the CPU
        with self.trainer.precision_plugin.forward_context():
            logprobs, _ = read_in_context(self.policy, on_device(batch, device))
        return logprobs.to(batch.tokens.device)

    def policy_weights(self) -> PolicyWeights:
        """Return the policy's current weights."""
        return replace(self.policy.weights(), compute_dtype=compute_dtype(self._trainer))

    def reference_weights(self) -> PolicyWeights:
        """Return the reference's weights."""
        if self.reference is None:
            raise RuntimeError("no reference is kept: the loss has no KL term (kl_coef is 0)")
        return replace(self.reference.weights(), compute_dtype=compute_dtype(self._trainer))

    @torch.no_grad()
    def refresh_reference(self, decay: float = 0.0) -> None:
        """Set the reference to ``decay · reference + (1 - decay) · policy``."""
        if self.reference is None:
            raise RuntimeError("there is no reference to refresh: the loss has no KL term (kl_coef is 0)")
        self._reference_logprobs.clear()
        self._initial_reference.forget()
        self.reference.update_from(self.policy, decay)
        self.amplifications.on_reference_refresh(self.global_step, copied=decay == 0)

    def add_metric(self, name: str, value: float) -> None:
        """Add a value to a metric of the current optimizer step; values of one name are summed."""
        self._step_log.add(name, value)

    # Lightning's hooks

    def configure_model(self) -> None:
        is_new = not self.policy.is_built
        self.policy.build()
        if self.loss.needs_reference and self.reference is None and self._is_fitting:
            self.reference = make_reference(self.policy)
            can_be_loaded = self.policy.name is not None and self.policy.lora is None
            self._initial_reference.start(is_new and can_be_loaded and not is_sharding(self.trainer.strategy))
        self.policy, self.reference = shard(self.policy, self.reference, self.trainer.strategy, self.device_mesh)

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(p for p in self.policy.parameters() if p.requires_grad)
        if self.step_rule is not None:
            self.step_rule.attach(optimizer)
        if self.scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.scheduler(optimizer), "interval": "step"}}

    def setup(self, stage: str) -> None:
        self.amplifications.forget()
        check_strategy(self.policy, self.trainer)
        if stage == "fit":
            self.proximal = ProximalMemory()
            self._reference_logprobs.clear()
            tolerate_failures(self.trainer.loggers, lambda: self.add_metric("fault/logger_writes", 1.0))
            check_precision(self.trainer)

    def on_fit_start(self) -> None:
        self._initial_reference.note(self.reference)
        if self.loss.distillation is not None:
            data = rollout_owner(self.trainer)
            longest = data.train_prompts.longest + data.sampling.max_tokens
            self.loss.distillation.start(self.policy, data.sampling.temperature, longest)
        check_memory(self.policy, self.trainer, rollout_owner(self.trainer).micro_batch_tokens)

    def teardown(self, stage: str) -> None:
        if self.loss.distillation is not None:
            self.loss.distillation.close()

    def on_train_batch_start(self, batch: RolloutBatch, batch_idx: int) -> None:
        is_first = batch_idx % self.trainer.accumulate_grad_batches == 0
        if is_first:
            self._step_log.start(batch.metrics)
            self.step_metrics.reset()
            if self.step_rule is not None:
                self.step_rule.start()
        self._step_is_empty = not self.loss.has_gradient(batch.totals)  # optimizer_step may call training_step
        if is_first and self.loss.surveys_step and not self._step_is_empty:
            self._survey_step()

    def _survey_step(self) -> None:
        """Show the loss all tokens of the optimizer step that begins."""
        parts = []
        for batch in rollout_owner(self.trainer).micro_batches:
            policy = self.policy_logprobs(batch)
            proximal = self.proximal.logprobs(batch, policy) if self.loss.needs_proximal else None
            unknown = torch.full_like(policy, torch.nan)
            logprobs = PolicyLogprobs(policy=policy, entropy=unknown, proximal=proximal, step=self.global_step)
            parts.append((batch, logprobs))
        self.loss.survey(parts, self._gather)

    def _gather(self, values: Tensor) -> Tensor:
        """Join the vectors of all ranks."""
        return torch.cat(gather_ranks(self.trainer, values))

    def training_step(self, batch: RolloutBatch, batch_idx: int) -> Tensor:
        if not len(batch):  # left over from data.micro_batch_tokens: Lightning counts it, and it has no gradient
            return torch.zeros((), device=batch.tokens.device, requires_grad=True)
        logprobs = self._logprobs(batch)
        output = self.loss(batch, logprobs)
        if self.step_rule is not None:
            self.step_rule.see(batch, logprobs.policy)
        self.step_metrics.update(**output.quantities(batch, logprobs))
        # Lightning divides by the number of micro-batches and averages over ranks; the totals include both already
        return output.loss * self.trainer.accumulate_grad_batches * self.trainer.world_size

    def _logprobs(self, batch: RolloutBatch) -> PolicyLogprobs:
        divergence = self._teacher_divergence(batch)
        found = read_in_context(self.policy, batch, self.loss.needs_entropy_gradient, divergence)
        policy, entropy = found[:2]
        reference = None if self.reference is None else self._reference_logprobs(self.reference, batch)
        proximal = self.proximal.logprobs(batch, policy.detach()) if self.loss.needs_proximal else None
        return PolicyLogprobs(
            policy=policy,
            proximal=proximal,
            reference=reference,
            teacher_kl=None if divergence is None else found[2],
            entropy=entropy,
            step=self.global_step,
        )

    def _teacher_divergence(self, batch: RolloutBatch) -> TeacherDivergence | None:
        if self.loss.distillation is None:
            return None
        data = rollout_owner(self.trainer)
        return self.loss.distillation.divergence(batch, data.micro_batches, self.policy, data.train_prompts.at)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        if self.step_rule is not None and not self._step_is_empty:
            for name, value in self.step_rule.apply(optimizer, self._gather).items():
                self.add_metric(name, value)
        self._grad_norm = clip_gradients(self, self.policy, optimizer, gradient_clip_val, gradient_clip_algorithm)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """Step and log. A step without a gradient changes nothing: momentum and weight decay do not act either."""
        if not self._step_is_empty:
            try:
                super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
            finally:
                if self.step_rule is not None:
                    self.step_rule.undo(optimizer)
        elif optimizer_closure is not None:
            optimizer_closure()
        self._log_step(float(optimizer.param_groups[0]["lr"]))

    def _log_step(self, learning_rate: float) -> None:
        """Log the metrics of a step. Here alone the trainer waits for the GPU: the step's tensors become numbers."""
        metrics = {f"train/{name}": value for name, value in self.step_metrics.compute().items()}
        metrics |= used_memory(self.trainer)
        metrics |= {"train/step_skipped": float(self._step_is_empty), "train/learning_rate": learning_rate}
        if self._step_is_empty:
            metrics["train/grad_norm"] = 0.0
        elif self._grad_norm is not None:  # else FiniteSteps skipped the step
            metrics["train/grad_norm"] = float(self._grad_norm)
        self._step_log.write(self.trainer, metrics)

    def validation_step(self, batch: EvaluationBatch, batch_idx: int) -> None:
        self.amplifications[batch.task].update(batch.correct, batch.answers, batch.reference_correct, batch.failed)

    test_step = validation_step

    def on_validation_start(self) -> None:
        self._evaluation_started = time.perf_counter()

    on_test_start = on_validation_start

    def on_validation_epoch_end(self) -> None:
        self._log_evaluation("val")

    def on_test_epoch_end(self) -> None:
        self._log_evaluation("test")

    def _log_evaluation(self, prefix: str) -> None:
        metrics = self.amplifications.compute(self.global_step)
        log_evaluation(self, prefix, metrics, time.perf_counter() - self._evaluation_started)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        proximal = gather_ranks(self.trainer, self.proximal.state_dict())
        drop_omitted_weights(checkpoint, self.policy)
        initial = self._initial_reference.drop(checkpoint, self.reference)
        state = {"scores": self.amplifications.scores(), "proximal": proximal, "initial_reference": initial}
        save_state(checkpoint, self._resume_settings(), **state)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if not self._is_fitting:
            check_policy(checkpoint, self.policy.resume_settings())
        restore_omitted_weights(checkpoint, self.policy, self._is_fitting or self.reference is not None)
        if self._is_fitting:  # an evaluation may have other settings than those the scores belong to
            state = load_state(checkpoint, self._resume_settings())
            self.amplifications.load_scores(state["scores"])
            self.proximal.load_state_dict(state["proximal"][self.trainer.global_rank])
        else:
            self._loaded_step = checkpoint["global_step"]
        checksum = checkpoint.get("grpo", {}).get("initial_reference")
        self._initial_reference.restore(checkpoint, checksum, self.policy, self.reference)

    @property
    def _is_fitting(self) -> bool:
        return self._trainer is not None and self._trainer.state.fn == TrainerFn.FITTING

    def _resume_settings(self) -> ResumeSettings:
        settings = {"loss": describe(self.loss), "world size": self.trainer.world_size}
        settings["model.step_rule"] = describe(self.step_rule)
        settings["trainer.accumulate_grad_batches"] = self.trainer.accumulate_grad_batches
        for owner in (self.policy, rollout_owner(self.trainer), *rollout_callbacks(self.trainer)):
            settings |= owner.resume_settings()  # type: ignore[attr-defined]
        return settings
