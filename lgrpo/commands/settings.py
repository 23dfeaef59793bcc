"""The settings of ``lgrpo fit`` for commands that read a config and train nothing."""

from __future__ import annotations

from typing import Any

from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch.cli import ArgsType, LightningArgumentParser

from lgrpo.commands.fit import LGRPOCLI
from lgrpo.policy import CausalPolicy, LoRA


def parse_settings(args: list[str]) -> Namespace:
    """Return the settings that ``lgrpo fit`` would read from its arguments."""
    return _SettingsCLI(args).config


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
