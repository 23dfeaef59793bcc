"""``lgrpo consolidate``: a sharded checkpoint as one file."""

from __future__ import annotations

from pathlib import Path

from lgrpo.commands import command_parser


def main(args: list[str]) -> None:
    """Write the contents of a sharded checkpoint to one file."""
    parser = command_parser(
        "consolidate",
        "Runs with FSDP or FSDP2 write sharded checkpoints. lgrpo validate and test read the file.",
        "lgrpo consolidate runs/sharded/checkpoints/last.ckpt last-whole.ckpt",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="Sharded checkpoint.")
    parser.add_argument("file", type=Path, metavar="FILE", help="Checkpoint file to write.")
    options = parser.parse_args(args)

    from lgrpo.run.sharded import consolidate

    try:
        consolidate(options.folder, options.file)
    except (ValueError, OSError) as error:
        raise SystemExit(f"lgrpo: {error}") from error
    print(f"{options.file} has the whole contents of {options.folder}")
