"""Callbacks: when weights move, what is masked, logged, checked and saved."""

from lgrpo.callbacks.adaptive_weight_sync import AdaptiveWeightSync
from lgrpo.callbacks.exact_resume import ExactResume
from lgrpo.callbacks.finite_steps import FiniteSteps
from lgrpo.callbacks.gradient_alignment import GradientAlignment
from lgrpo.callbacks.improvement_monitor import ImprovementMonitor
from lgrpo.callbacks.interrupt import GracefulInterrupt
from lgrpo.callbacks.mismatch_guard import MismatchGuard
from lgrpo.callbacks.overlong_mask import OverlongMask
from lgrpo.callbacks.progress import RolloutProgress
from lgrpo.callbacks.rank_watch import RankWatch
from lgrpo.callbacks.reference_refresh import ReferenceRefresh
from lgrpo.callbacks.rollout_log import RolloutLog
from lgrpo.callbacks.stop_on_sigterm import StopOnSigterm
from lgrpo.callbacks.validate_every import ValidateEvery
from lgrpo.callbacks.warm_start import SupervisedWarmStart
from lgrpo.callbacks.weight_sync import EngineSync, WeightSync
from lgrpo.callbacks.zero_variance_mask import ZeroVarianceMask
from lgrpo.hooks import RolloutCallback

__all__ = [
    "AdaptiveWeightSync",
    "EngineSync",
    "ExactResume",
    "FiniteSteps",
    "GracefulInterrupt",
    "GradientAlignment",
    "ImprovementMonitor",
    "MismatchGuard",
    "OverlongMask",
    "RankWatch",
    "ReferenceRefresh",
    "RolloutCallback",
    "RolloutLog",
    "RolloutProgress",
    "StopOnSigterm",
    "SupervisedWarmStart",
    "ValidateEvery",
    "WeightSync",
    "ZeroVarianceMask",
]
