"""How a policy is validated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lgrpo.engines import Sampling
from lgrpo.rewards import checked_rewards
from lgrpo.tasks import Task
from lgrpo.types import Completion, Prompt


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

    def correct(self, groups: Sequence[Sequence[Completion]], prompts: Sequence[Prompt], task: Task) -> Tensor:
        """[problems, samples] bool: which completions are right."""
        repeated, completions = pair_up(prompts, groups)
        rewards = torch.tensor(checked_rewards(task.reward, repeated, completions))
        return rewards.view(len(prompts), self.num_samples) >= self.success_reward


def pair_up(prompts: Sequence[Prompt], groups: Sequence[Sequence[Completion]]) -> tuple[list[Prompt], list[Completion]]:
    """Each completion beside its prompt."""
    pairs = [(prompt, completion) for prompt, group in zip(prompts, groups, strict=True) for completion in group]
    return [p for p, _ in pairs], [c for _, c in pairs]
