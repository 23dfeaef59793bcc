"""Where completions come from."""

from lgrpo.engines.base import BORROWED, EngineError, NoWeightsError, OnGroup, RolloutEngine, Sampling
from lgrpo.engines.completions import text_before_stop
from lgrpo.engines.ledger import SyncRecord, WeightSyncError
from lgrpo.engines.pool import EnginePool
from lgrpo.engines.replay import ReplayEngine
from lgrpo.engines.transformers import TransformersEngine
from lgrpo.engines.vllm import VLLMEngine
from lgrpo.engines.vllm_server import VLLMServerEngine

__all__ = [
    "BORROWED",
    "EngineError",
    "EnginePool",
    "NoWeightsError",
    "OnGroup",
    "ReplayEngine",
    "RolloutEngine",
    "Sampling",
    "SyncRecord",
    "TransformersEngine",
    "VLLMEngine",
    "VLLMServerEngine",
    "WeightSyncError",
    "text_before_stop",
]
