"""Callbacks of runs that share a process: one notes its surroundings, one changes them, one fails."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import torch

from lgrpo import CausalPolicy, RolloutCallback
from lgrpo.engines import EnginePool


class Surroundings(RolloutCallback):
    """Write what a run finds in its process to ``surroundings.json``, and the pool's processes to ``workers.json``."""

    def on_fit_start(self, trainer, pl_module):
        states = [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
        found = {
            "random": hashlib.sha256(repr(states).encode()).hexdigest(),
            "policies": sum(isinstance(thing, CausalPolicy) for thing in gc.get_objects()),
            "environment": dict(os.environ),
            "signals": [getattr(signal.getsignal(number), "__qualname__", str(number)) for number in signals],
            "arguments": sys.argv[1:],
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "matmul": torch.get_float32_matmul_precision(),
            "filters": len(warnings.filters),
        }
        (Path(trainer.default_root_dir) / "surroundings.json").write_text(json.dumps(found, indent=1, sort_keys=True))
        warnings.warn("shown once per run", stacklevel=1)

    def on_train_end(self, trainer, pl_module):
        engine = trainer.datamodule.engine
        if isinstance(engine, EnginePool):
            pids = [worker.process.pid for worker in engine._workers.running]
            (Path(trainer.default_root_dir) / "workers.json").write_text(json.dumps(pids))


class Careless(RolloutCallback):
    """Change the process and leave it so."""

    def on_train_end(self, trainer, pl_module):
        os.environ["LEFT_BEHIND"] = "yes"
        os.environ["PL_SEED_WORKERS"] = "7"
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        torch.use_deterministic_algorithms(True)
        torch.set_float32_matmul_precision("medium")
        warnings.filterwarnings("ignore")


class Fragile(RolloutCallback):
    def on_rollout_start(self, trainer, pl_module, rollout):
        if rollout == 2:
            raise OSError("the disk is full")


class Slow(RolloutCallback):
    def on_rollout_start(self, trainer, pl_module, rollout):
        time.sleep(float(os.environ.get("SLOW", "0")))
