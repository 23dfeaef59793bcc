"""lgrpo: group-relative policy optimisation, on-policy or off, on PyTorch Lightning."""

from lgrpo.callbacks import (
    ReferenceRefresh,
    RolloutCallback,
    RolloutLog,
    SupervisedWarmStart,
    WeightSync,
    ZeroVarianceMask,
)
from lgrpo.data import Evaluation, RolloutDataModule
from lgrpo.engines import Sampling, TransformersEngine
from lgrpo.losses import ClippedLoss
from lgrpo.module import GRPOModule
from lgrpo.policy import CausalPolicy
from lgrpo.types import Completion, Prompt, RolloutBatch

__version__ = "0.1.0"

__all__ = [
    "CausalPolicy",
    "ClippedLoss",
    "Completion",
    "Evaluation",
    "GRPOModule",
    "Prompt",
    "ReferenceRefresh",
    "RolloutBatch",
    "RolloutCallback",
    "RolloutDataModule",
    "RolloutLog",
    "Sampling",
    "SupervisedWarmStart",
    "TransformersEngine",
    "WeightSync",
    "ZeroVarianceMask",
]
