"""How a policy is validated, on the run's own task and on others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from lgrpo.data.collate import as_rewards
from lgrpo.data.prompts import PromptSet, prompts_at
from lgrpo.data.scorer import Scorer
from lgrpo.engines import RolloutEngine, Sampling
from lgrpo.tasks import Task
from lgrpo.types import Completion, PolicyWeights, Prompt


@dataclass(kw_only=True, frozen=True)
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
    results: Literal["jsonl", "parquet"] | None = None
    """Write every problem with its completions and rewards into the run folder (evaluations/); by default not."""

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ValueError(f"evaluation.num_samples is {self.num_samples}; at least 1 sample is needed")
        if self.num_problems is not None and self.num_problems < 1:
            raise ValueError(f"evaluation.num_problems is {self.num_problems}; at least 1 problem is needed")

    def share(self, num_available: int, rank: int, world_size: int) -> range:
        """Positions of the problems a rank takes."""
        num_problems = min(self.num_problems or num_available, num_available)
        if num_problems < world_size:
            raise ValueError(f"{num_problems} validation problems cannot be shared by {world_size} ranks")
        return range(rank, num_problems, world_size)


@dataclass(kw_only=True, frozen=True)
class Benchmark(Evaluation):
    """Another task to validate on, with settings of its own."""

    task: Task
    """Whose validation set it is."""


@dataclass(kw_only=True, slots=True)
class Samples:
    """A rank's problems, their completions, and what these are worth."""

    problems: list[Prompt]
    groups: list[list[Completion]]
    rewards: Tensor
    """[problems, samples] float32; NaN where a score is not there yet."""
    correct: Tensor
    """[problems, samples] bool."""
    final_answers: list[list[str | None]]

    @property
    def answers(self) -> Tensor:
        """[problems, samples] int64: which completions of a problem end in the same answer; -1 for those without."""
        numbers = []
        for answers in self.final_answers:
            known = {answer: number for number, answer in enumerate(dict.fromkeys(a for a in answers if a is not None))}
            numbers.append([-1 if answer is None else known[answer] for answer in answers])
        return torch.tensor(numbers)

    def table(self) -> list[dict[str, Any]]:
        """A row for each problem."""
        return [
            {
                "problem": prompt.position,
                "prompt": prompt.text,
                "row": dict(prompt.row),
                "completions": [completion.text for completion in group],
                "final_answers": answers,
                "rewards": [None if reward != reward else reward for reward in rewards.tolist()],
                "correct": correct.tolist(),
                "num_tokens": [len(completion.token_ids) for completion in group],
                "finish_reasons": [completion.finish_reason for completion in group],
            }
            for prompt, group, answers, rewards, correct in zip(
                self.problems, self.groups, self.final_answers, self.rewards, self.correct, strict=True
            )
        ]


class Evaluator:
    """A validation set, and how it is sampled."""

    def __init__(
        self,
        name: str,
        task: Task,
        settings: Evaluation,
        prompts: PromptSet,
        scorer: Scorer,
        sampling: Sampling,
    ) -> None:
        self.name = name
        self.task = task
        self.settings = settings
        self.prompts = prompts
        self.scorer = scorer
        self.sampling = sampling

    def __call__(
        self,
        weights: PolicyWeights,
        engine: RolloutEngine,
        step: int,
        tokenizer: PreTrainedTokenizerBase,
        rank: int,
        world_size: int,
        is_shown: bool,
    ) -> Samples:
        """Samples of this rank's problems from some weights, scored; in a terminal, with a bar if ``is_shown``."""
        settings = self.settings
        problems = prompts_at(self.prompts, settings.share(len(self.prompts), rank, world_size))
        scores_of = self.scorer.follow(problems)
        bar = tqdm(
            total=len(problems), desc=self.name or "validation", unit="problem", disable=None if is_shown else True
        )

        def following(place: int, completions: list[Completion]) -> None:
            scores_of(place, completions)
            bar.update()

        with engine.holding(weights, step), bar:
            groups = engine.generate(problems, settings.num_samples, self.sampling, settings.seed, tokenizer, following)
        scores = scores_of.result()
        self.scorer.reward.report()  # these are not a rollout's
        rewards = torch.stack([as_rewards(group) for group in scores])
        return Samples(
            problems=problems,
            groups=groups,
            rewards=rewards,
            correct=rewards >= settings.success_reward,
            final_answers=[[self.task.final_answer(c.text) for c in group] for group in groups],
        )
