"""Where completions come from."""

from lgrpo.engines.base import NoWeightsError, RolloutEngine, Sampling
from lgrpo.engines.transformers import TransformersEngine

__all__ = ["NoWeightsError", "RolloutEngine", "Sampling", "TransformersEngine"]
