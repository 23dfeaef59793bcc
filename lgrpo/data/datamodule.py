"""The Lightning face of everything before the gradient: prompts, sampling, scoring, preparation, validation.

Not here: when weights are synced (callbacks.weight_sync), log π_θ and the loss (module), sampling itself (engines).
"""

from __future__ import annotations

import copy
import os
from typing import Any, Literal

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn

from lgrpo.advantages import Advantage, GroupWhitened
from lgrpo.checks import check_count
from lgrpo.data.buffer import EvaluationBuffer, RolloutBuffer
from lgrpo.data.difficulty import Difficulty, DifficultySampling
from lgrpo.data.dynamic import DynamicSampling
from lgrpo.data.episodes import connect_environment
from lgrpo.data.evaluation import Benchmark, Evaluation, Evaluator, check_names, skip_validation
from lgrpo.data.kept import check_truncation
from lgrpo.data.micro_batches import set_micro_batches
from lgrpo.data.partial import PartialRollouts, checked_partial
from lgrpo.data.prepare import RolloutPreparation, check_logprobs, rows_per_rank
from lgrpo.data.prompts import Prompts, check_max_tokens, load_prompts
from lgrpo.data.sampler import RolloutSampler
from lgrpo.data.schedule import RolloutSchedule, check_lags, checked_overlap
from lgrpo.data.scorer import Scorer
from lgrpo.engines import RolloutEngine, Sampling, TransformersEngine
from lgrpo.hooks import Stage, call_stage, policy_owner
from lgrpo.rewards import Scoring
from lgrpo.run.checkpoints import gather_ranks
from lgrpo.run.resume import ResumeSettings, describe
from lgrpo.tasks import Split, Task
from lgrpo.types import BYTES_PER_TOKEN, EvaluationBatch, RolloutBatch


