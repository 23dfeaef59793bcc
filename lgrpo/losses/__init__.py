"""Policy losses, and the parts from which ``ComposedLoss`` is assembled."""

from lgrpo.losses.aggregation import Aggregation, ConstantSum, SequenceMean, TokenMean
from lgrpo.losses.base import LossOutput, PolicyLogprobs, PolicyLoss
from lgrpo.losses.clipped import ClippedLoss
from lgrpo.losses.clips import DualClip, GeometricClip, MaxTokenLag, MinClip, OffPolicySequenceMask, WeightClamp
from lgrpo.losses.composed import ComposedLoss
from lgrpo.losses.gates import Gate, Gated, MaskGate, NoGate, OneSide, Ring, SecondMoment, TwoSide
from lgrpo.losses.proximal import ProximalMemory
from lgrpo.losses.ratios import Ratio, SequenceRatio, TokenRatio
from lgrpo.losses.regularisers import BehaviourForwardKL, BehaviourK2, EntropyBonus, ReferenceKL, Regulariser
from lgrpo.losses.terms import Terms
from lgrpo.losses.weights import (
    AsymmetricImportance,
    Importance,
    LagDecay,
    MaskedImportance,
    NoWeight,
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
    "DualClip",
    "EntropyBonus",
    "Gate",
    "Gated",
    "GeometricClip",
    "Importance",
    "LagDecay",
    "LossOutput",
    "MaskGate",
    "MaskedImportance",
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
    "Ring",
    "SecondMoment",
    "SequenceMean",
    "SequenceRatio",
    "Terms",
    "TokenMean",
    "TokenRatio",
    "TruncatedImportance",
    "TwoSide",
    "Weight",
    "WeightClamp",
]
