"""Advantages of a whole rollout, computed before it is split, because a group must be whole."""

from lgrpo.advantages.base import Advantage, Scores
from lgrpo.advantages.baselines import Baseline, BatchMean, GroupMean, LeaveOneOut, LogMeanExp, NoBaseline
from lgrpo.advantages.group import (
    ComposedAdvantage,
    DropNegatives,
    ExponentiallyWeighted,
    GroupWhitened,
    LeastVariance,
    LengthWeighted,
)
from lgrpo.advantages.parts import DecoupledWhitened
from lgrpo.advantages.scales import (
    BatchStd,
    BernoulliStd,
    GroupMeanScale,
    GroupStd,
    MajorityStd,
    NoScale,
    Scale,
    VariedShare,
)
from lgrpo.advantages.turns import TurnAdvantage
from lgrpo.advantages.zero_variance import SignedZeroVariance

__all__ = [
    "Advantage",
    "Baseline",
    "BatchMean",
    "BatchStd",
    "BernoulliStd",
    "ComposedAdvantage",
    "DecoupledWhitened",
    "DropNegatives",
    "ExponentiallyWeighted",
    "GroupMean",
    "GroupMeanScale",
    "GroupStd",
    "GroupWhitened",
    "LeastVariance",
    "LeaveOneOut",
    "LengthWeighted",
    "LogMeanExp",
    "MajorityStd",
    "NoBaseline",
    "NoScale",
    "Scale",
    "Scores",
    "SignedZeroVariance",
    "TurnAdvantage",
    "VariedShare",
]
