"""``lgrpo score``: rewards for completions that were recorded without, or with others."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from lightning.pytorch.cli import LightningCLI

from lgrpo.data import rescore


def score(args: list[str], make: Callable[[list[str]], LightningCLI]) -> None:
    """``lgrpo score FILE --config … [--out FILE]``; ``make`` builds what a config names, and runs nothing."""
    parser = argparse.ArgumentParser(
        prog="lgrpo score",
        description="Scores recorded completions with the reward of a config's task, in workers with its limits.",
        epilog="Everything else (--config, --data.task…, --data.scoring…) is as for lgrpo fit.",
        allow_abbrev=False,
    )
    parser.add_argument("file", help="folder of RolloutRecorder, or a .parquet, .jsonl or .json file")
    parser.add_argument("--out", type=Path, help="Parquet file to write; by default FILE-scored.parquet beside it")
    own, others = parser.parse_known_args(args)
    out: Path = own.out or Path(own.file).with_name(f"{Path(own.file).name.partition('.')[0]}-scored.parquet")
    if out.suffix != ".parquet":
        raise SystemExit(f"lgrpo: --out {out} is to be a .parquet file")
    if out.exists():
        raise SystemExit(f"lgrpo: {out} exists already, and nothing is overwritten: choose another --out")
    if not any(argument.startswith(("--config", "-c", "--data.task")) for argument in others):
        raise SystemExit("lgrpo: the task of a config scores: say which by --config FILE")
    cli = make(others)
    data = cli.datamodule
    try:
        done = rescore(own.file, out, data.task, data.scoring, cli.model.tokenizer)
    except (ValueError, OSError, RuntimeError) as error:
        raise SystemExit(f"lgrpo: {error}") from error
    before = "none" if done.before is None else f"{done.before:.4f}"
    after = "none" if done.after is None else f"{done.after:.4f}"
    print(f"{done.num_completions} completions scored, mean reward {after} (before: {before}), in {out}")
    if done.num_failed or done.num_waiting:
        print(f"{done.num_failed} could not be scored, {done.num_waiting} have no score yet")
