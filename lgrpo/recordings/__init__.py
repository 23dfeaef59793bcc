"""Recorded rollouts: the file format, a callback that writes them, an engine that replays them, scoring them later."""

from lgrpo.recordings.prompts import RecordedPrompts
from lgrpo.recordings.recorder import RolloutRecorder
from lgrpo.recordings.recording import Recording
from lgrpo.recordings.replay import ReplayEngine
from lgrpo.recordings.rescore import rescore

__all__ = ["RecordedPrompts", "Recording", "ReplayEngine", "RolloutRecorder", "rescore"]
