"""GRPO as a LightningModule: policy, reference, loss.

Not here: sampling (engines), scoring (rewards), advantages (advantages), when weights move (callbacks.weight_sync).
There is no critic.
"""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lightning as L
import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import PreTrainedTokenizerBase

from lgrpo.functional import kl_divergence, quick_products
from lgrpo.hooks import rollout_callbacks, rollout_owner
from lgrpo.loggers import guard
from lgrpo.losses import ClippedLoss, PolicyLogprobs, PolicyLoss, ProximalMemory
from lgrpo.metrics import Amplifications, StepMetrics
from lgrpo.policy import AdapterReference, CausalPolicy, flat, is_reference
from lgrpo.policy.memory import refuse_over_budget
from lgrpo.settings import (
    ResumeError,
    Settings,
    architecture_of,
    compare_settings,
    describe,
    tokenizer_fingerprint,
)
from lgrpo.types import EvaluationBatch, PolicyWeights, RolloutBatch

COMPUTED_IN = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""What the trainer computes in, by its precision, where that is not what it keeps weights in."""


class GRPOModule(L.LightningModule):
    """Owns the policy, the reference and the loss. Optimisation is Lightning's automatic one."""

    def __init__(
        self,
        policy: CausalPolicy,
        loss: PolicyLoss = ClippedLoss(),  # noqa: B008
        optimizer: OptimizerCallable = lambda parameters: torch.optim.AdamW(parameters, lr=1e-6),
        scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        """
        Args:
            policy: The language model to train.
            loss: What each optimizer step descends.
            optimizer: Over the policy's parameters.
            scheduler: Of the learning rate, stepped after every optimizer step; by default none.
        """
        super().__init__()
        self.policy = policy
        self.reference: CausalPolicy | AdapterReference | None = None
        self.loss = copy.deepcopy(loss)  # the default is one object for all
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.step_metrics = StepMetrics()
        self.amplifications = Amplifications()
        self.proximal = ProximalMemory()
        self._reference_logprobs: dict[tuple[int, ...], Tensor] = {}  # of the rollout at hand
        self._update_started = 0.0
        self._step_is_empty = False
        self._rollout_metrics: dict[str, float] = {}
        self._loaded_step = 0
        self._noted: defaultdict[str, float] = defaultdict(float)

    # What others ask for

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The policy's tokenizer."""
        return self.policy.tokenizer

    @property
    def context_length(self) -> int:
        """The most tokens, prompt and completion together."""
        return self.policy.context_length

    @property
    def needs_reference(self) -> bool:
        """Whether the loss has a term in the reference."""
        return self.loss.needs_reference

    @property
    def needs_behaviour(self) -> str | None:
        """The loss by name, where it reads log π_α."""
        return type(self.loss).__name__ if self.loss.needs_behaviour else None

    @property
    def policy_step(self) -> int:
        """Optimizer steps the policy has made; of one that is evaluated, as its checkpoint says."""
        return self.global_step or self._loaded_step

    def wants_reference_score(self, task: str) -> bool:
        """Whether there is a reference whose pass@1 on a task is not known."""
        return self.reference is not None and not self.amplifications[task].knows_reference

    @torch.no_grad()
    def policy_logprobs(self, batch: RolloutBatch) -> Tensor:
        """log π_θ of a batch's tokens as ``training_step`` sees it, on the batch's device, without gradient."""
        device = self.trainer.strategy.root_device  # FSDPStrategy does not tell the module
        with self.trainer.precision_plugin.forward_context():
            logprobs, _ = self.policy(batch.tokens.to(device), batch.completion_mask.to(device), batch.temperature)
        return logprobs.to(batch.tokens.device)

    def policy_weights(self) -> PolicyWeights:
        """The policy's weights as they are now."""
        return replace(self.policy.weights(), computed_in=self._computed_in)

    def reference_weights(self) -> PolicyWeights:
        """The reference's weights."""
        if self.reference is None:
            raise RuntimeError("no reference is kept: the loss has no KL term (kl_coef is 0)")
        return replace(self.reference.weights(), computed_in=self._computed_in)

    @property
    def _computed_in(self) -> torch.dtype | None:
        """Precision of the trainer's arithmetic on a GPU; None: that of the weights."""
        if self._trainer is None or self._trainer.strategy.root_device.type != "cuda":
            return None  # not every processor has it
        return COMPUTED_IN.get(str(self._trainer.precision))

    @torch.no_grad()
    def refresh_reference(self, decay: float = 0.0) -> None:
        """``reference ← decay · reference + (1 - decay) · policy``."""
        if self.reference is None:
            raise RuntimeError("there is no reference to refresh: the loss has no KL term (kl_coef is 0)")
        self._reference_logprobs = {}
        self.reference.follow(self.policy, decay)
        self.amplifications.reference_moved(self.global_step, copied=decay == 0)

    def note(self, name: str, value: float) -> None:
        """Adds to a figure of the step at hand."""
        self._noted[name] += value

    # Lightning's hooks

    def configure_model(self) -> None:
        self.policy.build()
        fitting = self.trainer.state.fn == TrainerFn.FITTING
        if self.needs_reference and self.reference is None and fitting:  # an evaluation needs the policy alone
            self.reference = self.policy.make_reference()
        if isinstance(self.trainer.strategy, ModelParallelStrategy) and self.device_mesh is not None:
            self.policy.shard(self.device_mesh["data_parallel"])
            if self.reference is not None:
                self.reference.shard(self.device_mesh["data_parallel"])
        if isinstance(self.trainer.strategy, FSDPStrategy):
            # Lightning's own mixed precision would round gradients, and the angles of rotary embeddings, to bfloat16;
            # autocast alone computes what every other strategy does
            self.policy = self.policy.wrap(self.trainer.strategy.mixed_precision)
            if isinstance(self.reference, CausalPolicy):
                self.reference = self.reference.wrap(self.trainer.strategy.mixed_precision)

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(p for p in self.policy.parameters() if p.requires_grad)
        if self.scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.scheduler(optimizer), "interval": "step"}}

    def setup(self, stage: str) -> None:
        self.amplifications.forget()
        if isinstance(self.trainer.strategy, FSDPStrategy):
            is_sharded = self.trainer.strategy._state_dict_type == "sharded"
            flat.refuse(self.policy.lora is not None, self.policy.compile_layers, is_sharded, self.trainer.world_size)
        if stage != "fit":
            return
        self.proximal, self._reference_logprobs = ProximalMemory(), {}
        for logger in self.trainer.loggers:
            guard(logger, lambda: self.note("fault/logger_writes", 1.0))
        precision = str(self.trainer.precision)
        if precision in ("bf16-true", "16-true") or precision.startswith("transformer-engine"):
            raise ValueError(
                f"trainer.precision {precision} rounds every float of a batch, behaviour log-probabilities too: "
                "-7.123456 becomes -7.125, and the ratio is wrong at lag 0. Use bf16-mixed"
            )

    def on_fit_start(self) -> None:
        budget, device = rollout_owner(self.trainer).micro_batch_tokens, self.trainer.strategy.root_device
        if budget is None or device.type != "cuda":
            return
        bytes_each = 2 if "16" in str(self.trainer.precision) else 4
        refuse_over_budget(self.policy, budget, bytes_each, torch.cuda.mem_get_info(device)[0])

    def train(self, mode: bool = True) -> GRPOModule:
        super().train(mode)
        if self.reference is not None:
            self.reference.eval()
        return self

    def training_step(self, batch: RolloutBatch, batch_idx: int) -> Tensor:
        if batch_idx % self.trainer.accumulate_grad_batches == 0:
            self._update_started = time.perf_counter()
        logprobs = self._logprobs(batch)
        output = self.loss(batch, logprobs)
        self._step_is_empty = batch.totals.live_tokens == 0
        self._rollout_metrics = batch.metrics
        kl_reference = (
            None if logprobs.reference is None else kl_divergence(logprobs.policy.detach(), logprobs.reference)
        )
        self.step_metrics.update(
            loss=output.loss,
            mask=batch.loss_mask,
            log_ratio=logprobs.policy.detach() - batch.behaviour_logprobs,
            ratio=output.ratio,
            clipped_low=output.clipped_low,
            clipped_high=output.clipped_high,
            entropy=logprobs.entropy.detach(),
            kl_reference=kl_reference,
            lag=batch.lag(self.global_step),
            behaviour_known=~batch.behaviour_logprobs.isnan(),
        )
        # Lightning divides by the number of micro-batches and averages over ranks; the totals have done both already
        return output.loss * self.trainer.accumulate_grad_batches * self.trainer.world_size

    def configure_gradient_clipping(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """As Lightning does, and where it refuses: the first FSDP's norm over ranks, fused optimizers in bfloat16."""
        algorithm, precision = GradClipAlgorithmType(gradient_clip_algorithm or "norm"), self.trainer.precision_plugin
        is_norm = algorithm == GradClipAlgorithmType.NORM
        if isinstance(self.policy, FullyShardedDataParallel) and gradient_clip_val and is_norm:
            self.policy.clip_grad_norm_(gradient_clip_val)
        elif isinstance(precision, MixedPrecision) and precision.scaler is None and gradient_clip_val:
            Precision.clip_gradients(precision, optimizer, gradient_clip_val, algorithm)  # nothing is scaled there
        else:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def backward(self, loss: Tensor, *arguments: Any, **options: Any) -> None:
        with quick_products(loss.device, self.policy.dtype):
            super().backward(loss, *arguments, **options)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """A step without a live token changes nothing: not even momentum and weight decay act."""
        if self._step_is_empty:
            if optimizer_closure is not None:
                optimizer_closure()
        else:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        figures = {f"train/{name}": value for name, value in self.step_metrics.compute().items()}
        self.step_metrics.reset()
        figures["train/step_skipped"] = float(self._step_is_empty)
        figures["time/update"] = time.perf_counter() - self._update_started
        figures |= self._rollout_metrics | self._noted
        self._noted.clear()  # what goes wrong from here on is told in the next row
        self._publish(figures)

    def validation_step(self, batch: EvaluationBatch, batch_idx: int) -> None:
        self.amplifications[batch.task].update(batch.correct, batch.answers, batch.reference_correct)

    def test_step(self, batch: EvaluationBatch, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        self._log_pass_at_k("val")

    def on_test_epoch_end(self) -> None:
        self._log_pass_at_k("test")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        ranks: list[Any] = [self.proximal.state_dict()] * self.trainer.world_size
        if self.trainer.world_size > 1:
            torch.distributed.all_gather_object(ranks, ranks[0])
        scores, settings = self.amplifications.scores(), self._resume_settings()
        checkpoint["grpo"] = {"scores": scores, "proximal": ranks, "settings": settings}
        left_out = self._left_out()
        checkpoint["state_dict"] = {n: w for n, w in checkpoint.get("state_dict", {}).items() if n not in left_out}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self._trainer is None or self.trainer.state.fn != TrainerFn.FITTING:
            self._loaded_step = checkpoint["global_step"]
            weights = checkpoint.get("state_dict", {})  # a sharded one has them elsewhere
            if self.reference is None and weights:
                weights = {n: w for n, w in weights.items() if not (n.startswith("reference.") or is_reference(n))}
                checkpoint["state_dict"] = self._left_out() | weights
            return  # scores of another evaluation's settings would mislead
        if "grpo" not in checkpoint:
            raise ResumeError("the checkpoint was not written by a GRPOModule: there is no rollout to go on with in it")
        state = checkpoint["grpo"]
        compare_settings(state["settings"], self._resume_settings())
        if weights := checkpoint.get("state_dict"):
            checkpoint["state_dict"] = self._left_out() | weights
        self.amplifications.load_scores(state["scores"])
        self.proximal.load_state_dict(state["proximal"][self.trainer.global_rank])

    def _left_out(self) -> dict[str, Tensor]:
        """Weights a checkpoint does not have, as they are found where they came from."""
        if self.policy.lora is None:
            return {}
        own = self.policy.state_dict(prefix="policy.")
        return {n: w for n, w in own.items() if self.policy.checkpoint_leaves_out(n)}

    def _resume_settings(self) -> Settings:
        """What a run that goes on from a checkpoint must have in common with the one that wrote it."""
        callbacks = [callback.resume_settings() for callback in rollout_callbacks(self.trainer)]
        return {
            "model": architecture_of(self.policy.model.config),
            "tokenizer": tokenizer_fingerprint(self.tokenizer),
            "lora": describe(self.policy.lora),
            "base": None if self.policy.lora is None else self.policy.base_checksum,
            "loss": describe(self.loss),
            "world size": self.trainer.world_size,
            "trainer.accumulate_grad_batches": self.trainer.accumulate_grad_batches,
            **rollout_owner(self.trainer).resume_settings(),
            **{name: value for settings in callbacks for name, value in settings.items()},
        }

    # Inside a step

    def _logprobs(self, batch: RolloutBatch) -> PolicyLogprobs:
        arguments = batch.tokens, batch.completion_mask, batch.temperature
        policy, entropy = self.policy(*arguments, entropy_gradient=self.loss.needs_entropy_gradient)
        reference = None
        if self.reference is not None:  # it stands still while a rollout trains: the first pass serves the others
            key = (batch.rollout, *batch.rows.tolist())
            if key not in self._reference_logprobs:
                kept = {k: v for k, v in self._reference_logprobs.items() if k[0] == batch.rollout}
                with torch.no_grad():
                    self._reference_logprobs = kept | {key: self.reference(*arguments)[0]}
            reference = self._reference_logprobs[key]
        proximal = self.proximal.logprobs(batch, policy.detach()) if self.loss.needs_proximal else None
        return PolicyLogprobs(policy=policy, proximal=proximal, reference=reference, entropy=entropy)

    def _publish(self, figures: dict[str, float]) -> None:
        """To the loggers, and to callbacks that monitor a figure; row s tells of the step from s to s + 1.

        A checkpoint of step s + 1 is written after it, so that no row is lost with the process in between.
        ``self.log`` would do the same at a tenth of a step's cost in a small model: it treats each figure by itself.
        """
        self.trainer.callback_metrics.update({name: torch.tensor(value) for name, value in figures.items()})
        if (self.global_step + 1) % self.trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            self._to_loggers(figures, self.global_step)

    def _to_loggers(self, figures: dict[str, float], step: int) -> None:
        for logger in self.trainer.loggers:
            logger.log_metrics(figures, step=step)
            logger.save()

    def _log_pass_at_k(self, prefix: str) -> None:
        figures = {f"{prefix}/{name}": value for name, value in self.amplifications.compute(self.global_step).items()}
        fitting = self.trainer.state.fn == TrainerFn.FITTING
        if fitting:  # with the sanity check, whose figures Lightning would drop: they are the starting point of the run
            self._to_loggers(figures, self.global_step)
        if not self.trainer.sanity_checking:
            self.log_dict(figures, logger=not fitting)  # reduced over ranks already
