"""The commands of ``lgrpo``. The module of a command has ``main(args)``, which parses the arguments and runs it.

Modules other than ``fit`` import torch and Lightning inside their functions, so that their ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import signal
import textwrap
from typing import NamedTuple

INTERRUPTED = 128 + signal.SIGINT
"""Exit code of a command stopped by Ctrl-C, as in shells."""
RESUMABLE = 75
"""Exit code of a run that was stopped by a signal and saved a checkpoint (``EX_TEMPFAIL``: try again later)."""


class Command(NamedTuple):
    """One entry of ``lgrpo --help``."""

    module: str
    """Module of ``lgrpo.commands`` that runs the command."""
    summary: str


COMMANDS = {
    "fit": Command("fit", "Train a policy, or resume a run."),
    "validate": Command("fit", "Evaluate a policy, or every checkpoint of a run, on the validation problems."),
    "test": Command("fit", "Evaluate a policy, or every checkpoint of a run, on the test problems."),
    "plan": Command("plan", "Print what a config means: schedule, lags, syncs, tokens, memory."),
    "play": Command("play", "Watch a checkpoint play an episode of its environment, or play it yourself."),
    "export": Command("export", "Write the policy of a checkpoint as a Hugging Face folder."),
    "consolidate": Command("consolidate", "Convert a sharded checkpoint to one file."),
    "report": Command("report", "Write an HTML page of one run or several runs."),
    "score": Command("score", "Compute the rewards of recorded completions."),
    "sweep": Command("sweep", "Run every combination of settings and seeds, and compare the results."),
    "doctor": Command("doctor", "Check whether this machine has what lgrpo, or a config, needs."),
    "configs": Command("configs", "List, print or copy the configs that come with lgrpo."),
}


def command_parser(name: str, details: str, example: str) -> argparse.ArgumentParser:
    """Return the parser of a command, with its summary, details and an example as help."""
    return argparse.ArgumentParser(
        prog=f"lgrpo {name}",
        description=textwrap.fill(f"{COMMANDS[name].summary} {details}", 79, break_on_hyphens=False),
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
