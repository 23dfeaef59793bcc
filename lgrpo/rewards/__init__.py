"""Text in, number out."""

from lgrpo.rewards.base import BatchReward, Reward, checked_rewards
from lgrpo.rewards.combined import FunctionReward, WeightedSum
from lgrpo.rewards.countdown import CountdownEquation
from lgrpo.rewards.isolated import Isolated
from lgrpo.rewards.match import ExactMatch, NumericMatch
from lgrpo.rewards.math import MathVerify
from lgrpo.rewards.overlong import OverlongPenalty
from lgrpo.rewards.text import RegexMatch, TagFormat

__all__ = [
    "BatchReward",
    "CountdownEquation",
    "ExactMatch",
    "FunctionReward",
    "Isolated",
    "MathVerify",
    "NumericMatch",
    "OverlongPenalty",
    "RegexMatch",
    "Reward",
    "TagFormat",
    "WeightedSum",
    "checked_rewards",
]
