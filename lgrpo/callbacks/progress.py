"""Progress of a run in the terminal."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections import deque
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar as Bar
from rich.table import Table
from rich.text import Text

from lgrpo.hooks import RolloutCallback, Stage, rollout_owner
from lgrpo.types import RolloutBatch

NARROW = 64
"""Width in columns below which there is no bar."""

PATIENCE = 10.0
"""Seconds after which a stage before the first step is named, without a terminal."""

FIRST_STAGES: dict[Stage, str] = {
    "sync": "starting the engine and sending it the weights",
    "generate": "generating the first rollout",
    "score": "scoring the first rollout",
    "update": "updating the policy for the first time",
    "validate": "validating",
}


class RolloutProgress(RolloutCallback, ProgressBar):
    """Two live lines in a terminal: stage, rollouts done, time left; reward, lag, pass@1, tokens per second.

    Without a terminal it prints plain lines: for some of the steps, and before the first one for every stage that takes
    more than ten seconds, such as starting the engine. ``trainer.enable_progress_bar: false`` turns both off.
    """

    def __init__(self, lines: int = 10) -> None:
        """
        Args:
            lines: Approximate number of lines that a run prints without a terminal. 0 for none.
        """
        super().__init__()
        self.lines = lines
        self._enabled = True
        self._live: Live | None = None
        self._redirected: list[tuple[logging.StreamHandler, Any]] = []
        self._metrics: list[str] = []
        self._notice: threading.Timer | None = None
        self._reset(0, 0)

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._reset(trainer.global_step, self._num_steps(trainer))
        self._reuse = rollout_owner(trainer).reuse
        if self._enabled and trainer.is_global_zero and can_show(sys.stderr):
            self._open()

    def on_stage(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: Stage) -> None:
        self._stage = str(stage)
        self._since = time.perf_counter()
        self._waiting = FIRST_STAGES[stage]
        self._cancel_notice()
        if self._live is not None:
            try:
                self._live.refresh()
            except OSError:  # the terminal is gone
                self._close()
        elif self._enabled and self.lines and trainer.is_global_zero and self._step == self._first:
            self._notice = threading.Timer(PATIENCE, self._print_waiting)
            self._notice.daemon = True
            self._notice.start()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        self._cancel_notice()
        self._step = trainer.global_step
        self._metrics = self._read(trainer, batch)
        if self._live is None and self._enabled and self.lines and trainer.is_global_zero:
            every = max(1, self._total // self.lines)
            if self._step % every == 0 or self._step == self._total:
                seconds = time.perf_counter() - self._started
                print(f"step {self._step}/{self._total}  {seconds:.0f} s  {'  '.join(self._metrics)}", flush=True)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._metrics and "val/pass@1" in trainer.callback_metrics:
            own = [metric for metric in self._metrics if not metric.startswith("pass@1")]
            self._metrics = [*own[:2], f"pass@1 {float(trainer.callback_metrics['val/pass@1']):.3f}", *own[2:]]

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._stage = "done"
        self._close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._stage = "stopped"
        self._close()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._close()

    # Content

    def _reset(self, step: int, total: int) -> None:
        self._started = self._since = time.perf_counter()
        self._first = self._step = step
        self._total = total
        self._reuse = 1
        self._stage = "start"
        self._waiting = "waiting for the first rollout"
        self._metrics = []
        self._sampled: deque[tuple[float, int, float]] = deque(maxlen=20)  # time, rollout, total tokens

    def _read(self, trainer: L.Trainer, batch: RolloutBatch) -> list[str]:
        lags = batch.lag(trainer.global_step - 1)  # global_step includes the current step already
        known = lags[~lags.isnan()]
        lag = f"lag {int(known.max())}" if len(known) else "recorded"
        metrics = [f"reward {batch.metrics['rollout/reward']:.3f}", lag]
        if "val/pass@1" in trainer.callback_metrics:
            metrics.append(f"pass@1 {float(trainer.callback_metrics['val/pass@1']):.3f}")
        if not self._sampled or self._sampled[-1][1] != batch.rollout:
            before = self._sampled[-1][2] if self._sampled else 0.0
            self._sampled.append((time.perf_counter(), batch.rollout, before + batch.totals.all_tokens))
        if len(self._sampled) > 1:
            (start, _, none), (end, _, tokens) = self._sampled[0], self._sampled[-1]
            metrics.append(f"{(tokens - none) / max(end - start, 1e-9):,.0f} tokens/s")
        return metrics

    def _time_left(self) -> str:
        """Estimate it from the mean time of this process's steps, validations included."""
        num_steps = self._step - self._first
        if not num_steps:
            return ""
        seconds = (time.perf_counter() - self._started) / num_steps * (self._total - self._step)
        return f"{clock(seconds)} left" if self._step < self._total else clock(time.perf_counter() - self._started)

    def __rich__(self) -> RenderableType:
        wide = self._width() >= NARROW
        seconds = time.perf_counter() - self._since
        is_running = self._stage not in ("done", "stopped")
        stage = f"{self._stage} {seconds:.0f} s" if seconds >= 2 and is_running else self._stage
        done, total = self._step // self._reuse, self._total // self._reuse
        top = Table.grid(padding=(0, 2, 0, 0), expand=wide)
        top.add_column(width=14 if wide else None, no_wrap=True)
        if wide:
            top.add_column(ratio=1)
        top.add_column(no_wrap=True, justify="right")
        top.add_column(no_wrap=True, justify="right")
        count = Text(f"{done}/{total} rollouts" if wide else f"{done}/{total}")
        cells: list[RenderableType] = [Text(stage, style="bold"), count, Text(self._time_left(), style="dim")]
        if wide:
            cells.insert(1, Bar(total=max(self._total, 1), completed=self._step, complete_style="blue"))
        top.add_row(*cells)
        lines = Table.grid()
        lines.add_row(top)
        metrics = "  ".join(self._metrics) or self._waiting
        lines.add_row(Text(" " * 16 * wide + metrics, style="dim", no_wrap=wide, overflow="ellipsis"))
        return lines

    def _print_waiting(self) -> None:
        print(f"{time.perf_counter() - self._started:.0f} s  {self._waiting} …", flush=True)

    # Terminal

    def _open(self) -> None:
        before = self._stream = sys.stderr
        self._console = Console(file=before)
        self._width()
        self._live = Live(self, console=self._console, refresh_per_second=2, redirect_stdout=sys.stdout.isatty())
        self._live.start(refresh=True)
        for name in (None, "lightning.pytorch", "lightning.fabric", "lightning"):  # print log messages above the lines
            for handler in logging.getLogger(name).handlers:
                if isinstance(handler, logging.StreamHandler) and handler.stream is before:
                    self._redirected.append((handler, before))
                    handler.setStream(sys.stderr)

    def _width(self) -> int:
        """Return the terminal's current width; some terminals report none."""
        columns = os.get_terminal_size(self._stream.fileno()).columns
        if columns:
            self._console.width = columns
        return self._console.width

    def _cancel_notice(self) -> None:
        if self._notice is not None:
            self._notice.cancel()
            self._notice = None

    def _close(self) -> None:
        self._cancel_notice()
        if self._live is not None:
            live, self._live = self._live, None
            with contextlib.suppress(OSError):  # the terminal may be gone
                live.stop()
            for handler, stream in self._redirected:
                handler.setStream(stream)
            self._redirected.clear()

    def _num_steps(self, trainer: L.Trainer) -> int:
        per_epoch = int(trainer.num_training_batches) // trainer.accumulate_grad_batches
        limits = [trainer.max_steps] if trainer.max_steps >= 0 else []
        if trainer.max_epochs is not None and trainer.max_epochs >= 0:
            limits.append(per_epoch * trainer.max_epochs)
        return min(limits, default=per_epoch)


def can_show(stream: Any) -> bool:
    """Return whether a stream is a terminal that supports live lines."""
    return bool(stream.isatty()) and os.environ.get("TERM", "").lower() not in ("", "dumb", "unknown")


def clock(seconds: float) -> str:
    """Return a duration in hours, minutes and seconds.

    >>> clock(5), clock(125), clock(7384)
    ('0:05', '2:05', '2:03:04')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
