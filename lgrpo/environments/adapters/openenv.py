"""Environments that an OpenEnv server runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, final

from lgrpo.environments.base import Environment, Turn


@final
class OpenEnv(Environment):
    """Environment on an OpenEnv server, whose action is the text of the model.

    Every episode has a session of its own on the server. For environments with tools, write a class whose methods call
    the client, as for TRL, and use ``ToolEnvironment``.
    """

    def __init__(
        self,
        url: str,
        action_field: str = "message",
        observation_field: str | None = None,
        reset_fields: Sequence[str] = ("seed",),
    ) -> None:
        """
        Args:
            url: Address of the server, such as ``http://localhost:8000``.
            action_field: Field of the action that takes the text.
            observation_field: Field of the observation that the model sees; the default is all fields, as JSON if there
                are several.
            reset_fields: Fields of the row that are passed to the server's reset, where the row has them.
        """
        self.url = url
        self.action_field = action_field
        self.observation_field = observation_field
        self.reset_fields = tuple(reset_fields)
        self._client: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_client": None}  # a connection belongs to one process

    def reset(self, row: Mapping[str, Any]) -> str:
        try:
            from openenv.core import GenericEnvClient
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError("OpenEnv needs openenv-core: pip install 'lgrpo[openenv]'") from error
        if self._client is not None:
            self._client.close()
        self._client = GenericEnvClient(base_url=self.url).sync()
        self._client.connect()
        result = self._client.reset(**{field: row[field] for field in self.reset_fields if field in row})
        return self._text(result.observation)

    def step(self, text: str) -> Turn:
        result = self._client.step({self.action_field: text})
        return Turn(self._text(result.observation), float(result.reward or 0.0), bool(result.done))

    def _text(self, observation: Mapping[str, Any]) -> str:
        """Return the part of an observation that the model sees."""
        if self.observation_field is not None:
            if self.observation_field not in observation:
                names = ", ".join(observation)
                raise ValueError(f"observation_field is {self.observation_field!r}; the observation has {names}")
            return str(observation[self.observation_field])
        if len(observation) == 1:
            return str(next(iter(observation.values())))
        return json.dumps(observation, ensure_ascii=False, default=str)
