"""Text in, number out."""

from lgrpo.rewards.base import BatchReward, Reward, checked_rewards
from lgrpo.rewards.match import ExactMatch, NumericMatch

__all__ = ["BatchReward", "ExactMatch", "NumericMatch", "Reward", "checked_rewards"]
