"""Environment of tools: a model calls them in its text and sees their results."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, final

from lgrpo.checks import check_count, nearest
from lgrpo.environments.base import Environment, Message, Turn, TurnError
from lgrpo.environments.tools.arguments import WrongArguments, bind_arguments
from lgrpo.environments.tools.calls import Call, CallParser
from lgrpo.environments.tools.parsers import PARSERS, ParserName, parser_for
from lgrpo.environments.tools.schema import argument_types, tool_schema

_T = TypeVar("_T")
_NOT_TOOLS = {"reset", "get_reward"}


@dataclass(frozen=True)
class _Tool:
    function: Callable[..., Any]
    types: Mapping[str, Any]
    schema: dict[str, Any]


@final
class ToolEnvironment(Environment):
    """Environment whose tools are the public methods of a plain class, or functions.

    The class needs nothing from lgrpo and follows the contract of TRL's ``environment_factory``: its public methods,
    with types and docstrings, are the tools, apart from two optional ones. ``reset(**row)`` begins an episode and
    may return text for the model. ``get_reward()`` returns the reward when the episode ends. All may be async.

    A text with calls is answered by their results, one message of the role ``tool`` each. A text without calls ends
    the episode. A call that cannot be read or executed is answered by a description of the error.

    >>> class Counter:
    ...     def reset(self, **row):
    ...         self.total = 0
    ...     def add(self, number: int) -> int:
    ...         '''Add a number to the total.
    ...
    ...         Args:
    ...             number: Number to add.
    ...         '''
    ...         self.total += number
    ...         return self.total
    ...     def get_reward(self):
    ...         return float(self.total == 3)
    >>> environment = ToolEnvironment(Counter, parser="python")
    >>> environment.reset({})
    >>> environment.step("[add(1), add(number=2)]").observation
    [{'role': 'tool', 'name': 'add', 'content': '1'}, {'role': 'tool', 'name': 'add', 'content': '3'}]
    >>> environment.step("It is 3.")
    Turn(observation='', reward=1.0, done=True, errors=())
    """

    keeps_special_tokens = True

    def __init__(
        self,
        environment: Any = None,
        tools: Sequence[Any] = (),
        parser: ParserName | CallParser = "auto",
        max_calls: int = 16,
        max_result_chars: int = 10_000,
        result_text: str | None = None,
    ) -> None:
        """
        Args:
            environment: Class, function without arguments that makes an instance, instance, or the name of one of
                these (``my_module.MyEnvironment``; in a configuration also ``class_path`` and ``init_args``).
            tools: Further tools: functions, objects whose public methods are tools, or names of these.
            parser: Format of calls; ``auto`` chooses it by the chat template.
            max_calls: Calls executed in a turn; further calls are answered by an error.
            max_result_chars: Length of a result above which its middle is left out.
            result_text: Text of a result, with ``{name}`` and ``{content}``, for models without a chat template, or
                whose template is not to describe the tools; the default are messages of the role ``tool``.
        """
        check_count("max_calls", max_calls, at_least=1)
        check_count("max_result_chars", max_result_chars, at_least=100)
        if result_text is not None and "{content}" not in result_text:
            raise ValueError(f"result_text is {result_text!r}; it must contain {{content}}")
        self.max_calls = max_calls
        self.max_result_chars = max_result_chars
        self.result_text = result_text
        self._sources = (environment, tuple(tools))
        self._parser = parser if isinstance(parser, CallParser) else named_parser(parser)
        self._load({})

    def _load(self, described: Mapping[str, tuple[Mapping[str, Any], dict[str, Any]]]) -> None:
        """Make the instance and its tools; ``described`` has types and schemas that are known, by name."""
        source, tools = self._sources
        self._environment = None if source is None else make_instance(source)
        self._tools: dict[str, _Tool] = {}
        objects = [] if self._environment is None else [self._environment]
        objects += [tool if inspect.isroutine(tool) else make_instance(tool) for tool in tools]
        for shown, function in (item for tool in objects for item in tool_functions(tool)):
            name = function.__name__
            if name in self._tools:
                raise ValueError(f"there are two tools with the name {name!r}; rename one")
            own = described.get(name) or (argument_types(function, shown), tool_schema(function, shown))
            self._tools[name] = _Tool(function, *own)
        if not self._tools:
            name = "tools" if self._environment is None else type(self._environment).__name__
            raise ValueError(f"{name} has no tools: functions, or public methods other than reset and get_reward")
        functions: list[Any] = [tool.function for tool in self._tools.values()]
        functions += [getattr(self._environment, name, None) for name in sorted(_NOT_TOOLS)]
        self._is_async = any(map(inspect.iscoroutinefunction, functions))

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings, and the types and schemas, whose names may be unknown in another process."""
        described = {name: (tool.types, tool.schema) for name, tool in self._tools.items()}
        left_out = {"_environment", "_tools"}
        return {k: v for k, v in self.__dict__.items() if k not in left_out} | {"described": described}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make a new instance of the class, as every episode must have one of its own."""
        described = state.pop("described")
        self.__dict__.update(state)
        self._load(described)

    def tool_schemas(self) -> list[dict[str, Any]]:
        return [] if self.result_text is not None else [tool.schema for tool in self._tools.values()]

    def use_chat_template(self, chat_template: str | None) -> None:
        if self._parser is None:
            self._parser = parser_for(chat_template)

    def reset(self, row: Mapping[str, Any]) -> str | Awaitable[str | None] | None:
        return self._finish(self._reset(row))

    def step(self, text: str) -> Turn | Awaitable[Turn]:
        return self._finish(self._step(text))

    def truncate(self) -> float | Awaitable[float]:
        return self._finish(self._reward())

    def _finish(self, work: Coroutine[Any, Any, _T]) -> _T | Awaitable[_T]:
        """Return the result, or an awaitable of it if some tool is async."""
        if self._is_async:
            return work
        try:
            work.send(None)
        except StopIteration as end:
            return end.value
        work.close()
        raise TypeError("a function that is not declared with async def waits for something; declare it so")

    async def _reset(self, row: Mapping[str, Any]) -> str | None:
        function = getattr(self._environment, "reset", None)
        if function is None:
            return None
        parameters = inspect.signature(function).parameters.values()
        accepts_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        names = {parameter.name for parameter in parameters}
        observation = await value_of(function(**{k: v for k, v in row.items() if accepts_all or k in names}))
        if isinstance(observation, str | None):
            return observation
        return "".join(part["text"] for part in observation if part.get("type") == "text")

    async def _reward(self) -> float:
        function = getattr(self._environment, "get_reward", None)
        reward = None if function is None else await value_of(function())
        return 0.0 if reward is None else float(reward)

    def calls(self, text: str) -> list[Call | TurnError]:
        """Return the calls in a text, and an error for each that cannot be read; nothing is executed."""
        if self._parser is None:
            raise RuntimeError("the parser of tool calls is not known yet: call use_chat_template, or set parser")
        return self._parser.parse(text)

    async def _step(self, text: str) -> Turn:
        found = self.calls(text)
        if not found:
            return Turn(reward=await self._reward(), done=True)
        messages, errors = [], []
        for index, call in enumerate(found):
            result = await self._answer(call, index)
            if isinstance(result, TurnError):
                errors.append(result)
                result = f"Error: {result.text}"
            messages.append(tool_message(call, shorten(result, self.max_result_chars)))
        return Turn(messages if self.result_text is None else self._as_text(messages), errors=tuple(errors))

    def _as_text(self, messages: Sequence[Message]) -> str:
        text = self.result_text or ""
        return "".join(
            text.replace("{name}", message["name"]).replace("{content}", message["content"]) for message in messages
        )

    async def _answer(self, call: Call | TurnError, index: int) -> str | TurnError:
        """Execute a call, and return its result as text or an error."""
        if isinstance(call, TurnError):
            return call
        if index >= self.max_calls:
            return TurnError("too_many_calls", f"{call.name} was not called: at most {self.max_calls} calls in a turn")
        if call.name not in self._tools:
            names = ", ".join(self._tools)
            text = f"there is no tool {call.name!r}{nearest(call.name, self._tools)}; the tools are: {names}"
            return TurnError("unknown_tool", text)
        tool = self._tools[call.name]
        try:
            arguments = bind_arguments(tool.function, tool.types, call.positional, call.arguments, call.are_texts)
            return as_text(await value_of(tool.function(**arguments)))
        except WrongArguments as error:
            return error.error
        except (Exception, SystemExit) as error:
            return TurnError("tool_failed", f"{call.name} failed with {type(error).__name__}: {error}"[:1000])


def make_instance(source: Any) -> Any:
    """Return an object, given itself, its class, a function that makes it, its import name or its configuration."""
    settings: Mapping[str, Any] = {}
    if isinstance(source, Mapping):
        settings, source = source.get("init_args") or {}, source.get("class_path")
    if isinstance(source, str):
        source = import_name(source)
        if inspect.isfunction(source) and not settings and inspect.signature(source).parameters:
            return source  # a tool, not a function that makes one
    if inspect.isclass(source) or inspect.isroutine(source) or isinstance(source, functools.partial):
        return source(**settings)
    return source


def import_name(name: str) -> Any:
    """Return the object of an import name.

    >>> import_name("lgrpo.environments.base.Turn").__name__
    'Turn'
    """
    module, _, attribute = name.replace(":", ".").rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{name!r} cannot be imported ({error}); write the name as my_module.MyEnvironment") from error


def tool_functions(source: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the tools of an object, in alphabetical order as in TRL, each with the name for error messages."""
    if inspect.isroutine(source):
        yield source.__name__, source
        return
    kind = type(source)
    for name, _ in inspect.getmembers(kind, inspect.isfunction):
        if not name.startswith("_") and name not in _NOT_TOOLS:
            yield f"{kind.__name__}.{name}", getattr(source, name)


