"""lgrpo: group-relative policy optimisation, on-policy or off, on PyTorch Lightning."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lgrpo.callbacks import AdaptiveWeightSync as AdaptiveWeightSync
    from lgrpo.callbacks import ImprovementMonitor as ImprovementMonitor
    from lgrpo.callbacks import ReferenceRefresh as ReferenceRefresh
    from lgrpo.callbacks import RolloutCallback as RolloutCallback
    from lgrpo.callbacks import RolloutLog as RolloutLog
    from lgrpo.callbacks import SupervisedWarmStart as SupervisedWarmStart
    from lgrpo.callbacks import ValidateEvery as ValidateEvery
    from lgrpo.callbacks import WeightSync as WeightSync
    from lgrpo.callbacks import ZeroVarianceMask as ZeroVarianceMask
    from lgrpo.data import Benchmark as Benchmark
    from lgrpo.data import Evaluation as Evaluation
    from lgrpo.data import RolloutDataModule as RolloutDataModule
    from lgrpo.engines import Sampling as Sampling
    from lgrpo.engines import TransformersEngine as TransformersEngine
    from lgrpo.losses import ClippedLoss as ClippedLoss
    from lgrpo.module import GRPOModule as GRPOModule
    from lgrpo.policy import CausalPolicy as CausalPolicy
    from lgrpo.policy import LoRA as LoRA
    from lgrpo.recordings import ReplayEngine as ReplayEngine
    from lgrpo.recordings import RolloutRecorder as RolloutRecorder
    from lgrpo.types import Completion as Completion
    from lgrpo.types import Prompt as Prompt
    from lgrpo.types import RolloutBatch as RolloutBatch

__version__ = "0.1.0"

_MODULES = {
    "AdaptiveWeightSync": "callbacks",
    "CausalPolicy": "policy",
    "ClippedLoss": "losses",
    "Completion": "types",
    "Benchmark": "data",
    "Evaluation": "data",
    "GRPOModule": "module",
    "ImprovementMonitor": "callbacks",
    "LoRA": "policy",
    "Prompt": "types",
    "ReferenceRefresh": "callbacks",
    "RolloutBatch": "types",
    "RolloutCallback": "callbacks",
    "RolloutDataModule": "data",
    "ReplayEngine": "recordings",
    "RolloutLog": "callbacks",
    "RolloutRecorder": "recordings",
    "Sampling": "engines",
    "SupervisedWarmStart": "callbacks",
    "TransformersEngine": "engines",
    "ValidateEvery": "callbacks",
    "WeightSync": "callbacks",
    "ZeroVarianceMask": "callbacks",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    """Import a module when a name in it is first used, so that reward workers and ``--help`` start fast."""
    if name not in _MODULES:
        raise AttributeError(f"lgrpo has no name {name!r}; the names are {', '.join(sorted(_MODULES))}")
    return getattr(importlib.import_module(f"lgrpo.{_MODULES[name]}"), name)
