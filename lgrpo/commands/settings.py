"""The settings of ``lgrpo fit`` for commands that read a config and train nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser, Namespace, dict_to_namespace
from lightning.pytorch.cli import ArgsType, LightningArgumentParser

from lgrpo.commands.fit import LGRPOCLI
from lgrpo.data import RolloutDataModule
from lgrpo.policy import CausalPolicy, LoRA


def parse_settings(args: list[str]) -> Namespace:
    """Return the settings that ``lgrpo fit`` would read from its arguments."""
    return _SettingsCLI(args).config


def build_settings(args: list[str]) -> tuple[Namespace, RolloutDataModule]:
    """Return the settings that ``lgrpo fit`` would read from its arguments, and the data module that they describe."""
    cli = _SettingsCLI([*args, "--seed_everything=false"])
    return cli.config, cli.parser.instantiate_classes(cli.config).data


def read_settings(path: Path) -> Namespace:
    """Return the settings in the ``config.yaml`` of a run folder as data: no class in it is imported."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        settings = dict_to_namespace(content)
        settings.model.policy.config = content["model"]["policy"]["config"]  # a dictionary
        if settings.model.policy.trust_remote_code:
            raise ValueError(
                f"{path} sets model.policy.trust_remote_code, which executes code of the model's repository: if you "
                f"trust it, give the config with --config {path}"
            )
    except (yaml.YAMLError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not the config of a run ({str(error).splitlines()[0]})") from error
    return settings


def settings_parser() -> ArgumentParser:
    """Return a parser of the arguments of ``lgrpo fit``."""
    return _SettingsCLI(None).parser


def policy_from_settings(settings: Namespace) -> CausalPolicy:
    """Return the policy that parsed settings describe; its model is not loaded."""
    arguments = dict(vars(settings.model.policy))
    lora = arguments.pop("lora", None)
    return CausalPolicy(**arguments, lora=None if lora is None else LoRA(**vars(lora)))


class _SettingsCLI(LGRPOCLI):
    """LGRPOCLI that parses arguments, if given, and builds nothing."""

    def __init__(self, args: list[str] | None) -> None:
        super().__init__(args, run=False)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        for name in ("--ckpt_path", "--weights_only"):  # parameters of Trainer.fit, which the config of a run contains
            parser.add_argument(name, type=Any, default=None)

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        if args is None:
            self.config = Namespace(seed_everything=False)
        else:
            super().parse_arguments(parser, args)

    def before_instantiate_classes(self) -> None:
        """Choose no run folder."""

    def instantiate_classes(self) -> None:
        """Build nothing."""
