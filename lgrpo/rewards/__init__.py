"""Text in, number out."""

from lgrpo.rewards.base import BatchReward, Reward, checked_rewards
from lgrpo.rewards.isolated import Isolated
from lgrpo.rewards.match import ExactMatch, NumericMatch
from lgrpo.rewards.overlong import OverlongPenalty

__all__ = ["BatchReward", "ExactMatch", "Isolated", "NumericMatch", "OverlongPenalty", "Reward", "checked_rewards"]
