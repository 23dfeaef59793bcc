"""The command line: LightningCLI's ``lgrpo fit | validate | test``, and commands around them."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import lightning as L
from jsonargparse import Namespace
from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, ProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from lgrpo.arguments import is_sentence, keep_texts, with_config_of_run
from lgrpo.callbacks import (
    EndAtOnce,
    EngineSync,
    ExactResume,
    FiniteSteps,
    GracefulInterrupt,
    ImprovementMonitor,
    RankWatch,
    ReferenceRefresh,
    RolloutProgress,
    ValidateEvery,
    ZeroVarianceMask,
)
from lgrpo.checkpoints import newest_checkpoint, sweep_parts
from lgrpo.data import RolloutDataModule
from lgrpo.export import consolidate_command, export
from lgrpo.module import GRPOModule
from lgrpo.plan import plan
from lgrpo.report import closing_line, draw_curves, find_checkpoints, headlines, read_series, report, write_summary
from lgrpo.run_folder import RunFolder
from lgrpo.score import score
from lgrpo.simulation import simulate
from lgrpo.sweep import sweep

CALLBACK_KEYS = {
    "weight_sync": EngineSync,
    "reference_refresh": ReferenceRefresh,
    "zero_variance_mask": ZeroVarianceMask,
    "validate_every": ValidateEvery,
    "finite_steps": FiniteSteps,
    "improvement_monitor": ImprovementMonitor,
}
INTERRUPTED = 128 + signal.SIGINT
"""Exit code of a command that was stopped by Ctrl-C, as shells have it."""
RESUMABLE = 75
"""Exit code of a run that was stopped by a signal with a checkpoint: the system's own word for "try again later"."""
EPILOG = (
    "lgrpo plan --config … says what a config means before anything is loaded: lags, syncs, tokens, memory. "
    "lgrpo test --checkpoints RUN evaluates every checkpoint of a run. "
    "lgrpo export CHECKPOINT OUT writes a Hugging Face folder. "
    "lgrpo report RUN … writes a page of a run, or of several. "
    "lgrpo score FILE --config … scores recorded rollouts. lgrpo sweep GRID.yaml runs settings × seeds. "
    "lgrpo consolidate FOLDER FILE makes one file of a sharded checkpoint. "
    "lgrpo simulate MEASURED.json says how long steps would take on GPUs one does not have."
)


