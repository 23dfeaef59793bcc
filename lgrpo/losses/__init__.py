"""What the gradient is taken of: a PolicyLoss and the small parts it is assembled from."""

from lgrpo.losses.aggregation import Aggregation, ConstantSum, SequenceMean, TokenMean
from lgrpo.losses.base import LossOutput, PolicyLogprobs, PolicyLoss
from lgrpo.losses.clipped import ClippedLoss
from lgrpo.losses.proximal import ProximalMemory

__all__ = [
    "Aggregation",
    "ClippedLoss",
    "ConstantSum",
    "LossOutput",
    "PolicyLogprobs",
    "PolicyLoss",
    "ProximalMemory",
    "SequenceMean",
    "TokenMean",
]
