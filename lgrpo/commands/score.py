"""``lgrpo score``: rewards for completions that were recorded without rewards or with others."""

from __future__ import annotations

from pathlib import Path

from lgrpo.commands import command_parser


def main(args: list[str]) -> None:
    """Score the completions of a recording with the task of a config, and write them to a new file."""
    parser = command_parser(
        "score",
        "The task of the config computes the rewards, in worker processes with the limits of data.scoring. All "
        "options of lgrpo fit are accepted, after FILE.",
        "lgrpo score runs/demo/rollouts --config configs/demo.yaml --out scored.parquet",
    )
    parser.usage = "%(prog)s [-h] FILE [--out OUT] [options of lgrpo fit]"
    parser.add_argument(
        "file", metavar="FILE", help="Folder written by RolloutRecorder, or a .parquet, .jsonl or .json file."
    )
    parser.add_argument(
        "--out", type=Path, help="Parquet file to write. Default: FILE-scored.parquet in the folder of FILE."
    )
    options, fit_args = parser.parse_known_args(args)
    file = Path(options.file)
    out: Path = options.out or file.with_name(f"{file.name.partition('.')[0]}-scored.parquet")
    if out.suffix != ".parquet":
        raise SystemExit(f"lgrpo: --out {out} must be a .parquet file")
    if out.exists():
        raise SystemExit(f"lgrpo: {out} exists already, and nothing is overwritten: choose another --out")
    if not any(argument.startswith(("--config", "-c", "--data.task")) for argument in fit_args):
        raise SystemExit("lgrpo: no task is given: name the config that has it with --config FILE")

    from lgrpo.commands.settings import build_settings, policy_from_settings
    from lgrpo.recordings import rescore

    settings, data = build_settings(fit_args)
    try:
        scored = rescore(options.file, out, data.task, data.scoring, policy_from_settings(settings).tokenizer)
    except (ValueError, OSError, RuntimeError) as error:
        raise SystemExit(f"lgrpo: {error}") from error
    before = "none" if scored.before is None else f"{scored.before:.4f}"
    after = "none" if scored.after is None else f"{scored.after:.4f}"
    print(f"{scored.num_completions} completions scored, mean reward {after} (before: {before}), in {out}")
    if scored.num_failed or scored.num_waiting:
        print(f"{scored.num_failed} could not be scored, {scored.num_waiting} have no score yet")
