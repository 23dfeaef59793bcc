"""Environments, with which a model interacts over several turns."""

from lgrpo.environments.base import Environment, Message, Observation, Turn

__all__ = ["Environment", "Message", "Observation", "Turn"]
