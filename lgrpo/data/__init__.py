"""Everything before the gradient: prompts, sampling, scoring, preparation, and the data module that connects them."""

from lgrpo.data.datamodule import RolloutDataModule
from lgrpo.data.difficulty import DifficultySampling
from lgrpo.data.evaluation import Benchmark, Evaluation
from lgrpo.data.sampler import DynamicSampling

__all__ = ["Benchmark", "DifficultySampling", "DynamicSampling", "Evaluation", "RolloutDataModule"]
