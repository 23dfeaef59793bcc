"""Environments, with which a model interacts over several turns."""

from lgrpo.environments.base import Environment, Message, Observation, Turn, TurnError
from lgrpo.environments.errors import ErrorCounts
from lgrpo.environments.games import Game, GuessNumber, TextMaze, TwentyQuestions
from lgrpo.environments.tools import Calculator, CallParser, PythonTool, Search, ToolEnvironment, tool_schema

__all__ = [
    "Calculator",
    "CallParser",
    "Environment",
    "ErrorCounts",
    "Game",
    "GuessNumber",
    "Message",
    "Observation",
    "PythonTool",
    "Search",
    "TextMaze",
    "ToolEnvironment",
    "Turn",
    "TurnError",
    "TwentyQuestions",
    "tool_schema",
]
