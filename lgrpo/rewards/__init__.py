"""Rewards: prompts and completions in, numbers out."""

from lgrpo.rewards.base import (
    NOT_YET,
    AsyncReward,
    BatchReward,
    FailedScore,
    Failure,
    NotedError,
    NotedScore,
    Notes,
    NotYet,
    Reward,
    Score,
    SumScore,
    WrappedReward,
    checked_rewards,
    notes_of,
)
from lgrpo.rewards.code import CodeExecution
from lgrpo.rewards.combined import WeightedSum
from lgrpo.rewards.countdown import CountdownEquation
from lgrpo.rewards.environment import EnvironmentReward
from lgrpo.rewards.function import FunctionReward, as_reward
from lgrpo.rewards.judge import (
    JudgeEngine,
    JudgeError,
    JudgeReward,
    JudgeTemplate,
    Pairwise,
    Question,
    Rubric,
    read_verdicts,
    verdict_statistics,
)
from lgrpo.rewards.length import CompletionLength, OverlongPenalty, Shortest
from lgrpo.rewards.match import ExactMatch, NumericMatch
from lgrpo.rewards.math import MathVerify
from lgrpo.rewards.reasoning_gym import ReasoningGymScore
from lgrpo.rewards.text import RegexMatch, TagFormat
from lgrpo.rewards.workers import Isolated, Scoring

__all__ = [
    "NOT_YET",
    "AsyncReward",
    "BatchReward",
    "CodeExecution",
    "CompletionLength",
    "CountdownEquation",
    "EnvironmentReward",
    "ExactMatch",
    "FailedScore",
    "Failure",
    "FunctionReward",
    "Isolated",
    "JudgeEngine",
    "JudgeError",
    "JudgeReward",
    "JudgeTemplate",
    "MathVerify",
    "NotYet",
    "NotedError",
    "NotedScore",
    "Notes",
    "NumericMatch",
    "OverlongPenalty",
    "Pairwise",
    "Question",
    "ReasoningGymScore",
    "RegexMatch",
    "Reward",
    "Rubric",
    "Score",
    "Scoring",
    "Shortest",
    "SumScore",
    "TagFormat",
    "WeightedSum",
    "WrappedReward",
    "as_reward",
    "checked_rewards",
    "notes_of",
    "read_verdicts",
    "verdict_statistics",
]
