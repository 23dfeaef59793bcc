"""Everything before the gradient: prompts, rollouts, and the data module that makes them."""

from lgrpo.data.buffer import EvaluationBuffer, RolloutBuffer
from lgrpo.data.collate import collate_rollout
from lgrpo.data.datamodule import Evaluation, RolloutDataModule
from lgrpo.data.prompts import PromptSet

__all__ = ["Evaluation", "EvaluationBuffer", "PromptSet", "RolloutBuffer", "RolloutDataModule", "collate_rollout"]
