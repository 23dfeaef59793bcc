"""Help of the commands that train and evaluate: the settings of lgrpo first, those of Lightning on request."""

from __future__ import annotations

from functools import partial

from jsonargparse import ArgumentParser

LIGHTNING = ("trainer", "checkpoint")
"""Groups of settings that belong to Lightning's Trainer and ModelCheckpoint."""
OPTION = "--help_all"


def shorten_help(parser: ArgumentParser, command: str, shows_all: bool) -> None:
    """Leave the list of all options out of the usage, and Lightning's settings out of the help unless ``shows_all``."""
    parser.usage = f"lgrpo {command} [--config NAME_OR_FILE …] [--NAME VALUE …]"
    parser.format_help = partial(_format_help, parser, command, shows_all)


def _format_help(parser: ArgumentParser, command: str, shows_all: bool) -> str:
    groups = parser._action_groups
    theirs = [group for group in groups if any(_is_lightning(action.dest) for action in group._group_actions)]
    ours = [group for group in groups if group not in theirs]
    parser._action_groups = [*ours, *(theirs if shows_all else [])]
    try:
        text = type(parser).format_help(parser)
    finally:
        parser._action_groups = groups
    if shows_all:
        return text
    return f"{text}lgrpo {command} {OPTION} also lists Lightning's settings: --trainer.… and --checkpoint.…\n"


def _is_lightning(name: str) -> bool:
    return name.partition(".")[0] in LIGHTNING
