"""Advantages of a whole rollout, computed before it is split, because a group must be whole."""

from lgrpo.advantages.base import Advantage, Scores
from lgrpo.advantages.baselines import Baseline, BatchMean, GroupMean, LeaveOneOut, LogMeanExp, NoBaseline
from lgrpo.advantages.group import ComposedAdvantage, DropNegatives, ExponentiallyWeighted, GroupWhitened
from lgrpo.advantages.scales import BatchStd, BernoulliStd, GroupMeanScale, GroupStd, NoScale, Scale

__all__ = [
    "Advantage",
    "Baseline",
    "BatchMean",
    "BatchStd",
    "BernoulliStd",
    "ComposedAdvantage",
    "DropNegatives",
    "ExponentiallyWeighted",
    "GroupMean",
    "GroupMeanScale",
    "GroupStd",
    "GroupWhitened",
    "LeaveOneOut",
    "LogMeanExp",
    "NoBaseline",
    "NoScale",
    "Scale",
    "Scores",
]
