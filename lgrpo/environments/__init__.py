"""Environments, with which a model interacts over several turns."""

from lgrpo.environments.base import Environment, Message, Observation, Turn, TurnError

__all__ = ["Environment", "Message", "Observation", "Turn", "TurnError"]
