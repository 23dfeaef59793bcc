"""Environments of verifiers that answer the model turn by turn."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, final

from lgrpo.environments.base import Environment, Message, Turn, TurnError
from lgrpo.environments.tools.calls import Call, CallParser
from lgrpo.environments.tools.environment import import_name, named_parser
from lgrpo.environments.tools.parsers import ParserName, parser_for

_ADVICE = "pip install 'lgrpo[verifiers]', which is verifiers>=0.3,<0.4"


@final
class Verifiers(Environment):
    """Environment of verifiers 0.3: a ``MultiTurnEnv``, ``SingleTurnEnv`` or ``ToolEnv`` with its rubric.

    The model's turns are sampled here. For each, the environment's own ``setup_state``, ``is_completed`` and
    ``env_response`` are called, and its rubric when the episode ends. A row is one of its dataset: a prompt of
    messages, ``example_id``, and ``answer`` and ``info`` where it has them, so the template is ``{prompt}`` as a chat.

    Environments of verifiers 0.4 and later run a program that calls a model's server itself. They are refused.
    """

    def __init__(
        self, environment: str, settings: dict[str, Any] | None = None, parser: ParserName | CallParser = "auto"
    ) -> None:
        """
        Args:
            environment: Name of an installed environment for ``verifiers.load_environment``, or the import name of a
                function or class that makes one, such as ``my_module.load_environment``.
            settings: Arguments of that function.
            parser: Format of tool calls; ``auto`` chooses it by the chat template.
        """
        self.environment = environment
        self.settings = settings or {}
        self._parser = parser if isinstance(parser, CallParser) else named_parser(parser)
        self._load()

    def _load(self) -> None:
        """Load the environment, which all episodes of a process share: their states are separate."""
        self._env = _load_environment(self.environment, self.settings)
        self.keeps_special_tokens = bool(self._env.tool_defs)
        self._state: Any = None
        self._messages: list[Any] = []

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("_env", "_state", "_messages")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._load()

    def __deepcopy__(self, memo: dict[int, Any]) -> Verifiers:
        copied = object.__new__(Verifiers)
        copied.__dict__ = {**self.__dict__, "_state": None, "_messages": []}
        return copied

    def generate_rows(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Return rows of the environment's dataset in random order, ``count`` at most."""
        rows = [{key: value for key, value in row.items() if value is not None} for row in self._env.get_dataset()]
        return random.Random(seed).sample(rows, min(count, len(rows)))

    def tool_schemas(self) -> list[dict[str, Any]]:
        return [
            {"type": "function", "function": _as_dict(tool, ("name", "description", "parameters"))}
            for tool in self._env.tool_defs or []
        ]

    def use_chat_template(self, chat_template: str | None) -> None:
        if self._parser is None and self._env.tool_defs:
            self._parser = parser_for(chat_template)

    async def reset(self, row: Mapping[str, Any]) -> Sequence[Message] | None:
        inputs = {"example_id": 0, **row}
        self._state = await self._env.init_state(inputs, _no_client(), "lgrpo")
        given = list(self._state["prompt"])
        changed = await self._env.setup_state(self._state)
        self._state = self._state if changed is None else changed
        self._messages = list(self._state["prompt"])
        return None if self._messages == given else [_message(message, {}) for message in self._messages]

    async def step(self, text: str) -> Turn:
        from verifiers.errors import Error

        calls, errors = self._calls(text)
        await self._env.add_model_response(self._state, self._messages, _response(text, calls))
        known = [*self._messages, *self._state["trajectory"][-1]["completion"]]
        try:
            if not await self._env.is_completed(self._state):
                self._messages = _normal(await self._env.get_prompt_messages(self._state))
        except Error as error:  # verifiers ends an episode by such an error, and scores it
            self._state["error"] = error
        if await self._env.is_completed(self._state):
            return Turn(reward=await self._score(), done=True, errors=errors)
        if self._messages[: len(known)] != known:
            raise ValueError(f"{type(self._env).__name__} changes earlier messages, so its turns cannot be appended")
        names = {call["id"]: call["name"] for call in calls}
        return Turn([_message(message, names) for message in self._messages[len(known) :]], errors=errors)

    async def truncate(self) -> float:
        self._state["is_truncated"] = True
        return await self._score()

    async def _score(self) -> float:
        """Return the reward of the rubric, once the episode has ended."""
        await self._env.cleanup(self._state)
        await self._env.rubric.score_rollout(self._state)
        await self._env.rubric.cleanup(self._state)
        return float(self._state["reward"])

    def _calls(self, text: str) -> tuple[list[dict[str, str]], list[TurnError]]:
        """Return the tool calls in a text; one that cannot be read has arguments that the environment refuses."""
        found = [] if self._parser is None else self._parser.parse(text)
        calls = []
        for index, call in enumerate(found):
            if isinstance(call, TurnError):
                name, arguments, given = "unknown", call.text, None
            else:
                name, arguments, given = call.name, json.dumps(self._arguments(call)), call.id
            calls.append({"id": given or f"call{index:05d}", "name": name, "arguments": arguments})
        return calls, [call for call in found if isinstance(call, TurnError)]

    def _arguments(self, call: Call) -> dict[str, Any]:
        """Return the arguments of a call by name; positional ones are in the order of the tool's schema."""
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in self.tool_schemas()}
        names = schemas.get(call.name, {}).get("properties", {})
        return {**dict(zip(names, call.positional, strict=False)), **call.arguments}


