"""Everything before the gradient: prompts, sampling, scoring, preparation, and the data module that connects them."""

from lgrpo.data.datamodule import RolloutDataModule
from lgrpo.data.difficulty import Difficulty, DifficultySampling, Measured
from lgrpo.data.dynamic import DynamicSampling
from lgrpo.data.evaluation import Benchmark, Evaluation

__all__ = [
    "Benchmark",
    "Difficulty",
    "DifficultySampling",
    "DynamicSampling",
    "Evaluation",
    "Measured",
    "RolloutDataModule",
]
