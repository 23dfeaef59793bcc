"""Environments of other packages, which are imported only when used."""

from lgrpo.environments.adapters.openenv import OpenEnv
from lgrpo.environments.adapters.textarena import TextArena
from lgrpo.environments.adapters.verifiers import Verifiers

__all__ = ["OpenEnv", "TextArena", "Verifiers"]