def named_parser(name: str) -> CallParser | None:
    """Return a parser, or None if it is to be chosen by the chat template."""
    if name not in PARSERS and name != "auto":
        raise ValueError(f"parser is {name!r}{nearest(name, PARSERS)}; it must be one of auto, {', '.join(PARSERS)}")
    return None if name == "auto" else PARSERS[name]()


def tool_message(call: Call | TurnError, content: str) -> Message:
    """Return the message with the result of a call."""
    name = "unknown" if isinstance(call, TurnError) else call.name
    message = {"role": "tool", "name": name, "content": content}
    if isinstance(call, Call) and call.id is not None:
        message["tool_call_id"] = call.id
    return message


def as_text(result: Any) -> str:
    """Return the result of a tool as text; text parts of a multimodal result are joined."""
    if isinstance(result, list) and result and all(isinstance(part, dict) and "type" in part for part in result):
        if any(part["type"] != "text" for part in result):
            raise ValueError("the result holds something other than text")
        return "".join(part["text"] for part in result)
    return str(result)


def shorten(text: str, limit: int) -> str:
    """Return a text of at most about ``limit`` characters, its middle replaced by a note.

    >>> shorten("0123456789" * 20, 100)[40:80]
    '0123456789\\n[100 characters left out]\\n012'
    """
    if len(text) <= limit:
        return text
    head, tail = limit // 2, limit - limit // 2
    return f"{text[:head]}\n[{len(text) - limit} characters left out]\n{text[-tail:]}"


async def value_of(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
