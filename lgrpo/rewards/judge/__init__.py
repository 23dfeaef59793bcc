"""A reward that asks another model."""

from lgrpo.rewards.judge.engine import Answer, JudgeEngine, JudgeError
from lgrpo.rewards.judge.reward import JudgeReward
from lgrpo.rewards.judge.templates import JudgeTemplate, Messages, Pairwise, Question, Rubric
from lgrpo.rewards.judge.verdicts import read_verdicts, verdict_statistics

__all__ = [
    "Answer",
    "JudgeEngine",
    "JudgeError",
    "JudgeReward",
    "JudgeTemplate",
    "Messages",
    "Pairwise",
    "Question",
    "Rubric",
    "read_verdicts",
    "verdict_statistics",
]
