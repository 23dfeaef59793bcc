"""``lgrpo fit``, ``validate`` and ``test``: LightningCLI with a run folder and settings for the loop's callbacks."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from jsonargparse import Namespace, set_parsing_settings
from lightning.pytorch.accelerators import CUDAAccelerator, MPSAccelerator
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, ProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lgrpo import recordings  # noqa: F401  (so that short class names find its engine and callback)
from lgrpo.callbacks import (
    EngineSync,
    ExactResume,
    FiniteSteps,
    GracefulInterrupt,
    ImprovementMonitor,
    MismatchGuard,
    RankWatch,
    ReferenceRefresh,
    RolloutProgress,
    StopOnSigterm,
    ValidateEvery,
    ZeroVarianceMask,
)
from lgrpo.commands import COMMANDS, INTERRUPTED, RESUMABLE
from lgrpo.commands.class_change import reset_replaced_tasks
from lgrpo.commands.engine_keeper import EngineKeeper
from lgrpo.commands.evaluate import (
    add_config_of_run,
    evaluate_checkpoints,
    logged_metrics,
    print_metrics,
    refuse_log_option,
)
from lgrpo.commands.help_text import OPTION as HELP_ALL
from lgrpo.commands.help_text import shorten_help
from lgrpo.commands.loggers import LoggerName, log_settings, make_loggers
from lgrpo.commands.parser_errors import cause_in_class, report_errors
from lgrpo.commands.raw_strings import restore_raw_strings
from lgrpo.commands.reward_functions import read_reward_functions, with_reward_functions
from lgrpo.commands.run_folder import claim_training_folder, evaluation_folder
from lgrpo.data import RolloutDataModule
from lgrpo.module import GRPOModule
from lgrpo.report import closing_line, draw_curves, read_series
from lgrpo.run.checkpoints import write_atomically
from lgrpo.run.folder import RunFolder

set_parsing_settings(docstring_parse_attribute_docstrings=True)  # help texts of Sampling, Timeouts, Evaluation, …
reset_replaced_tasks()
read_reward_functions()

CALLBACK_KEYS = {
    "weight_sync": EngineSync,
    "reference_refresh": ReferenceRefresh,
    "zero_variance_mask": ZeroVarianceMask,
    "validate_every": ValidateEvery,
    "finite_steps": FiniteSteps,
    "mismatch_guard": MismatchGuard,
    "improvement_monitor": ImprovementMonitor,
}
"""Settings that hold one callback each, so that a second config file changes one without repeating the others."""
EXAMPLES = {
    "fit": "lgrpo fit --config configs/demo.yaml --run runs/demo",
    "validate": "lgrpo validate --config configs/demo.yaml --ckpt_path runs/demo/checkpoints/last.ckpt",
    "test": "lgrpo test --checkpoints runs/demo",
}


def main(args: list[str], keeper: EngineKeeper | None = None) -> None:
    """Run ``lgrpo fit``, ``validate`` or ``test``; ``args`` include the command.

    With a ``keeper``, the engine of a fit is not closed at its end, and serves the next fit.
    """
    refuse_log_option(args)
    try:
        LGRPOCLI(add_config_of_run(args), keeper=keeper)
    finally:
        os.environ.pop("LGRPO_RUN", None)


class LGRPOCLI(LightningCLI):
    """LightningCLI for ``GRPOModule`` and ``RolloutDataModule``.

    The constructor does everything: it parses the arguments, chooses the run folder (``before_instantiate_classes``),
    builds the model, the data and the trainer, and calls ``fit``, ``validate`` or ``test`` of this class. With
    ``run=False`` the arguments name no command and the objects are built only: ``model``, ``datamodule``, ``trainer``.
    """

    def __init__(self, args: list[str] | None, run: bool = True, keeper: EngineKeeper | None = None) -> None:
        self._keeper = keeper
        self._command = args[0] if run and args else None
        self._shows_all = HELP_ALL in (args or [])
        args = None if args is None else ["--help" if arg == HELP_ALL else arg for arg in args]
        options = {
            name: {"description": COMMANDS[name].summary, "epilog": f"Example: {EXAMPLES[name]}"}
            for name in self.subcommands()
        }
        super().__init__(
            GRPOModule,
            RolloutDataModule,
            args=args,
            run=run,
            auto_configure_optimizers=False,
            save_config_callback=SaveConfig if run else None,
            save_config_kwargs={"save_to_log_dir": False},
            parser_kwargs={"prog": "lgrpo", **options},
        )

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Return the commands to build a parser for: the given one alone, because building one takes half a second."""
        names = [self._command] if self._command in EXAMPLES else EXAMPLES
        return {name: skipped for name, skipped in LightningCLI.subcommands().items() if name in names}

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        parser = super().init_parser(**kwargs)
        report_errors(parser)
        return parser

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        shorten_help(parser, subcommand, self._shows_all)
        return parser

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--run",
            type=str | None,
            default=None,
            help="Folder of the run, for metrics, completions, checkpoints and config. Default: a new folder in runs/. "
            "A run that failed before its first sync can be started again in the same folder.",
        )
        parser.add_argument(
            "--checkpoints",
            type=str | None,
            default=None,
            help="Folder of a run whose checkpoints are all evaluated (validate and test only), with the config of "
            "that run unless --config is given.",
        )
        parser.add_argument(
            "--log",
            type=LoggerName,
            nargs="+",
            default=None,
            help="Loggers besides metrics.csv, which is always written: csv (nothing else), tensorboard, wandb, "
            "mlflow. Default: tensorboard if it is installed.",
        )
        parser.add_argument(
            "--background_checkpoints",
            type=bool,
            default=True,
            help="Write checkpoints in a thread while training goes on, which then waits only for a copy in host "
            "memory. If that would take more than half of the free memory, training waits for the file.",
        )
        for key, callback in CALLBACK_KEYS.items():
            parser.add_subclass_arguments(callback, key, required=False)
        parser.add_class_arguments(ModelCheckpoint, "checkpoint")
        parser.set_defaults(
            {
                "weight_sync": {"class_path": "lgrpo.WeightSync"},
                "finite_steps": {"class_path": "lgrpo.callbacks.FiniteSteps"},
                "mismatch_guard": {"class_path": "lgrpo.callbacks.MismatchGuard"},
                "checkpoint.save_last": True,
                "checkpoint.filename": "{step}",
                "checkpoint.enable_version_counter": False,  # last.ckpt is always the newest
            }
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        if isinstance(args, list):
            args = with_reward_functions(args)
        super().parse_arguments(parser, args)
        if isinstance(args, list):
            command = self.config.get("subcommand")
            restore_raw_strings(self.config[command] if command else self.config, args)

    def before_instantiate_classes(self) -> None:
        settings = self._settings(self.config)
        check_accelerator(settings.trainer.accelerator)
        is_fit = self.subcommand == "fit"
        self.folder = claim_training_folder(settings) if is_fit else RunFolder(evaluation_folder(settings))

    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
            if self._keeper is not None:
                self._keeper.lend(self.datamodule.engine, self._settings(self.config), self.trainer)
        except BaseException as error:
            self.folder.leave()
            raise cause_in_class(error) from error.__cause__

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        settings = self._settings(self.config_init)
        given = settings.trainer.callbacks or []
        callbacks: list[Callback] = [*(given if isinstance(given, list) else [given])]
        callbacks += [callback for key in CALLBACK_KEYS if (callback := settings[key]) is not None]
        kwargs["default_root_dir"] = str(self.folder.path)
        if self.subcommand == "fit":
            self._interrupt = GracefulInterrupt()
            callbacks += [ExactResume(background=settings.background_checkpoints), RankWatch(), self._interrupt]
            has_progress_bar = any(isinstance(callback, ProgressBar) for callback in callbacks)
            if settings.trainer.enable_progress_bar is not False and not has_progress_bar:
                callbacks.append(RolloutProgress())
            if settings.trainer.enable_checkpointing is not False:
                settings.checkpoint.dirpath = settings.checkpoint.dirpath or str(self.folder.path / "checkpoints")
                callbacks.append(settings.checkpoint)
            if settings.trainer.logger in (None, True):
                kwargs["logger"] = make_loggers(self.folder.path, settings.log)
            elif settings.log is not None:
                raise SystemExit("lgrpo: --log and trainer.logger both choose loggers: give one of them")
        else:
            callbacks.append(StopOnSigterm())
            kwargs["enable_checkpointing"] = False
            kwargs["enable_progress_bar"] = False  # Lightning's bar counts tasks; the evaluation shows problems
            if settings.trainer.logger is None:
                kwargs["logger"] = False
        try:
            trainer = super().instantiate_trainer(callbacks=callbacks, **kwargs)
        except MisconfigurationException as error:
            raise ValueError(" ".join(str(error).split())) from error
        write_atomically(trainer)
        return trainer

    def fit(self, **kwargs: Any) -> None:
        """Train, close the engine, and print where the results are.

        A run stopped by a signal exits with ``RESUMABLE`` if it saved a checkpoint. After an error the run folder is
        removed unless the run has metrics or checkpoints.
        """
        started = time.perf_counter()
        try:
            self.trainer.fit(**kwargs)
            if self._keeper is None:
                self.datamodule.engine.close()
            else:
                self._keeper.keep(self.datamodule.engine)
            if self.trainer.is_global_zero:
                print_results(self.folder.path, time.perf_counter() - started)
        except BaseException as error:
            self.folder.leave()
            if not isinstance(error, SystemExit):
                raise
            if self._interrupt.saved is not None:
                raise SystemExit(RESUMABLE) from None
            if self._interrupt.signal is not None:
                raise SystemExit(128 + self._interrupt.signal) from None
            if isinstance(error.__context__, KeyboardInterrupt):  # before GracefulInterrupt handled signals
                raise SystemExit(INTERRUPTED) from None
            raise
        finally:
            self.folder.release()

    def validate(self, **kwargs: Any) -> None:
        """Evaluate the policy, or every checkpoint of ``--checkpoints``, on the validation problems."""
        self._evaluate(partial(self.trainer.validate, **kwargs))

    def test(self, **kwargs: Any) -> None:
        """Evaluate the policy, or every checkpoint of ``--checkpoints``, on the test problems."""
        self._evaluate(partial(self.trainer.test, **kwargs))

    def _evaluate(self, evaluate: partial[Any]) -> None:
        if run := self._settings(self.config).checkpoints:
            evaluate_checkpoints(self.trainer, evaluate, Path(run), f"checkpoints-{self.subcommand}.json")
        else:
            evaluate()
            if self.trainer.is_global_zero:
                print_metrics(logged_metrics(self.trainer))
        self.datamodule.engine.close()

    def _parse_ckpt_path(self) -> None:
        """Take no settings from a checkpoint: ``class_path`` and ``trust_remote_code`` in it would execute code."""

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        kwargs = super()._prepare_subcommand_kwargs(subcommand)
        if kwargs.get("weights_only") is None:
            kwargs["weights_only"] = True  # loading a checkpoint must not execute code from it
        return kwargs | {"verbose": False} if "verbose" in kwargs else kwargs  # lgrpo prints the metrics itself

    def _settings(self, config: Namespace) -> Namespace:
        """Return the settings inside a parsed or instantiated config, with a command or without."""
        return config.get(str(self.subcommand), config)


class SaveConfig(SaveConfigCallback):
    """Save the config of every attempt at a run: ``config.yaml``, and after resuming ``config-2.yaml``, …"""

    def save_config(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            folder = Path(trainer.default_root_dir)
            attempts = len(list(folder.glob("config*.yaml")))
            path = folder / ("config.yaml" if attempts == 0 else f"config-{attempts + 1}.yaml")
            text = self.parser.dump(self.config, skip_none=False)
            path.write_text(text, encoding="utf-8")
            if attempts == 0:
                log_settings(trainer, text)


def check_accelerator(name: Any) -> None:
    """Raise a ``ValueError`` if the settings ask for a GPU and there is none."""
    if name in ("gpu", "cuda") and not (CUDAAccelerator.is_available() or MPSAccelerator.is_available()):
        raise ValueError(
            f"trainer.accelerator is {name}, but PyTorch finds no GPU: set it to cpu or auto, or check the driver and "
            "whether PyTorch is a build for GPUs (lgrpo doctor)"
        )


def print_results(folder: Path, seconds: float) -> None:
    """Draw the curves of a finished run if Matplotlib is installed, and print what its folder contains."""
    try:
        series = read_series(folder)
    except FileNotFoundError:  # the user configured other loggers
        return
    try:
        with contextlib.suppress(ImportError):
            draw_curves(series, folder / "curves.png")
    except OSError as error:
        warnings.warn(str(error), stacklevel=1)
    names = ("metrics", "completions.jsonl", "checkpoints", "curves.png")
    written = ", ".join(name for name in names if (folder / name).exists())
    print(f"The run is in {folder}/: {written}")
    print(f"lgrpo report {folder} writes an HTML page of it")
    print(closing_line(series, seconds))
