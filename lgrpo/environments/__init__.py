"""Environments, with which a model interacts over several turns."""

from lgrpo.environments.base import Environment, Message, Observation, Turn, TurnError
from lgrpo.environments.episodes import EpisodeFailure, EpisodeLimits, Episodes
from lgrpo.environments.errors import ErrorCounts
from lgrpo.environments.failures import EpisodeFailures
from lgrpo.environments.games import Game, GuessNumber, TextMaze, TwentyQuestions
from lgrpo.environments.local import LocalEpisodes
from lgrpo.environments.tools import Calculator, CallParser, PythonTool, Search, ToolEnvironment, tool_schema
from lgrpo.environments.worker_episodes import WorkerEpisodes

__all__ = [
    "Calculator",
    "CallParser",
    "Environment",
    "EpisodeFailure",
    "EpisodeFailures",
    "EpisodeLimits",
    "Episodes",
    "ErrorCounts",
    "Game",
    "GuessNumber",
    "LocalEpisodes",
    "Message",
    "Observation",
    "PythonTool",
    "Search",
    "TextMaze",
    "ToolEnvironment",
    "Turn",
    "TurnError",
    "TwentyQuestions",
    "WorkerEpisodes",
    "tool_schema",
]
