"""Resampling of groups whose rewards are all equal."""

from __future__ import annotations

from dataclasses import dataclass

from lgrpo.checks import check_count, check_range
from lgrpo.data.collate import Group, as_rewards
from lgrpo.functional import has_reward_variance


@dataclass(kw_only=True, frozen=True)
class DynamicSampling:
    """Resampling of groups whose rewards are all equal, with other prompts (DAPO)."""

    max_rounds: int = 4
    """Upper limit of resampling rounds. Groups without variance after the last round are kept: a rollout is always
    complete."""
    tolerance: float = 1e-6
    """Largest difference of rewards that count as equal."""

    def __post_init__(self) -> None:
        reason = "to turn resampling off, leave dynamic_sampling out"
        check_count("dynamic_sampling.max_rounds", self.max_rounds, at_least=1, reason=reason)
        check_range("dynamic_sampling.tolerance", self.tolerance, at_least=0)


def may_vary(group: Group, tolerance: float) -> bool:
    """Return whether the rewards of a group differ, or may differ when the missing ones are known."""
    rewards = as_rewards(group.scores)
    return bool(rewards.isnan().any()) or bool(has_reward_variance(rewards, len(rewards), tolerance)[0])
