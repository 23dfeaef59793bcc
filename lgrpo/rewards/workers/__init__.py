"""Worker processes that score completions and are killed when they exceed a limit."""

from lgrpo.rewards.workers.fork_server import Scoring
from lgrpo.rewards.workers.isolated import Isolated

__all__ = ["Isolated", "Scoring"]
