"""torchmetrics classes over ``functional``, correct over micro-batches and ranks."""

from lgrpo.metrics.amplification import Amplifications
from lgrpo.metrics.improvement import CalibrationMetrics, ImprovementMetrics, LagHistogram
from lgrpo.metrics.off_policy import OffPolicyMetrics
from lgrpo.metrics.pass_at_k import PassAtK
from lgrpo.metrics.step import StepMetrics

__all__ = [
    "Amplifications",
    "CalibrationMetrics",
    "ImprovementMetrics",
    "LagHistogram",
    "OffPolicyMetrics",
    "PassAtK",
    "StepMetrics",
]
