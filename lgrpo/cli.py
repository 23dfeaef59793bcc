"""Entry point of the ``lgrpo`` command.

A command's module is imported when the command runs, and nothing here imports torch, Lightning or transformers:
``lgrpo --help`` and most commands' ``--help`` answer at once.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import warnings

from lgrpo.commands import COMMANDS, INTERRUPTED
from lgrpo.commands.configs import with_config_paths
from lgrpo.commands.user_errors import is_user_error

EXPECTED_WARNINGS = (
    r"LightningCLI's args parameter",
    r"Be aware that when using `ckpt_path`",
    r"You called `self\.log.*no logger configured",
    r"It is recommended to use `self\.log.*sync_dist=True",
    r"`torch\.distributed\.reduce_op` is deprecated",
    r"Found \d+ module\(s\) in eval mode",
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    r"Please use DTensor instead",
    r"`_get_pg_default_device` will be",
    r"Multiple backends are registered",
)
"""Warnings of Lightning and torch about what lgrpo does on purpose."""


def main(args: list[str] | None = None) -> None:
    """Run one command.

    Args:
        args: Arguments of the command, from Python; every error is then raised. By default those of the process; a
            mistake of the user is then printed as one line, without a traceback (``LGRPO_TRACEBACK=1`` shows it).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: waiting threads leave their core
    os.environ.setdefault("CUDA_MPS_CLIENT_PRIORITY", "1")  # below engines on a shared GPU, as in engines.processes
    if args is not None:
        run_command(args)
        return
    try:
        run_command(sys.argv[1:])
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except Exception as error:
        if not is_user_error(error) or os.environ.get("LGRPO_TRACEBACK"):
            raise
        raise SystemExit(f"lgrpo: {error}") from None


def run_command(args: list[str]) -> None:
    """Import the module of a command and call its ``main``."""
    if not args:
        print(help_text(), file=sys.stderr)
        raise SystemExit(2)
    name = args[0]
    if name in ("-h", "--help"):
        print(help_text())
        return
    if name not in COMMANDS and not name.startswith("-"):
        raise SystemExit(f"lgrpo: there is no command {name!r}; the commands are {', '.join(COMMANDS)}")
    quiet_lightning()
    args = with_config_paths(args)
    if os.getcwd() not in sys.path:  # class_path finds modules in the current folder
        sys.path.append(os.getcwd())
    if name.startswith("-") or COMMANDS[name].module == "fit":
        importlib.import_module("lgrpo.commands.fit").main(args)  # options may precede the command
    else:
        importlib.import_module(f"lgrpo.commands.{COMMANDS[name].module}").main(args[1:])


def help_text() -> str:
    """Return the text of ``lgrpo --help``."""
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items())
    return f"""usage: lgrpo COMMAND [options]

Group-relative policy optimisation of language models, on-policy or off-policy.

commands:
{commands}

lgrpo COMMAND --help lists the options of a command.

example:
  lgrpo fit --config configs/demo.yaml --run runs/demo"""


def quiet_lightning() -> None:
    """Silence Lightning's advertisement and warnings about what lgrpo does on purpose."""
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.rank_zero"):
        logging.getLogger(name).addFilter(lambda record: "litlogger" not in record.getMessage())
    for message in EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message=message)


if __name__ == "__main__":
    main()
