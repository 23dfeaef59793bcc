"""Which folder a command writes to, from ``--run``, ``--trainer.default_root_dir``, ``--ckpt_path`` and the cluster."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path

from jsonargparse import Namespace
from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only

from lgrpo.report import find_checkpoints
from lgrpo.run.checkpoints import newest_checkpoint, remove_partial
from lgrpo.run.folder import RunFolder, check_writable


def evaluation_folder(settings: Namespace) -> Path:
    """Return the folder of a command that does not train; raise if the settings of its checkpoints contradict."""
    if settings.checkpoints:
        find_checkpoints(Path(settings.checkpoints))  # raises before anything is built
        if settings.get("ckpt_path"):
            raise SystemExit(
                "lgrpo: --checkpoints evaluates every checkpoint of a run and --ckpt_path one: give one of the two"
            )
        check_writable(Path(settings.checkpoints))  # for the summary of all checkpoints
    folder = Path(_named_folder(settings) or settings.checkpoints or ".")
    if settings.data.evaluation.results is not None:
        check_writable(folder)
    return folder


def claim_training_folder(settings: Namespace) -> RunFolder:
    """Return the folder of a run, locked for this process, and replace ``ckpt_path: last`` by the newest checkpoint.

    The name of a new folder is the current time. Processes that Lightning starts for further ranks inherit it through
    the variable ``LGRPO_RUN``; ranks that ``torchrun`` or SLURM starts cannot, so there the folder must be named.
    """
    if settings.checkpoints:
        raise SystemExit("lgrpo: --checkpoints is an option of validate and test, not of fit")
    run = _named_folder(settings)
    is_resuming = settings.ckpt_path is not None
    if run and SLURMEnvironment.detect():  # Lightning resumes a requeued job from its own checkpoint
        is_resuming |= any(Path(run).glob("hpc_ckpt_*.ckpt"))
    if run is None:
        if is_resuming:
            raise SystemExit("lgrpo: --ckpt_path resumes a run: name its folder with --run FOLDER")
        if TorchElasticEnvironment.detect() or SLURMEnvironment.detect():
            raise SystemExit(
                "lgrpo: ranks started by torchrun or SLURM would each create a run folder named after the time: name "
                "one with --trainer.default_root_dir FOLDER (torchrun reads --run as its own option)"
            )
        run = os.environ.setdefault("LGRPO_RUN", f"runs/{datetime.now():%Y-%m-%d_%H-%M-%S}")
    if settings.ckpt_path == "last":
        checkpoints = Path(settings.checkpoint.dirpath or Path(run) / "checkpoints")
        try:
            settings.ckpt_path = str(newest_checkpoint(checkpoints))
        except FileNotFoundError as error:
            raise SystemExit(f"lgrpo: {error}") from error
        remove_partial(checkpoints)
    if settings.checkpoint.dirpath and settings.trainer.enable_checkpointing is not False:
        check_writable(Path(settings.checkpoint.dirpath))
    folder = RunFolder(Path(run))
    rank_zero_only(folder.claim)(is_resuming)
    return folder


def _named_folder(settings: Namespace) -> str | None:
    run, root = settings.run, settings.trainer.default_root_dir
    if run and root and Path(run) != Path(root):
        raise SystemExit(
            f"lgrpo: --run {run} and --trainer.default_root_dir {root} name two run folders: give one of the two"
        )
    return run or (None if root is None else str(root))
