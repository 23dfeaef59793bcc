"""Policy losses, and the parts from which ``ComposedLoss`` is assembled."""

from lgrpo.losses.aggregation import Aggregation, ConstantSum, SequenceMean, SequenceSum, TokenMean
from lgrpo.losses.base import LossOutput, PolicyLogprobs, PolicyLoss
from lgrpo.losses.clipped import ClippedLoss
from lgrpo.losses.clips import (
    DualClip,
    GeometricClip,
    MaxTokenLag,
    MinClip,
    OffPolicySequenceMask,
    SoftGate,
    WeightClamp,
)
from lgrpo.losses.composed import ComposedLoss
from lgrpo.losses.covariance import CovarianceClip, CovariancePenalty
from lgrpo.losses.gates import Gate, Gated, MaskGate, NoGate, OneSide, Ring, SecondMoment, TwoSide
from lgrpo.losses.proximal import ProximalMemory
from lgrpo.losses.ratios import InterpolatedRatio, Ratio, SequenceRatio, TokenRatio
from lgrpo.losses.regularisers import (
    BehaviourForwardKL,
    BehaviourK2,
    EntropyBonus,
    MasteredHinge,
    ReferenceKL,
    Regulariser,
)
from lgrpo.losses.teacher import TeacherKL
from lgrpo.losses.terms import Terms
from lgrpo.losses.trust_regions import DivergenceMask, EntropyBand, SuffixVeto, TrustRegionMask
from lgrpo.losses.weights import (
    AsymmetricImportance,
    EntropyGuided,
    GammaWeight,
    Importance,
    LagDecay,
    MaskedImportance,
    NoWeight,
    Rejection,
    TruncatedImportance,
    Weight,
)

__all__ = [
    "Aggregation",
    "AsymmetricImportance",
    "BehaviourForwardKL",
    "BehaviourK2",
    "ClippedLoss",
    "ComposedLoss",
    "ConstantSum",
    "CovarianceClip",
    "CovariancePenalty",
    "DivergenceMask",
    "DualClip",
    "EntropyBand",
    "EntropyBonus",
    "EntropyGuided",
    "GammaWeight",
    "Gate",
    "Gated",
    "GeometricClip",
    "Importance",
    "InterpolatedRatio",
    "LagDecay",
    "LossOutput",
    "MaskGate",
    "MaskedImportance",
    "MasteredHinge",
    "MaxTokenLag",
    "MinClip",
    "NoGate",
    "NoWeight",
    "OffPolicySequenceMask",
    "OneSide",
    "PolicyLogprobs",
    "PolicyLoss",
    "ProximalMemory",
    "Ratio",
    "ReferenceKL",
    "Regulariser",
    "Rejection",
    "Ring",
    "SecondMoment",
    "SequenceMean",
    "SequenceRatio",
    "SequenceSum",
    "SoftGate",
    "SuffixVeto",
    "TeacherKL",
    "Terms",
    "TokenMean",
    "TokenRatio",
    "TruncatedImportance",
    "TrustRegionMask",
    "TwoSide",
    "Weight",
    "WeightClamp",
]
