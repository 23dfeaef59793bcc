"""Loggers by name: ``--log wandb``. A resumed run continues in the run of W&B or MLflow that it started."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import lightning as L
import yaml
from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

from lgrpo.report.record import flat_settings
from lgrpo.run.loggers import attempt
from lgrpo.run.metrics_logger import MetricsLogger

LoggerName = Literal["csv", "tensorboard", "wandb", "mlflow"]
"""Names of the loggers, which are also those of their packages and modules."""
PROJECT = "lgrpo"
"""Project of W&B and experiment of MLflow, unless WANDB_PROJECT or MLFLOW_EXPERIMENT_NAME name another."""


def make_loggers(folder: Path, names: Sequence[LoggerName] | None) -> list[Logger]:
    """Return the loggers of a run: always CSV, which its page is made of, and those named.

    By default TensorBoard is added if it is installed.
    """
    if names is None:
        names = ["tensorboard"] if _is_installed("tensorboard") else []
    loggers: list[Logger] = [MetricsLogger(str(folder), name="metrics")]
    for name in dict.fromkeys(names):
        if name != "csv" and not _is_installed(name):
            raise SystemExit(f"lgrpo: --log {name} requires a package: pip install {name}")
        if name == "tensorboard":
            loggers.append(TensorBoardLogger(str(folder), name="tensorboard"))
        elif name == "wandb":
            project = os.environ.get("WANDB_PROJECT", PROJECT)
            run_id = RunId(folder / "wandb_id.txt")
            loggers.append(RunWandbLogger(run_id, project=project, name=folder.name, save_dir=str(folder)))
        elif name == "mlflow":
            loggers.append(_mlflow_logger(folder))
    return loggers


def _mlflow_logger(folder: Path) -> Logger:
    """Return a logger for the server that MLFLOW_TRACKING_URI names, or for a database in the run folder."""
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    server, local = os.environ.get("MLFLOW_TRACKING_URI"), folder.resolve()
    return RunMLFlowLogger(
        RunId(folder / "mlflow_id.txt"),
        experiment_name=os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT),
        run_name=folder.name,
        tracking_uri=server or f"sqlite:///{local}/mlflow.db",
        artifact_location=None if server else (local / "mlflow_artifacts").as_uri(),
    )


class RunId:
    """Identifier of a run in another system, kept in the run folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> str | None:
        return self.path.read_text().strip() if self.path.exists() else None

    def write(self, run_id: str) -> None:
        if self.read() != run_id:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(f"{run_id}\n")


class RunWandbLogger(WandbLogger):
    """Lightning's logger, whose W&B run a resumed run continues."""

    def __init__(self, run_id: RunId, **settings: Any) -> None:
        self._kept_id = run_id
        super().__init__(id=run_id.read() or uuid.uuid4().hex[:8], resume="allow", **settings)

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        run = super().experiment
        self._kept_id.write(run.id)
        return run


class RunMLFlowLogger(MLFlowLogger):
    """Lightning's logger, whose MLflow run a resumed run continues."""

    def __init__(self, run_id: RunId, **settings: Any) -> None:
        self._kept_id = run_id
        super().__init__(run_id=run_id.read(), **settings)

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        client = super().experiment
        self._kept_id.write(str(self._run_id))
        return client

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log ``val/pass@1`` as ``val/pass_at_1``: MLflow allows no ``@`` in names."""
        super().log_metrics({name.replace("@", "_at_"): value for name, value in metrics.items()}, step)


def log_settings(trainer: L.Trainer, config: str) -> None:
    """Send the settings of a run, as YAML, to W&B and MLflow; a failure is a warning.

    Items of lists are named ``callbacks.0`` instead of ``callbacks[0]``: MLflow allows no brackets.
    """
    flat = flat_settings(yaml.safe_load(config))
    settings = {name.replace("[", ".").replace("]", ""): value for name, value in flat.items()}
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger | MLFlowLogger):
            attempt(logger, lambda: None, logger.log_hyperparams, settings)


def _is_installed(module: str) -> bool:
    """Return whether a module is installed; a folder of that name in the current one, which W&B creates, is not it."""
    spec = find_spec(module)
    return spec is not None and spec.origin is not None