def _load_environment(name: str, settings: Mapping[str, Any]) -> Any:
    try:
        import verifiers
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"Verifiers needs verifiers: {_ADVICE}") from error
    if not hasattr(verifiers, "MultiTurnEnv"):
        raise ImportError(
            f"verifiers {verifiers.__version__} has no MultiTurnEnv: since 0.4 its environments run a program that "
            f"calls a model's server itself, so no turn can be sampled here. {_ADVICE}"
        )
    made = import_name(name)(**settings) if "." in name or ":" in name else verifiers.load_environment(name, **settings)
    if not isinstance(made, verifiers.MultiTurnEnv):
        raise ValueError(
            f"{name} is {type(made).__name__}, not an environment that answers turn by turn (MultiTurnEnv)"
        )
    if made.rubric.has_group_rewards:
        raise ValueError(
            f"the rubric of {name} compares episodes of a group; only rewards of single episodes can be used"
        )
    return made


def _no_client() -> Any:
    """Return a client for verifiers that refuses to call a model."""
    from verifiers.clients import Client

    class NoClient(Client):
        async def get_response(self, *args: Any, **settings: Any) -> Any:
            raise RuntimeError("the environment calls the model itself, but lgrpo samples its turns")

    NoClient.__abstractmethods__ = frozenset()
    return NoClient(None)


def _response(text: str, calls: Sequence[Mapping[str, str]]) -> Any:
    """Return a text of the model as the response of a server."""
    from verifiers.types import Response, ResponseMessage, ToolCall

    message = ResponseMessage(
        content=text,
        tool_calls=[ToolCall(**call) for call in calls] or None,
        finish_reason="tool_calls" if calls else "stop",
        is_truncated=False,
    )
    return Response(id="lgrpo", created=int(time.time()), model="lgrpo", message=message)


def _normal(messages: Any) -> list[Any]:
    from verifiers.utils.message_utils import maybe_normalize_messages

    return list(maybe_normalize_messages(messages, field_name="prompt_messages"))


def _message(message: Any, names: Mapping[str, str]) -> Message:
    """Return a message of verifiers as one of a chat; ``names`` has the tools by the ids of their calls."""
    content = message.content
    if not isinstance(content, str):
        parts = [part if isinstance(part, Mapping) else part.model_dump() for part in content]
        if any(part["type"] != "text" for part in parts):
            raise ValueError("a message of the environment holds something other than text")
        content = "".join(part["text"] for part in parts)
    if message.role != "tool":
        return {"role": message.role, "content": content}
    name = names.get(message.tool_call_id, "unknown")
    return {"role": "tool", "name": name, "content": content, "tool_call_id": message.tool_call_id}


def _as_dict(tool: Any, names: Sequence[str]) -> dict[str, Any]:
    return {name: tool[name] if isinstance(tool, Mapping) else getattr(tool, name) for name in names}
