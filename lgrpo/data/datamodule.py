"""The data module: samples, scores and hands over rollouts, keyed to the behaviour policy.

Not here: when weights move (callbacks.weight_sync), log π_θ and the loss (module), how completions are drawn (engines).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import lightning as L
import torch
from jsonargparse.typing import PositiveInt
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lgrpo.advantages import Advantage, GroupWhitened
from lgrpo.data.buffer import EvaluationBuffer, RolloutBuffer
from lgrpo.data.collate import collate_rollout
from lgrpo.data.prompts import PromptSet, prompts_at
from lgrpo.engines import RolloutEngine, Sampling, TransformersEngine
from lgrpo.functional import has_reward_variance
from lgrpo.hooks import Stage, call_rollout_end, call_rollout_start, call_stage, policy_owner
from lgrpo.rewards import checked_rewards
from lgrpo.tasks import Task
from lgrpo.types import Completion, EvaluationBatch, PolicyWeights, Prompt, RolloutBatch, StepTotals


@dataclass(kw_only=True)
class Evaluation:
    """How the current policy is validated. The sync cycle is left exactly as it was."""

    num_samples: int = 8
    """Completions of each problem."""
    num_problems: int | None = None
    """The first so many problems of the validation set; by default all."""
    sampling: Sampling | None = None
    """How they are drawn; by default as in training."""
    success_reward: float = 1.0
    """A completion with at least this reward is right."""
    seed: int = 0
    """Of the validation samples: the same at every validation, so that differences are the policy's."""

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ValueError(f"evaluation.num_samples is {self.num_samples}; at least 1 sample is needed")
        if self.num_problems is not None and self.num_problems < 1:
            raise ValueError(f"evaluation.num_problems is {self.num_problems}; at least 1 problem is needed")


