"""Worker processes that score completions and are killed when they exceed a limit."""

from lgrpo.rewards.workers.isolated import Isolated, Scoring

__all__ = ["Isolated", "Scoring"]