class SaveConfig(SaveConfigCallback):
    """Keeps the whole configuration of every attempt at a run beside its metrics."""

    def save_config(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            folder = Path(trainer.default_root_dir)
            attempts = len(list(folder.glob("config*.yaml")))
            path = folder / ("config.yaml" if attempts == 0 else f"config-{attempts + 1}.yaml")
            path.write_text(self.parser.dump(self.config, skip_none=False), encoding="utf-8")


class LGRPOCLI(LightningCLI):
    """LightningCLI with the callbacks of the loop under keys of their own, and a run folder."""

    folder = RunFolder(Path())
    """Where a fit writes; nobody's where nothing is trained."""

    def __init__(self, args: list[str] | None = None, **kwargs: Any) -> None:
        super().__init__(
            GRPOModule,
            RolloutDataModule,
            args=args,
            auto_configure_optimizers=False,
            save_config_callback=SaveConfig if kwargs.get("run", True) else None,
            save_config_kwargs={"save_to_log_dir": False},
            parser_kwargs={"description": "Group-relative policy optimisation, on-policy or off.", "epilog": EPILOG},
            **kwargs,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--run",
            type=str | None,
            default=None,
            help="Folder of the run: metrics, completions, checkpoints, config. A new one under runs/ by default. One "
            "that fails before its first sync can be begun again in the same.",
        )
        parser.add_argument(
            "--checkpoints",
            type=str | None,
            default=None,
            help="For validate and test: the folder of a run; every checkpoint in it is evaluated, by the run's own "
            "config unless another one is given.",
        )
        for key, callback in CALLBACK_KEYS.items():
            parser.add_subclass_arguments(callback, key, required=False)
        parser.set_defaults({"weight_sync": {"class_path": "lgrpo.WeightSync"}})
        parser.set_defaults({"finite_steps": {"class_path": "lgrpo.callbacks.FiniteSteps"}})
        parser.add_class_arguments(ModelCheckpoint, "checkpoint")
        parser.set_defaults(
            {
                "checkpoint.save_last": True,
                "checkpoint.filename": "{step}",
                "checkpoint.enable_version_counter": False,  # last.ckpt is always the newest
            }
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        super().parse_arguments(parser, args)
        if isinstance(args, list):
            command = self.config.get("subcommand")
            keep_texts(self.config[command] if command else self.config, args)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        known = LightningCLI.subcommands()
        return {name: known[name] for name in ("fit", "validate", "test")}

    def before_instantiate_classes(self) -> None:
        run = self._get(self.config, "run")
        root = self._get(self.config, "trainer").default_root_dir
        if run and root and Path(run) != Path(root):
            raise SystemExit(f"lgrpo: --run {run} and --trainer.default_root_dir {root} both name the run folder")
        run = run or root
        evaluated = self._get(self.config, "checkpoints")
        if self.subcommand != "fit":
            self.run_folder = Path(run or evaluated or ".")
            if evaluated:
                find_checkpoints(Path(evaluated))  # before anything is built
            if evaluated and self._get(self.config, "ckpt_path"):
                raise SystemExit("lgrpo: --checkpoints evaluates all checkpoints of a run, --ckpt_path one: not both")
            return
        if evaluated:
            raise SystemExit("lgrpo: --checkpoints is for validate and test")
        resuming = self._get(self.config, "ckpt_path") is not None
        if run and SLURMEnvironment.detect():  # a job that was requeued: Lightning goes on from where it stopped
            resuming |= any(Path(run).glob("hpc_ckpt_*.ckpt"))
        if resuming and run is None:
            raise SystemExit("lgrpo: --ckpt_path goes on with a run: say which one with --run FOLDER")
        folder = self._get(self.config, "checkpoint").dirpath or (run and Path(run) / "checkpoints")
        if self._get(self.config, "ckpt_path") == "last":
            try:
                self.config[self.subcommand].ckpt_path = str(newest_checkpoint(Path(folder)))
            except FileNotFoundError as error:
                raise SystemExit(f"lgrpo: {error}") from error
            sweep_parts(Path(folder))
        if run is None and (TorchElasticEnvironment.detect() or SLURMEnvironment.detect()):
            raise SystemExit(
                "lgrpo: ranks that are started from outside (torchrun, SLURM) would each name the run folder by "
                "their own clock: name it with --trainer.default_root_dir FOLDER (torchrun takes --run for an option "
                "of its own)"
            )
        self.run_folder = Path(run or os.environ.setdefault("LGRPO_RUN", f"runs/{datetime.now():%Y-%m-%d_%H-%M-%S}"))
        self.folder = RunFolder(self.run_folder)
        rank_zero_only(self.folder.claim)(resuming)

    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except BaseException:
            self.folder.leave()
            raise

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        settings = self._get(self.config_init, "trainer")
        given = settings["callbacks"] or []
        callbacks: list[Callback] = [*(given if isinstance(given, list) else [given])]
        callbacks += [c for key in CALLBACK_KEYS if (c := self._get(self.config_init, key)) is not None]
        kwargs["default_root_dir"] = str(self.run_folder)
        if self.subcommand == "fit":
            self._interrupt = GracefulInterrupt()
            callbacks += [ExactResume(), RankWatch(), self._interrupt]
            if settings["enable_progress_bar"] is not False and not any(isinstance(c, ProgressBar) for c in callbacks):
                callbacks.append(RolloutProgress())
            if settings["enable_checkpointing"] is not False:
                checkpoint = self._get(self.config_init, "checkpoint")
                checkpoint.dirpath = checkpoint.dirpath or str(self.run_folder / "checkpoints")
                callbacks.append(checkpoint)
            if settings["logger"] in (None, True):
                kwargs["logger"] = self._loggers()
        else:
            callbacks.append(EndAtOnce())
            kwargs["enable_checkpointing"] = False
            kwargs["enable_progress_bar"] = False  # Lightning's would count tasks; the evaluation shows problems
            if settings["logger"] is None:
                kwargs["logger"] = False
        return super().instantiate_trainer(callbacks=callbacks, **kwargs)

    def _loggers(self) -> list[Logger]:
        loggers: list[Logger] = [CSVLogger(str(self.run_folder), name="metrics")]
        try:
            loggers.append(TensorBoardLogger(str(self.run_folder), name="tensorboard"))
        except ModuleNotFoundError:
            warnings.warn("tensorboard is not installed, so metrics go to CSV alone", stacklevel=1)
        return loggers

    def before_fit(self) -> None:
        self._started = time.perf_counter()

    def after_fit(self) -> None:
        self.datamodule.engine.close()
        if not self.trainer.is_global_zero:
            return
        try:
            series = read_series(self.run_folder)
        except FileNotFoundError:  # the user logs elsewhere
            return
        try:
            draw_curves(series, self.run_folder / "curves.png")
        except (ImportError, OSError) as error:
            warnings.warn(str(error), stacklevel=1)
        names = ("metrics", "completions.jsonl", "checkpoints", "curves.png")
        written = ", ".join(name for name in names if (self.run_folder / name).exists())
        print(f"The run is in {self.run_folder}/: {written}")
        print(f"lgrpo report {self.run_folder} makes a page of it")
        print(closing_line(series, time.perf_counter() - self._started))

    def _run_subcommand(self, subcommand: str) -> None:
        run = self._get(self.config, "checkpoints")
        if subcommand == "fit":
            self._fit()
            return
        if run is None:
            super()._run_subcommand(subcommand)
            return
        evaluate = {"validate": self.trainer.validate, "test": self.trainer.test}[subcommand]
        table: dict[int, dict[str, float]] = {}
        for step, path in find_checkpoints(Path(run)).items():
            evaluate(self.model, datamodule=self.datamodule, ckpt_path=str(path), verbose=False, weights_only=True)
            table[step] = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
            if self.trainer.is_global_zero:
                print(f"step {step}: " + ", ".join(headlines(table[step])), flush=True)
        self.datamodule.engine.close()
        if self.trainer.is_global_zero:
            print(write_summary(table, Path(run) / "evaluations" / f"checkpoints-{subcommand}.json"))

    def _fit(self) -> None:
        """A run that was stopped and can go on says so by its exit code."""
        try:
            super()._run_subcommand("fit")
        except BaseException as error:
            self.folder.leave()
            if not isinstance(error, SystemExit):
                raise
            if self._interrupt.saved is not None:
                raise SystemExit(RESUMABLE) from None
            if self._interrupt.signal is not None:
                raise SystemExit(128 + self._interrupt.signal) from None
            if isinstance(error.__context__, KeyboardInterrupt):  # before the callback listened
                raise SystemExit(INTERRUPTED) from None
            raise
        finally:
            self.folder.release()

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        kwargs = super()._prepare_subcommand_kwargs(subcommand)
        if kwargs.get("weights_only") is None:
            kwargs["weights_only"] = True  # a checkpoint is data: nothing in it is executed
        return kwargs | {"verbose": False} if "verbose" in kwargs else kwargs  # the figures are printed here

    def after_validate(self) -> None:
        self._print_figures()

    def after_test(self) -> None:
        self._print_figures()

    def _print_figures(self) -> None:
        self.datamodule.engine.close()
        if self.trainer.is_global_zero:
            figures = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
            width = max(map(len, figures), default=0) + 2
            for name, value in figures.items():
                if not name.endswith("_stderr"):
                    error = figures.get(f"{name}_stderr")
                    print(f"{name:<{width}}{value:.4f}" + ("" if error is None else f" ± {error:.4f}"))


class ParseOnly(LGRPOCLI):
    """Reads a config as ``fit`` would, and stops there."""

    def __init__(self, args: list[str]) -> None:
        super().__init__(args, run=False)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        for name in ("--ckpt_path", "--weights_only"):  # of fit alone, but the config of a run has them
            parser.add_argument(name, type=Any, default=None)

    def before_instantiate_classes(self) -> None:
        """No run folder."""

    def instantiate_classes(self) -> None:
        """Nothing is built."""


class ParserOnly(ParseOnly):
    """What ``fit`` can be given, for a look at several configs."""

    def __init__(self) -> None:
        super().__init__([])

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        self.config = Namespace(seed_everything=False)


def quiet_lightning() -> None:
    """Leaves out Lightning's advertisement, and warnings about things that are as they should be."""
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.rank_zero"):
        logging.getLogger(name).addFilter(lambda record: "litlogger" not in record.getMessage())
    warnings.filterwarnings("ignore", message=r"LightningCLI's args parameter")
    warnings.filterwarnings("ignore", message=r"Be aware that when using `ckpt_path`")
    warnings.filterwarnings("ignore", message=r"You called `self\.log.*no logger configured")
    warnings.filterwarnings("ignore", message=r"It is recommended to use `self\.log.*sync_dist=True")
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.reduce_op` is deprecated")
    warnings.filterwarnings("ignore", message=r"Found \d+ module\(s\) in eval mode")
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
    for text in ("Please use DTensor instead", "`_get_pg_default_device` will be", "Multiple backends are registered"):
        warnings.filterwarnings("ignore", message=text)  # torch's first FSDP, of itself


def main(args: list[str] | None = None) -> None:
    """Entry point of the ``lgrpo`` command. With words given, from Python, errors are raised as they are."""
    if args is not None:
        run_command(args)
        return
    try:
        run_command(sys.argv[1:])
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except Exception as error:
        if not is_sentence(error) or os.environ.get("LGRPO_TRACEBACK"):
            raise
        raise SystemExit(f"lgrpo: {error}") from None


def run_command(args: list[str]) -> None:
    """One command, by its words."""
    args = with_config_of_run(args)
    quiet_lightning()
    if os.getcwd() not in sys.path:  # so that class_path finds a module beside the config
        sys.path.append(os.getcwd())
    commands: dict[str, Callable[[list[str]], Any]] = {
        "plan": lambda words: print(plan(ParseOnly(words).config)),
        "report": report,
        "export": lambda words: export(words, lambda settings: ParseOnly(settings).config),
        "score": lambda words: score(words, lambda settings: LGRPOCLI(settings, run=False)),
        "simulate": simulate,
        "consolidate": consolidate_command,
        "sweep": lambda words: sweep(words, lambda: ParserOnly().parser),
    }
    names = [*LGRPOCLI.subcommands(), *commands]
    first = args[0] if args else ""
    if first and not first.startswith("-") and first not in names:
        raise SystemExit(f"lgrpo: there is no command {first!r}: there are {', '.join(names)}")
    try:
        if first in commands:
            commands[first](args[1:])
        else:
            LGRPOCLI(args)
    finally:
        os.environ.pop("LGRPO_RUN", None)


if __name__ == "__main__":
    main()