class RolloutDataModule(L.LightningDataModule):
    """Rollouts of ``num_prompts`` prompts × ``group_size`` completions, each used for ``reuse`` optimizer steps.

    ``setup`` loads the prompts and, for a fit, builds the sampler and the buffer. Lightning then takes micro-batches
    from ``train_dataloader`` and evaluation batches from ``val_dataloader``, which sample when a batch is requested.
    """

    def __init__(
        self,
        task: Task,
        engine: RolloutEngine | None = None,
        num_prompts: int = 32,
        group_size: int = 8,
        reuse: int = 1,
        num_rollouts: int | None = None,
        sampling: Sampling = Sampling(),  # noqa: B008
        behaviour_logprobs: Literal["engine", "policy"] = "engine",
        advantage: Advantage = GroupWhitened(),  # noqa: B008
        dynamic_sampling: DynamicSampling | None = None,
        partial: bool | PartialRollouts = False,
        scoring: Scoring | None = Scoring(),  # noqa: B008
        evaluation: Evaluation = Evaluation(),  # noqa: B008
        benchmarks: dict[str, Benchmark] | None = None,
        generate_ahead: bool = False,
        overlap: bool | None = None,
        lead: int = 0,
        max_lag: int | None = None,
        micro_batch_tokens: int | None = None,
        max_prompt_tokens: int | None = None,
        overlong_prompts: Literal["error", "drop"] = "error",
        difficulty: DifficultySampling | Difficulty | None = None,
        shuffle: bool = True,
        seed: int | None = None,
    ) -> None:
        """
        Args:
            task: Prompts, template and reward.
            engine: Engine that samples completions; by default the embedded one.
            num_prompts: P, prompts in a rollout, over all ranks.
            group_size: G, completions of each prompt, 2 or more.
            reuse: i, optimizer steps on each rollout.
            num_rollouts: Rollouts in a Lightning epoch; by default one pass over the prompts.
            sampling: Sampling settings of training.
            behaviour_logprobs: Source of log π_α: the engine while it samples, or the policy while it still equals the
                behaviour policy (at v = 1, or for a whole cycle with ``generate_ahead``).
            advantage: Advantage, computed from the rewards of whole groups.
            dynamic_sampling: Resampling of groups whose rewards are all equal; by default they are kept.
            partial: Whether a rollout ends when enough groups are whole, and long completions continue in the next one.
            scoring: Workers and limits of rewards that are not known to be harmless; null scores in this process.
            evaluation: Settings of the validation on the task.
            benchmarks: Other tasks to validate on, by name.
            generate_ahead: Whether to sample all rollouts up to the next sync in one call (at most 16 if they overlap,
                and at most 16 of one epoch if weight_sync.period is null). The samples are the same, in larger batches,
                and the engine sleeps once a cycle instead of once a rollout.
            overlap: Whether to sample the rest of a cycle in the background while the trainer updates. The samples are
                the same; engine and trainer need their memory at the same time. By default with servers only. At
                weight_sync.period 1 it has an effect only with a ``lead``.
            lead: o, number of rollouts by which sampling precedes training; the lag grows by as many.
            max_lag: Largest lag, in optimizer steps, of a completion in a step on it; by default unlimited. With
                ``reuse`` above 1 a completion may leave after its first passes. Recorded completions have no lag.
            micro_batch_tokens: Upper limit of tokens in a micro-batch, including prompts and all contexts: sets
                trainer.accumulate_grad_batches so that no lengths can exceed it. Shorter completions fill fewer
                micro-batches, and the others are empty. The gradient is the same.
            max_prompt_tokens: Upper limit of a prompt's length; by default the model's context minus a completion.
            overlong_prompts: Treatment of longer prompts.
            difficulty: How often each training prompt comes: by a field of its row, or by its pass rate so far
                (``lgrpo.data.Measured``). By default all come once in a pass.
            shuffle: Whether every pass over the prompts has its own random order.
            seed: Seed of prompts and completions; by default that of ``seed_everything``, or 0.
        """
        super().__init__()
        self.task = task
        self.engine: RolloutEngine = TransformersEngine() if engine is None else engine
        connect_environment(task, self.engine, benchmarks or {}, advantage)
        counts = {"num_prompts": num_prompts, "reuse": reuse, "num_rollouts": num_rollouts}
        counts |= {"micro_batch_tokens": micro_batch_tokens, "max_prompt_tokens": max_prompt_tokens}
        for name, value in counts.items():
            check_count(f"data.{name}", value, at_least=1)
        check_lags(max_lag, lead, reuse, self.engine)
        check_count("data.group_size", group_size, at_least=2, reason="advantages compare the completions of a group")
        check_truncation(sampling, self.engine)
        if difficulty is not None:
            difficulty.check(self.engine, dynamic_sampling is not None)
        self.num_prompts = num_prompts
        self.group_size = group_size
        self.reuse = reuse
        self.num_rollouts = num_rollouts
        self.sampling = sampling
        self.behaviour_logprobs: Literal["engine", "policy"] = behaviour_logprobs
        self.advantage = copy.deepcopy(advantage)  # the default is one object shared by all instances
        self.dynamic_sampling = dynamic_sampling
        self.partial = checked_partial(partial, self.engine, behaviour_logprobs, dynamic_sampling is not None)
        self.scoring = scoring
        self.evaluation = evaluation
        self.benchmarks = benchmarks or {}
        check_names(self.benchmarks)
        self.lead = lead
        self.generate_ahead = generate_ahead
        self.overlap = checked_overlap(overlap, self.engine)
        self.max_lag = max_lag
        self.micro_batch_tokens = micro_batch_tokens
        self.max_prompt_tokens = max_prompt_tokens
        self.overlong_prompts: Literal["error", "drop"] = overlong_prompts
        self.difficulty = difficulty
        self.shuffle = shuffle
        self.seed = int(os.environ.get("PL_GLOBAL_SEED", 0)) if seed is None else seed
        self.train_prompts: Prompts | None = None
        self.schedule = RolloutSchedule(
            self.engine, reuse=reuse, lead=lead, generate_ahead=generate_ahead, overlap=self.overlap
        )
        self._scorers: dict[str, Scorer] = {}
        self._buffer: RolloutBuffer | None = None
        self._evaluators: list[Evaluator] = []
        self._fingerprint = ""

    # Lightning's hooks

    def setup(self, stage: str) -> None:
        """Load and check the prompts the stage needs."""
        self.engine.check_installed()
        trainer = self._trainer
        self.tokenizer = policy_owner(trainer).policy.tokenizer
        tasks: dict[str, tuple[Task, Evaluation]] = {"": (self.task, self.evaluation)}
        tasks |= {name: (benchmark.task, benchmark) for name, benchmark in self.benchmarks.items()}
        self._close_scorers()
        self._scorers = {name: Scorer(task.reward, self.scoring) for name, (task, _) in tasks.items()}
        if stage == "fit":
            self._setup_fit(trainer)
        self._evaluators = [
            self._evaluator(name, task, settings)
            for name, (task, settings) in tasks.items()
            if len(task.rows("validation"))
        ]
        if not self._evaluators:
            skip_validation(trainer, stage)

    def _setup_fit(self, trainer: L.Trainer) -> None:
        num_rows = rows_per_rank(self.num_prompts, self.group_size, trainer)
        self.train_prompts = self._prompts(self.task, "train", self.sampling)
        self._fingerprint = self.train_prompts.fingerprint()
        num_contexts = self.engine.max_contexts
        longest = num_contexts * (self.train_prompts.longest + self.sampling.max_tokens)
        budget = set_micro_batches(trainer, num_rows, longest, self.micro_batch_tokens)
        sampler = RolloutSampler(
            prompts=self.train_prompts,
            scorer=self._scorers[""],
            engine=self.engine,
            tokenizer=self.tokenizer,
            num_prompts=self.num_prompts,
            group_size=self.group_size,
            sampling=self.sampling.with_kept(),
            seed=self.seed,
            dynamic=self.dynamic_sampling,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            overlap=self.overlap,
            pause=self.schedule.pause,
            partial=self.partial,
            on_stage=self._on_stage,
        )
        rollouts_per_epoch = self.num_rollouts or max(1, len(self.train_prompts) // self.num_prompts)
        bytes_per_token = BYTES_PER_TOKEN + 4 * self.sampling.top_k
        self.schedule.reset(trainer, sampler, rollouts_per_epoch, num_rows * longest * bytes_per_token)
        sampler.prepare_engine(self.schedule.end_of_run(trainer))
        if budget is not None:
            budget.check_contexts(num_contexts, self.engine.max_contexts)
        check_logprobs(self.engine, self.behaviour_logprobs, policy_owner(trainer).loss)
        preparation = RolloutPreparation(
            trainer=trainer,
            schedule=self.schedule,
            rescore=sampler.rescore,
            advantage=self.advantage,
            seed=self.seed,
            behaviour_logprobs=self.behaviour_logprobs,
            max_lag=self.max_lag,
            mask_failures=self.scoring is not None and self.scoring.mask_failures,
            budget=budget,
            curriculum=self.train_prompts.curriculum,
            success_reward=self.evaluation.success_reward,
            started=sampler.started,
            busy_seconds=sampler.busy_seconds,
        )
        self._buffer = RolloutBuffer(trainer, self.schedule, preparation, rollouts_per_epoch)

    def teardown(self, stage: str) -> None:
        self.schedule.close()  # a fit that stops early may be sampling
        self._close_scorers()

    def on_exception(self, exception: BaseException) -> None:
        self._close_scorers()  # their threads would keep the process alive until the last score
        self.schedule.close()

    def train_dataloader(self) -> RolloutBuffer:
        if self._buffer is None:
            raise RuntimeError("the prompts are not loaded yet: call setup('fit') first")
        return self._buffer

    def val_dataloader(self) -> EvaluationBuffer:
        return EvaluationBuffer(self._evaluate, len(self._evaluators))

    test_dataloader = val_dataloader

    def state_dict(self) -> dict[str, Any]:
        """Return what the next step needs: current and queued rollouts of every rank, and the engine's weights.

        Rollouts being sampled are not waited for: after a resume they are sampled again, from the same weights.
        """
        own = {"schedule": self.schedule.state_dict(), "buffer": self._buffer and self._buffer.rollout_state()}
        ranks = gather_ranks(self._trainer, own | {"exhausted": self.engine.state.exhausted})
        exhausted = [rank.pop("exhausted") for rank in ranks]
        with self.engine.kept(not all(exhausted)):  # the slowest rank may still need the weights
            state = {"ranks": ranks, "engine": self.engine.state_dict()}
        self.schedule.rest_engine()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer = self._trainer
        if trainer.state.fn != TrainerFn.FITTING:  # validation needs the policy only
            return
        own = state["ranks"][trainer.global_rank]
        self.schedule.load_state_dict(own["schedule"])
        if self._buffer is not None and own["buffer"] is not None:
            self._buffer.restore_rollout(own["buffer"])
        self.engine.load_state_dict(state["engine"], policy_owner(trainer).policy_weights())

    def resume_settings(self) -> ResumeSettings:
        """Return the settings that a resumed run must share with its checkpoint, or is warned about."""
        names = ["num_prompts", "group_size", "reuse", "lead", "seed", "shuffle", "difficulty", "sampling", "advantage"]
        names += ["dynamic_sampling", "partial", "generate_ahead", "behaviour_logprobs"]
        settings = {f"data.{name}": describe(getattr(self, name)) for name in names}
        return settings | {"data.prompts": self._fingerprint} | self.engine.resume_settings()

    # Rollouts

    @property
    def rollout(self) -> RolloutBatch | None:
        """Current rollout, as it is trained on; None before the first."""
        return None if self._buffer is None else self._buffer.rollout

    @property
    def micro_batches(self) -> list[RolloutBatch]:
        """The current rollout as the optimizer step takes it, in pieces; empty before the first."""
        return [] if self._buffer is None else self._buffer.micro_batches

    def sampled(self) -> list[RolloutBatch]:
        """Return the current rollout and the queued ones, in order. Queued rollouts have no advantages yet."""
        return [*([self.rollout] if self.rollout else []), *self.schedule.ready()]

    # Validation

    def _evaluate(self, index: int) -> EvaluationBatch:
        self.schedule.wait()  # the engine is about to hold other weights
        batch = self._evaluators[index].evaluate()
        self.schedule.rest_engine()
        return batch

    def sample_held_out(self, num_prompts: int) -> RolloutBatch:
        """Return this rank's part of scored groups for the first validation prompts, from the current policy.

        They are sampled with ``sampling``, not ``evaluation.sampling``, so that ratios of completions are exact.
        """
        evaluator = next((evaluator for evaluator in self._evaluators if not evaluator.name), None)
        if evaluator is None:
            raise ValueError("there are no held-out prompts: the task has no validation set")
        self.schedule.wait()
        batch = evaluator.held_out_rollout(num_prompts, self.group_size, self.sampling.with_kept())
        self.schedule.rest_engine()
        return batch

    def _evaluator(self, name: str, task: Task, settings: Evaluation) -> Evaluator:
        sampling = settings.sampling or self.sampling
        return Evaluator(
            name=name,
            task=task,
            settings=settings,
            prompts=self._prompts(task, "validation", sampling),
            scorer=self._scorers[name],
            sampling=sampling,
            engine=self.engine,
            tokenizer=self.tokenizer,
            trainer=self._trainer,
        )

    def _prompts(self, task: Task, split: Split, sampling: Sampling) -> Prompts:
        context, is_training = policy_owner(self._trainer).policy.context_length, split == "train"
        check_max_tokens(sampling.max_tokens, context)
        return load_prompts(
            task,
            split,
            self.tokenizer,
            max_tokens=min(context - sampling.max_tokens, self.max_prompt_tokens or context),
            overlong=self.overlong_prompts,
            shuffle_seed=self.seed if is_training and self.shuffle else None,
            difficulty=self.difficulty if is_training else None,
            num_prompts=self.num_prompts,
            tools=self.engine.tool_schemas(),
        )

    def _close_scorers(self) -> None:
        for scorer in self._scorers.values():
            scorer.close()
        self._scorers = {}

    @property
    def _trainer(self) -> L.Trainer:
        if self.trainer is None:
            raise RuntimeError("a RolloutDataModule needs a Trainer: call trainer.fit(module, datamodule=…)")
        return self.trainer

    def _on_stage(self, stage: Stage) -> None:
        """Announce a stage, unless it runs in the background."""
        if not self.overlap:
            call_stage(self._trainer, stage)
