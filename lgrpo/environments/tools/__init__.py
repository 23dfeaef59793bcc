"""Tools that a model calls: schemas, parsers of calls, and ready-made tools."""

from lgrpo.environments.tools.calculator import Calculator
from lgrpo.environments.tools.calls import Call, CallParser
from lgrpo.environments.tools.environment import ToolEnvironment
from lgrpo.environments.tools.parsers import (
    PARSERS,
    CodeParser,
    HermesParser,
    LlamaParser,
    MistralParser,
    PythonParser,
    parser_for,
)
from lgrpo.environments.tools.python import PythonTool
from lgrpo.environments.tools.schema import tool_schema
from lgrpo.environments.tools.search import Search
from lgrpo.environments.tools.tag_parsers import DeepSeekParser, GLMParser, XMLParser

__all__ = [
    "PARSERS",
    "Calculator",
    "Call",
    "CallParser",
    "CodeParser",
    "DeepSeekParser",
    "GLMParser",
    "HermesParser",
    "LlamaParser",
    "MistralParser",
    "PythonParser",
    "PythonTool",
    "Search",
    "ToolEnvironment",
    "XMLParser",
    "parser_for",
    "tool_schema",
]