class RolloutDataModule(L.LightningDataModule):
    """Rollouts of ``num_prompts`` prompts × ``group_size`` completions, each trained on for ``reuse`` steps."""

    def __init__(
        self,
        task: Task,
        engine: RolloutEngine | None = None,
        num_prompts: PositiveInt = 32,
        group_size: PositiveInt = 8,
        reuse: PositiveInt = 1,
        num_rollouts: PositiveInt | None = None,
        sampling: Sampling = Sampling(),  # noqa: B008
        behaviour_logprobs: Literal["engine", "policy"] = "engine",
        advantage: Advantage = GroupWhitened(),  # noqa: B008
        evaluation: Evaluation = Evaluation(),  # noqa: B008
        overlong_prompts: Literal["error", "drop"] = "error",
        shuffle: bool = True,
        seed: int | None = None,
    ) -> None:
        """
        Args:
            task: Prompts, template and reward.
            engine: Where completions come from; by default the embedded engine.
            num_prompts: P, prompts in a rollout, over all ranks.
            group_size: G, completions of each prompt.
            reuse: i, optimizer steps on each rollout.
            num_rollouts: Rollouts in a stage, that is in a Lightning epoch; by default one pass over the prompts.
            sampling: How completions are drawn.
            behaviour_logprobs: Taken from the engine as it samples, or computed again by the policy while it still
                equals the behaviour policy, which it does at v = 1 only.
            advantage: From a group's rewards to advantages.
            evaluation: How validation samples.
            overlong_prompts: What becomes of a prompt that leaves no room for a completion.
            shuffle: Draw the prompts of every pass in an order of its own.
            seed: Of prompts and completions; by default the one given to ``seed_everything``, or 0.
        """
        super().__init__()
        for name, value, least in (("num_prompts", num_prompts, 1), ("group_size", group_size, 2), ("reuse", reuse, 1)):
            if value < least:
                reason = ": a group of one has nothing to be compared with" if name == "group_size" else ""
                raise ValueError(f"data.{name} is {value}; it must be {least} or more{reason}")
        if sampling.is_truncated:
            raise ValueError(
                "data.sampling sets top_k or top_p: a truncated draw gives the dropped tokens no probability, so "
                "π_θ/π_α is not a ratio of the policies any more. Sample the whole distribution when training, and "
                "truncate in data.evaluation.sampling alone"
            )
        self.task = task
        self.engine: RolloutEngine = TransformersEngine() if engine is None else engine
        self.num_prompts = int(num_prompts)  # plain, as a checkpoint loads without executing code
        self.group_size = int(group_size)
        self.reuse = int(reuse)
        self.num_rollouts = num_rollouts
        self.sampling = sampling
        self.behaviour_logprobs: Literal["engine", "policy"] = behaviour_logprobs
        self.advantage = advantage
        self.evaluation = evaluation
        self.overlong_prompts: Literal["error", "drop"] = overlong_prompts
        self.shuffle = shuffle
        self.seed = int(os.environ.get("PL_GLOBAL_SEED", 0)) if seed is None else seed
        self.train_prompts: PromptSet | None = None
        self.validation_prompts: PromptSet | None = None
        self._rollout: RolloutBatch | None = None
        self._pieces: list[RolloutBatch] = []
        self._started = -1
        self._seconds: dict[str, float] = {}

    def setup(self, stage: str) -> None:
        """Loads and checks the prompts the stage needs."""
        trainer, module = self._trainer, policy_owner(self._trainer)
        self.tokenizer = module.tokenizer
        evaluated = self.evaluation.sampling or self.sampling
        for sampling in (self.sampling, evaluated):
            if sampling.max_tokens >= module.context_length:
                raise ValueError(
                    f"sampling.max_tokens is {sampling.max_tokens}, but prompt and completion together may have "
                    f"{module.context_length} tokens in this model"
                )
        if stage == "fit":
            self._check_sizes(trainer)
            self.train_prompts = PromptSet(
                self.task,
                "train",
                self.tokenizer,
                max_tokens=module.context_length - self.sampling.max_tokens,
                overlong=self.overlong_prompts,
                shuffle_seed=self.seed if self.shuffle else None,
            )
        self.validation_prompts = PromptSet(
            self.task,
            "validation",
            self.tokenizer,
            max_tokens=module.context_length - evaluated.max_tokens,
            overlong=self.overlong_prompts,
        )

    def train_dataloader(self) -> RolloutBuffer:
        return RolloutBuffer(self)

    def val_dataloader(self) -> EvaluationBuffer:
        return EvaluationBuffer(self._evaluate)

    def test_dataloader(self) -> EvaluationBuffer:
        return EvaluationBuffer(self._evaluate)

    def rollouts_per_epoch(self) -> int:
        """Rollouts in a stage."""
        if self.num_rollouts is not None:
            return self.num_rollouts
        if self.train_prompts is None:
            raise RuntimeError("the prompts are not loaded yet: setup('fit') comes first")
        return max(1, len(self.train_prompts) // self.num_prompts)

    def micro_batches(self, rollout: int) -> list[RolloutBatch]:
        """The micro-batches of rollout k. It is sampled when it is not the one at hand, hooks included."""
        if self._rollout is None or self._rollout.rollout != rollout:
            trainer = self._trainer
            self._seconds = {}
            if self._started != rollout:  # an interrupt inside generation must not run the hooks twice
                with self._stage("sync"):
                    call_rollout_start(trainer, rollout)
                self._started = rollout
            batch = self.sample(rollout)
            call_rollout_end(trainer, batch)
            self._total(batch)
            if self.behaviour_logprobs == "policy":
                self._recompute_logprobs(batch)
            self._hold(batch)  # last: a half-made rollout must never reach a checkpoint
            call_stage(trainer, "update")
        return self._pieces

    def sample(self, rollout: int) -> RolloutBatch:
        """Rollout k of this rank: a function of the engine's weights, the seed and the prompts' positions alone."""
        if self.train_prompts is None:
            raise RuntimeError("the prompts are not loaded yet: setup('fit') comes first")
        trainer = self._trainer
        share = self.num_prompts // trainer.world_size
        first = rollout * self.num_prompts + trainer.global_rank * share
        prompts = prompts_at(self.train_prompts, range(first, first + share))
        with self._stage("generate"):
            groups = self.engine.generate(prompts, self.group_size, self.sampling, self.seed, self.tokenizer)
        with self._stage("score"):
            prompts, completions = _flatten(prompts, groups)
            rewards = torch.tensor(checked_rewards(self.task.reward, prompts, completions))
            advantages = self.advantage(rewards, self.group_size)
        return collate_rollout(
            prompts,
            completions,
            rewards,
            advantages,
            group_size=self.group_size,
            pad_token_id=self.tokenizer.pad_token_id,
            temperature=self.sampling.temperature,
            rollout=rollout,
        )

    def state_dict(self) -> dict[str, Any]:
        """The rollout at hand on every rank, and the engine's weights: what the next step depends on."""
        own = {"rollout": self._rollout and self._rollout.state_dict(), "started": self._started}
        world_size = self._trainer.world_size
        ranks: list[Any] = [own] * world_size
        if world_size > 1:
            torch.distributed.all_gather_object(ranks, own)
        return {"ranks": ranks, "engine": self.engine.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer = self._trainer
        if trainer.state.fn != TrainerFn.FITTING:  # validation needs the policy alone
            return
        if len(state["ranks"]) != trainer.world_size:
            raise ValueError(
                f"the checkpoint was written by {len(state['ranks'])} processes, this run has {trainer.world_size}: "
                "a rollout in the middle of its passes cannot be dealt anew"
            )
        own = state["ranks"][trainer.global_rank]
        self._started = own["started"]
        if own["rollout"] is not None:
            self._hold(RolloutBatch.from_state_dict(own["rollout"]))
        self.engine.load_state_dict(state["engine"])

    @property
    def _trainer(self) -> L.Trainer:
        if self.trainer is None:
            raise RuntimeError("a RolloutDataModule works with a Trainer: call trainer.fit(module, datamodule=…)")
        return self.trainer

    def _check_sizes(self, trainer: L.Trainer) -> None:
        if self.num_prompts % trainer.world_size:
            raise ValueError(
                f"data.num_prompts is {self.num_prompts}, which {trainer.world_size} ranks do not divide: groups are "
                "never split, so every rank takes the same number of prompts"
            )
        local = self.num_prompts // trainer.world_size * self.group_size
        if trainer.accumulate_grad_batches > local:
            raise ValueError(
                f"each rank has {local} completions in a rollout (data.num_prompts × data.group_size), which cannot be "
                f"cut into trainer.accumulate_grad_batches = {trainer.accumulate_grad_batches} micro-batches"
            )

    @contextmanager
    def _stage(self, stage: Stage) -> Iterator[None]:
        """Announces a stage and adds up the seconds it takes."""
        call_stage(self._trainer, stage)
        start = time.perf_counter()
        yield
        self._seconds[stage] = self._seconds.get(stage, 0.0) + time.perf_counter() - start

    def _hold(self, batch: RolloutBatch) -> None:
        self._rollout = batch
        self._pieces = batch.split(self._trainer.accumulate_grad_batches)

    def _recompute_logprobs(self, batch: RolloutBatch) -> None:
        """log π_α by the policy, in the very pieces that will be trained on: the ratio then starts at exactly 1."""
        trainer = self._trainer
        if self.engine.step != trainer.global_step:
            raise ValueError(
                f"data.behaviour_logprobs is 'policy', but rollout {batch.rollout} was sampled with the weights of "
                f"step {self.engine.step} and the policy is at step {trainer.global_step} already. Use 'engine' with "
                "weight_sync.period above 1"
            )
        for piece in batch.split(trainer.accumulate_grad_batches):
            width = piece.tokens.shape[1]
            batch.behaviour_logprobs[piece.rows, :width] = policy_owner(trainer).policy_logprobs(piece)

    def _total(self, batch: RolloutBatch) -> None:
        """Fills in the denominators of the optimizer step and the rollout's figures, over all ranks."""
        varied = has_reward_variance(batch.rewards, batch.group_size)
        local = {
            "all_tokens": batch.completion_mask.sum(),
            "live_tokens": batch.loss_mask.sum(),
            "all_sequences": batch.completion_mask.any(1).sum(),
            "live_sequences": batch.loss_mask.any(1).sum(),
            "reward": batch.rewards.sum(),
            "reward_squared": batch.rewards.double().square().sum(),
            "zero_variance": (~varied).sum(),
            "truncated": batch.truncated.sum(),
            "ranks": torch.tensor(1),
            **{stage: torch.tensor(seconds) for stage, seconds in self._seconds.items()},
        }
        total = self._reduce(local)
        count, ranks = total["all_sequences"], total["ranks"]
        batch.totals = StepTotals(**{name: total[name] for name in StepTotals.__slots__})
        mean = total["reward"] / count
        batch.metrics = {
            "rollout/reward": mean,
            "rollout/reward_std": max(total["reward_squared"] / count - mean**2, 0.0) ** 0.5,
            "rollout/zero_variance_fraction": total["zero_variance"] / count,
            "rollout/completion_length": total["all_tokens"] / count,
            "rollout/truncated_fraction": total["truncated"] / count,
            **{f"time/{stage}": total[stage] / ranks for stage in ("sync", "generate", "score") if stage in total},
        }

    def _reduce(self, local: dict[str, Tensor]) -> dict[str, float]:
        """Sums over ranks, all of them in one collective."""
        vector = torch.stack([value.double() for value in local.values()])
        strategy = self._trainer.strategy
        reduced = strategy.reduce(vector.to(strategy.root_device), reduce_op="sum")
        return dict(zip(local, reduced.tolist(), strict=True))

    def _evaluate(self) -> EvaluationBatch:
        """Samples of this rank's problems from the current policy, and from a reference not yet measured."""
        trainer, module = self._trainer, policy_owner(self._trainer)
        assert self.validation_prompts is not None
        num_problems = min(self.evaluation.num_problems or len(self.validation_prompts), len(self.validation_prompts))
        if num_problems < trainer.world_size:
            raise ValueError(f"{num_problems} validation problems cannot be shared by {trainer.world_size} ranks")
        prompts = prompts_at(self.validation_prompts, range(trainer.global_rank, num_problems, trainer.world_size))
        call_stage(trainer, "validate")
        correct = self._correct(prompts, module.policy_weights())
        reference = self._correct(prompts, module.reference_weights()) if module.wants_reference_score else None
        return EvaluationBatch(correct=correct, reference_correct=reference)

    def _correct(self, prompts: Sequence[Prompt], weights: PolicyWeights) -> Tensor:
        """[problems, samples] bool."""
        settings = self.evaluation
        with self.engine.holding(weights, self._trainer.global_step):
            groups = self.engine.generate(
                prompts, settings.num_samples, settings.sampling or self.sampling, settings.seed, self.tokenizer
            )
        repeated, completions = _flatten(prompts, groups)
        rewards = torch.tensor(checked_rewards(self.task.reward, repeated, completions))
        return rewards.view(len(prompts), settings.num_samples) >= settings.success_reward


def _flatten(
    prompts: Sequence[Prompt], groups: Sequence[Sequence[Completion]]
) -> tuple[list[Prompt], list[Completion]]:
    """Each completion beside its prompt."""
    pairs = [(prompt, completion) for prompt, group in zip(prompts, groups, strict=True) for completion in group]
    return [p for p, _ in pairs], [c for _, c in pairs]
