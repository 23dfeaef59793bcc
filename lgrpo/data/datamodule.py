"""The data module: samples, scores and hands over rollouts, keyed to the behaviour policy.

Not here: when weights move (callbacks.weight_sync), log π_θ and the loss (module), how completions are drawn (engines).
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Sequence
from typing import Any, Literal

import lightning as L
import torch
from jsonargparse.typing import NonNegativeInt, PositiveInt
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info

from lgrpo.advantages import Advantage, GroupWhitened
from lgrpo.data.buffer import EvaluationBuffer, RolloutBuffer
from lgrpo.data.compare import set_advantages
from lgrpo.data.evaluation import Benchmark, Evaluation, Evaluator
from lgrpo.data.late import LateGroups, completions_of, join_late
from lgrpo.data.micro_batches import keep_to_budget
from lgrpo.data.prompts import DifficultySampling, Prompts, PromptSet, load_prompts
from lgrpo.data.recompute import recompute_logprobs
from lgrpo.data.recorded import prepare_engine
from lgrpo.data.sampler import DynamicSampling, RolloutSampler
from lgrpo.data.schedule import RolloutSchedule
from lgrpo.data.scorer import Scorer
from lgrpo.data.totals import fill_totals
from lgrpo.data.validation import held_out_rollout, validate
from lgrpo.engines import RolloutEngine, Sampling, TransformersEngine
from lgrpo.hooks import Stage, call_rollout_end, call_stage, policy_owner
from lgrpo.rewards import Score, Scoring
from lgrpo.settings import Settings, describe
from lgrpo.tasks import Split, Task
from lgrpo.types import EvaluationBatch, RolloutBatch


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
        dynamic_sampling: DynamicSampling | None = None,
        scoring: Scoring | None = Scoring(),  # noqa: B008
        evaluation: Evaluation = Evaluation(),  # noqa: B008
        benchmarks: dict[str, Benchmark] | None = None,
        generate_ahead: bool = False,
        lead: NonNegativeInt = 0,
        max_lag: NonNegativeInt | None = None,
        micro_batch_tokens: PositiveInt | None = None,
        max_prompt_tokens: PositiveInt | None = None,
        overlong_prompts: Literal["error", "drop"] = "error",
        difficulty: DifficultySampling | None = None,
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
                equals the behaviour policy: at v = 1, or for a whole cycle at once with ``generate_ahead``.
            advantage: From the rewards of whole groups to advantages.
            dynamic_sampling: Groups whose rewards are all equal are sampled again; by default they stay.
            scoring: Workers and limits of rewards that are not known to be harmless; null: all rewards in this process.
            evaluation: How the task's own validation set is sampled.
            benchmarks: Other tasks to validate on, by name.
            generate_ahead: Sample all rollouts up to the next sync in one call. The samples are the same; an engine is
                fuller, and sleeps once a cycle instead of once a rollout.
            lead: o, how many rollouts before it is trained on a rollout is sampled: the lag grows by that much.
            max_lag: A completion older than this many optimizer steps is never trained on; by default any is. Recorded
                ones have no age in this run.
            micro_batch_tokens: Most tokens of a micro-batch, prompts included: trainer.accumulate_grad_batches is set
                so that no lengths can exceed it. The gradient stays the same.
            max_prompt_tokens: Longest prompt; by default what the model's context leaves beside a completion.
            overlong_prompts: What becomes of a longer one.
            difficulty: Draw training prompts by their difficulty; by default all alike.
            shuffle: Draw the prompts of every pass in an order of its own.
            seed: Of prompts and completions; by default the one given to ``seed_everything``, or 0.
        """
        super().__init__()
        for name, value, least in (("num_prompts", num_prompts, 1), ("group_size", group_size, 2), ("reuse", reuse, 1)):
            if value < least:
                reason = ": a group of one has nothing to be compared with" if name == "group_size" else ""
                raise ValueError(f"data.{name} is {value}; it must be {least} or more{reason}")
        if lead < 0:
            raise ValueError(f"data.lead is {lead}; it counts rollouts, 0 or more")
        if sampling.is_truncated:
            raise ValueError(
                "data.sampling sets top_k, top_p or min_p: a truncated draw gives the dropped tokens no probability, "
                "so π_θ/π_α is not a ratio of the policies any more. Sample the whole distribution when training, and "
                "truncate in data.evaluation.sampling alone"
            )
        self.task = task
        self.engine: RolloutEngine = TransformersEngine() if engine is None else engine
        self.num_prompts = int(num_prompts)  # plain numbers, as a checkpoint loads without executing code
        self.group_size = int(group_size)
        self.reuse = int(reuse)
        self.num_rollouts = None if num_rollouts is None else int(num_rollouts)
        self.sampling = sampling
        self.behaviour_logprobs: Literal["engine", "policy"] = behaviour_logprobs
        self.advantage = copy.deepcopy(advantage)  # the default is one object for all
        self.dynamic_sampling = dynamic_sampling
        self.scoring = scoring
        self.evaluation = evaluation
        self.benchmarks = benchmarks or {}
        if bad := [name for name in self.benchmarks if not name or "/" in name]:
            raise ValueError(f"data.benchmarks has {bad}: a name is what its figures are logged under, without a slash")
        self.lead = int(lead)
        self.max_lag = max_lag
        self.micro_batch_tokens = micro_batch_tokens
        self.max_prompt_tokens = max_prompt_tokens
        self.overlong_prompts: Literal["error", "drop"] = overlong_prompts
        self.difficulty = difficulty
        self.shuffle = shuffle
        self.seed = int(os.environ.get("PL_GLOBAL_SEED", 0)) if seed is None else seed
        self.train_prompts: Prompts | None = None
        self.schedule = RolloutSchedule(
            self.engine,
            lambda rollouts: self.sample(rollouts),  # as it will be once the prompts are there
            self.rollouts_per_epoch,
            reuse=self.reuse,
            lead=self.lead,
            generate_ahead=generate_ahead,
        )
        self._scorers: dict[str, Scorer] = {}
        self._sampler: RolloutSampler | None = None
        self._evaluators: list[Evaluator] = []
        self._late = LateGroups()
        self._rollout: RolloutBatch | None = None
        self._pieces: list[RolloutBatch] = []
        self._handed_over: float | None = None
        self._fingerprint = ""

    # What Lightning asks for

    def setup(self, stage: str) -> None:
        """Loads and checks the prompts the stage needs."""
        trainer, module = self._trainer, policy_owner(self._trainer)
        self.tokenizer = module.tokenizer
        wanted: dict[str, tuple[Task, Evaluation]] = {"": (self.task, self.evaluation)}
        wanted |= {name: (benchmark.task, benchmark) for name, benchmark in self.benchmarks.items()}
        self._close_scorers()
        self._scorers = {name: Scorer(task.reward, self.scoring) for name, (task, _) in wanted.items()}
        if stage == "fit":
            self._check_sizes(trainer)
            self.schedule.reset(trainer)
            self._rollout, self._late = None, LateGroups()  # nothing of an earlier fit stays
            self.train_prompts = self._prompts(self.task, "train", self.sampling)
            self._fingerprint = self.train_prompts.fingerprint()
            if self.micro_batch_tokens is not None:
                num_rows = self.num_prompts // trainer.world_size * self.group_size
                longest = self.train_prompts.longest + self.sampling.max_tokens
                keep_to_budget(trainer, num_rows, longest, self.micro_batch_tokens)
            prepare_engine(self.engine, self, self.train_prompts, self.schedule.end_of_run(trainer), module)
            if self.dynamic_sampling is not None and self.train_prompts.is_streamed:
                raise ValueError("data.dynamic_sampling draws prompts from anywhere: a streamed set cannot give them")
            self._sampler = RolloutSampler(
                self.train_prompts,
                self._scorers[""],
                self.engine,
                self.tokenizer,
                num_prompts=self.num_prompts,
                group_size=self.group_size,
                sampling=self.sampling,
                seed=self.seed,
                dynamic=self.dynamic_sampling,
                rank=trainer.global_rank,
                world_size=trainer.world_size,
                on_stage=self._on_stage,
            )
        self._evaluators = [
            self._evaluator(name, task, settings)
            for name, (task, settings) in wanted.items()
            if len(task.rows("validation"))
        ]
        if not self._evaluators and (stage != "fit" or trainer.limit_val_batches):
            raise ValueError(
                "there is nothing to validate on: the task has no validation set, and data.benchmarks names no other "
                "task. Give one, or set trainer.limit_val_batches to 0"
            )

    def teardown(self, stage: str) -> None:
        self._close_scorers()

    def on_exception(self, exception: BaseException) -> None:
        self._close_scorers()  # else their threads would keep the process until the last score is there
        self.schedule.close()

    def train_dataloader(self) -> RolloutBuffer:
        return RolloutBuffer(self)

    def val_dataloader(self) -> EvaluationBuffer:
        return EvaluationBuffer(self._evaluate, len(self._evaluators))

    def test_dataloader(self) -> EvaluationBuffer:
        return EvaluationBuffer(self._evaluate, len(self._evaluators))

    def state_dict(self) -> dict[str, Any]:
        """On every rank the rollout at hand and those in the queue; the engine's weights: what the next step needs.

        What is being sampled meanwhile is not waited for: it is sampled again after a resume, from the same weights.
        """
        own = {
            "rollout": self._rollout and self._rollout.state_dict(),
            "late": [group.state_dict() for group in self._late.waiting],
            "schedule": self.schedule.state_dict(),
        }
        world_size = self._trainer.world_size
        ranks: list[Any] = [own] * world_size
        if world_size > 1:
            torch.distributed.all_gather_object(ranks, own)
        engine = self.engine.state_dict()
        self.engine.rest()
        return {"ranks": ranks, "engine": engine}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer = self._trainer
        if trainer.state.fn != TrainerFn.FITTING:  # validation needs the policy alone
            return
        own = state["ranks"][trainer.global_rank]
        self.schedule.load_state_dict(own["schedule"])
        late = LateGroups(waiting=[RolloutBatch.from_state_dict(group) for group in own["late"]])
        if own["rollout"] is not None:
            self._hold(RolloutBatch.from_state_dict(own["rollout"]), late)
        self.engine.load_state_dict(state["engine"], policy_owner(trainer).policy_weights())

    def resume_settings(self) -> Settings:
        """What a run that goes on must have in common with this one, or be told of."""
        return {
            "data.num_prompts": self.num_prompts,
            "data.group_size": self.group_size,
            "data.reuse": self.reuse,
            "data.lead": self.lead,
            "data.prompts": self._fingerprint,
            "data.seed": self.seed,
            "data.shuffle": self.shuffle,
            "data.sampling": describe(self.sampling),
            "data.dynamic_sampling": describe(self.dynamic_sampling),
            "data.generate_ahead": self.schedule.generate_ahead,
            "data.behaviour_logprobs": self.behaviour_logprobs,
        }

    # Rollouts

    def rollouts_per_epoch(self) -> int:
        """Rollouts in a stage."""
        if self.num_rollouts is not None:
            return self.num_rollouts
        if self.train_prompts is None:
            raise RuntimeError("the prompts are not loaded yet: setup('fit') comes first")
        return max(1, len(self.train_prompts) // self.num_prompts)

    @property
    def rollout(self) -> RolloutBatch | None:
        """The rollout at hand, as it is trained on; None before the first."""
        return self._rollout

    def sampled(self) -> list[RolloutBatch]:
        """The rollout at hand and those that wait for their turn, in order. The latter have no advantages yet."""
        return [*([self._rollout] if self._rollout else []), *self.schedule.ready()]

    def micro_batches(self, rollout: int) -> list[RolloutBatch]:
        """The micro-batches of rollout k. When it is not the one at hand it is taken from the queue, hooks included."""
        if self._rollout is None or self._rollout.rollout != rollout:
            self._hold(*self._prepare(rollout))  # last: a half-made rollout must never reach a checkpoint
            call_stage(self._trainer, "update")
            self.schedule.handed_over(self._trainer, rollout)
        return self._pieces

    def sample(self, rollouts: range) -> list[RolloutBatch]:
        """Some rollouts of this rank, sampled and scored."""
        if self._sampler is None:
            raise RuntimeError("the prompts are not loaded yet: setup('fit') comes first")
        return self._sampler(rollouts)

    def _prepare(self, rollout: int) -> tuple[RolloutBatch, LateGroups]:
        """Rollout k as it will be trained on: sampled, masked, its denominators known; and the groups still waiting."""
        trainer, start = self._trainer, time.perf_counter()
        batch, sync_seconds = self.schedule.get(trainer, rollout)
        oldest = 0 if self.max_lag is None else trainer.global_step + self.reuse - 1 - self.max_lag
        waited = self.lead > 0 or self.schedule.generate_ahead or self.engine.can_overlap
        batch, late = join_late(self._late, batch, self._ask_again, oldest, waited, trainer)
        if late.in_play and self.behaviour_logprobs == "policy":
            raise ValueError(
                "a reward answered 'not yet', and data.behaviour_logprobs is 'policy': when a late group trains the "
                "policy has moved on. Use 'engine'"
            )
        self._refuse_old(batch)
        if self.scoring is not None and self.scoring.mask_failures:
            batch.loss_mask &= ~batch.failed[:, None]
        set_advantages(batch, self.advantage, self.seed, trainer)
        call_rollout_end(trainer, batch)
        now = time.perf_counter()
        own = {"time/sync": sync_seconds, "time/wait": now - start}
        if self._handed_over is not None:
            period = now - self._handed_over
            own["time/trainer_idle_share"] = (now - start) / period
            own["time/engine_idle_share"] = max(0.0, 1 - batch.metrics["time/generate"] / period)
        self._handed_over = now
        batch.metrics |= own
        fill_totals(batch, trainer)
        if self.behaviour_logprobs == "policy":
            recompute_logprobs(batch, self.schedule.ready(), trainer)
        return batch, late

    def _ask_again(self, groups: Sequence[RolloutBatch]) -> list[list[Score]]:
        """The scores of groups that wait, as far as they are there by now."""
        assert self.train_prompts is not None
        scorer = self._scorers[""]
        prompts = [self.train_prompts.at(int(group.positions[0])) for group in groups]
        scores_of = scorer.follow(prompts)
        for place, group in enumerate(groups):
            scores_of(place, completions_of(group, self.tokenizer, self.sampling))
        scores = scores_of.result()
        if not self.engine.can_overlap:
            scorer.reward.report()  # these were counted when they were first asked for
        return scores

    def _refuse_old(self, batch: RolloutBatch) -> None:
        """Takes completions out of the loss that would be older than ``max_lag`` at the rollout's last pass."""
        if self.max_lag is None:
            return
        too_old = batch.lag(self._trainer.global_step + self.reuse - 1) > self.max_lag  # false for recorded ones
        batch.loss_mask &= ~too_old[:, None]

    def _hold(self, batch: RolloutBatch, late: LateGroups) -> None:
        self._rollout, self._late = batch, late
        self._pieces = batch.split(self._trainer.accumulate_grad_batches)

    # Validation

    def _evaluate(self, index: int) -> EvaluationBatch:
        """Samples of this rank's problems of one task."""
        self.schedule.wait()  # the engine is about to hold other weights
        batch = validate(self._evaluators[index], self.engine, self.tokenizer, self._trainer)
        self.engine.rest()
        return batch

    def sample_held_out(self, num_prompts: int) -> RolloutBatch:
        """Scored groups of the task's first held-out prompts, this rank's share, drawn from the policy as it is now.

        As in training, and not as ``evaluation.sampling`` says: the ratio of whole completions is honest then.
        """
        own = next((evaluator for evaluator in self._evaluators if not evaluator.name), None)
        if own is None:
            raise ValueError("there are no held-out prompts: the task has no validation set")
        self.schedule.wait()  # the engine is about to hold other weights
        sizes = num_prompts, self.group_size
        batch = held_out_rollout(own, *sizes, self.sampling, self.engine, self.tokenizer, self._trainer)
        self.engine.rest()
        return batch

    def _evaluator(self, name: str, task: Task, settings: Evaluation) -> Evaluator:
        sampling = settings.sampling or self.sampling
        prompts = self._prompts(task, "validation", sampling)
        assert isinstance(prompts, PromptSet)
        return Evaluator(name, task, settings, prompts, self._scorers[name], sampling)

    # The rest

    def _prompts(self, task: Task, split: Split, sampling: Sampling) -> Prompts:
        context = policy_owner(self._trainer).context_length
        if sampling.max_tokens >= context:
            raise ValueError(
                f"sampling.max_tokens is {sampling.max_tokens}, but prompt and completion together may have "
                f"{context} tokens in this model"
            )
        training = split == "train"
        prompts = load_prompts(
            task,
            split,
            self.tokenizer,
            max_tokens=min(context - sampling.max_tokens, self.max_prompt_tokens or context),
            overlong=self.overlong_prompts,
            shuffle_seed=self.seed if training and self.shuffle else None,
            difficulty=self.difficulty if training else None,
        )
        if prompts.num_dropped and not prompts.is_streamed:
            rank_zero_info(f"{prompts.num_dropped} overlong prompts dropped, {len(prompts)} kept.")
        return prompts

    def _close_scorers(self) -> None:
        for scorer in self._scorers.values():
            scorer.close()
        self._scorers = {}

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

    def _on_stage(self, stage: Stage) -> None:
        """Announces a stage, unless it runs behind the trainer's back."""
        if not self.engine.can_overlap:
            call_stage(self._trainer, stage)
