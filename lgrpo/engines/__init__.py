"""Engines sample completions from the behaviour policy."""

from lgrpo.engines.base import BORROWED, EngineState, RolloutEngine
from lgrpo.engines.completions import Generation, OnGroup, Sampling, completion_text
from lgrpo.engines.environment import EnvironmentEngine
from lgrpo.engines.judge import JudgeModel
from lgrpo.engines.manifest import SyncRecord, WeightSyncError
from lgrpo.engines.pool.engine import EnginePool
from lgrpo.engines.recovery import EngineError, Faults, NoWeightsError, Timeouts
from lgrpo.engines.servers.engine import VLLMServerEngine
from lgrpo.engines.transformers import TransformersEngine
from lgrpo.engines.vllm.engine import VLLMEngine

__all__ = [
    "BORROWED",
    "EngineError",
    "EnginePool",
    "EngineState",
    "EnvironmentEngine",
    "Faults",
    "Generation",
    "JudgeModel",
    "NoWeightsError",
    "OnGroup",
    "RolloutEngine",
    "Sampling",
    "SyncRecord",
    "Timeouts",
    "TransformersEngine",
    "VLLMEngine",
    "VLLMServerEngine",
    "WeightSyncError",
    "completion_text",
]
