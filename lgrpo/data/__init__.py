"""Everything before the gradient: prompts, sampling, scoring, preparation, and the data module that connects them."""

from lgrpo.data.buffer import EvaluationBuffer, RolloutBuffer
from lgrpo.data.collate import collate_rollout
from lgrpo.data.datamodule import RolloutDataModule
from lgrpo.data.difficulty import DifficultySampling
from lgrpo.data.evaluation import Benchmark, Evaluation
from lgrpo.data.prompts import PromptSet
from lgrpo.data.sampler import DynamicSampling
from lgrpo.data.schedule import RolloutSchedule

__all__ = [
    "Benchmark",
    "DifficultySampling",
    "DynamicSampling",
    "Evaluation",
    "EvaluationBuffer",
    "PromptSet",
    "RolloutBuffer",
    "RolloutDataModule",
    "RolloutSchedule",
    "collate_rollout",
]
