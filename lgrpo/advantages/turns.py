"""Advantages of the turns of episodes."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from lgrpo.advantages.base import Advantage, Scores
from lgrpo.advantages.group import ComposedAdvantage, GroupWhitened
from lgrpo.checks import check_count, check_range
from lgrpo.functional import turn_returns


@final
class TurnAdvantage(Advantage):
    """Advantage of each turn of an episode, relative to the same turn of its siblings.

    The return of a turn is the sum of the rewards from it on, each further turn discounted by ``discount``. It is
    compared with those of the siblings that have reached a turn of this index. The environment's rewards of turns count
    with the weight that ``EnvironmentReward`` has in the task's reward; the rest of that reward belongs to the last
    turn. With one turn, this is ``advantage`` itself.
    """

    needs_turns = True
    uses_zero_variance = True  # episodes with equal rewards may have got them in different turns

    def __init__(
        self,
        advantage: ComposedAdvantage = GroupWhitened(),  # noqa: B008
        discount: float = 1.0,
        episode_share: float = 0.0,
        min_siblings: int = 2,
    ) -> None:
        """
        Args:
            advantage: Advantage that compares returns; its baseline and scale must be statistics of a group.
            discount: Factor γ of the rewards of each further turn, from 0 (only the turn's own) to 1.
            episode_share: Share of the ordinary advantage of the episode in that of its turns, from 0 to 1.
            min_siblings: Number of episodes of a group that must have reached a turn, with the own one; with fewer, the
                turn is compared with nothing, and its return counts as equal to the baseline.
        """
        check_range("TurnAdvantage's discount", discount, at_least=0, at_most=1)
        check_range("TurnAdvantage's episode_share", episode_share, at_least=0, at_most=1)
        check_count("TurnAdvantage's min_siblings", min_siblings, at_least=2, reason="one return is its own mean")
        for part in (advantage.baseline, advantage.scale):
            if part.uses_rollout:
                raise ValueError(
                    f"{type(part).__name__} is a statistic of the whole rollout, but TurnAdvantage compares the same "
                    "turn of siblings: use a statistic of a group, such as GroupMean and GroupStd"
                )
        self.advantage = advantage
        self.discount = discount
        self.episode_share = episode_share
        self.min_siblings = min_siblings

    def __call__(self, scores: Scores) -> Tensor:
        if scores.turn_rewards is None:
            raise ValueError(
                "TurnAdvantage needs the rewards of turns, but there are none: set it as data.advantage itself, and "
                "sample episodes with data.engine: lgrpo.engines.EnvironmentEngine"
            )
        if self.min_siblings > scores.group_size:
            raise ValueError(
                f"TurnAdvantage's min_siblings is {self.min_siblings}, but data.group_size is only {scores.group_size}"
            )
        returns = turn_returns(scores.turn_rewards, scores.rewards, self.discount)
        return torch.lerp(
            self._compared(returns, scores.group_size),
            self.advantage(scores)[:, None].expand_as(returns),
            self.episode_share,
        )

    def _compared(self, returns: Tensor, group_size: int) -> Tensor:
        """Return the advantages of returns [B, N] within those of their group that have the turn."""
        groups = returns.view(-1, group_size, returns.shape[1]).transpose(1, 2)  # [P, N, G]
        is_reached = ~groups.isnan()
        counts = is_reached.sum(2, keepdim=True)
        advantages = torch.full_like(groups, self.advantage.shift)
        for count in range(self.min_siblings, group_size + 1):  # comparisons of the same size at once
            chosen = is_reached & (counts == count)
            if bool(chosen.any()):
                advantages[chosen] = self.advantage.of_groups(groups[chosen].view(-1, count)).flatten()
        return advantages.transpose(1, 2).reshape_as(returns)
