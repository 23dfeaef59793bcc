"""The engine that runs of one process share."""

from __future__ import annotations

import json

import lightning as L
from jsonargparse import Namespace

from lgrpo.engines import RolloutEngine

_POLICY = ("name", "config", "tokenizer", "characters", "pad_token", "dtype", "lora", "trust_remote_code")
_TRAINER = ("accelerator", "strategy", "devices", "num_nodes", "precision", "plugins")


class EngineKeeper:
    """Keeps the engine of a finished run for the next one, if that has equal settings of the engine and the policy.

    ``lend`` is called when a run has built its engine, which has started nothing yet, and ``keep`` when the run has
    finished. The engine of the next run then adopts the processes of the kept one; state, ledger and faults are new.
    """

    def __init__(self) -> None:
        self._kept: RolloutEngine | None = None
        self._settings = ""
        """Settings of the kept engine, or of the current run's."""

    def lend(self, engine: RolloutEngine, settings: Namespace, trainer: L.Trainer) -> None:
        """Let an engine adopt the kept one; close the kept one if it cannot."""
        if trainer.num_devices * trainer.num_nodes > 1:
            raise ValueError(
                f"the run has {trainer.num_devices * trainer.num_nodes} devices, and its further ranks would not have "
                "the kept engine: run it without --share-engines, or set trainer.devices to 1"
            )
        kept, before = self._kept, self._settings
        self._kept, self._settings = None, engine_settings(settings)
        if kept is None:
            return
        if self._settings == before and engine.adopt(kept):
            print("The engine of the previous run continues in this one.", flush=True)
        else:
            kept.close()
            print("The engine of the previous run was closed; this run starts its own.", flush=True)

    def keep(self, engine: RolloutEngine) -> None:
        """Keep the engine of a finished run. It sleeps, without weights."""
        engine.finish_cycle()
        engine.sleep()
        self._kept = engine

    def close(self) -> None:
        """Close the kept engine."""
        if self._kept is not None:
            self._kept.close()
            self._kept = None


def engine_settings(settings: Namespace) -> str:
    """Return the settings of a fit that a running engine depends on, as text to compare."""
    parts = {"data.engine": settings.data.engine}
    parts |= {f"model.policy.{name}": settings.model.policy[name] for name in _POLICY}
    parts |= {f"trainer.{name}": settings.trainer[name] for name in _TRAINER}
    return json.dumps(parts, default=lambda value: value.as_dict() if isinstance(value, Namespace) else repr(value))
