"""Exit on SIGTERM during an evaluation."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

import lightning as L


class StopOnSigterm(L.Callback):
    """Ends an evaluation at once on SIGTERM. Lightning would act on it only after the last sample."""

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._listen()

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._listen()

    def _listen(self) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, exit_on_signal)


def exit_on_signal(number: int, frame: FrameType | None) -> Any:
    """Raise ``SystemExit``, so that cleanup code runs."""
    raise SystemExit(128 + number)
