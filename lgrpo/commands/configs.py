"""``lgrpo configs``: the configs that come with lgrpo, and how ``--config NAME`` finds them."""

from __future__ import annotations

import shutil
import textwrap
from pathlib import Path

from lgrpo.checks import nearest
from lgrpo.commands import command_parser

PACKAGE = Path(__file__).parent.parent
SUFFIX = ".yaml"
ABBREVIATIONS = ("al.", "Dr.", "eq.")


def main(args: list[str]) -> None:
    """List the packaged configs, print one, or copy one into the current folder."""
    parser = command_parser(
        "configs",
        "Every --config of lgrpo takes the name of a packaged config; a file of that name in the current folder is "
        "preferred.",
        "lgrpo configs copy on_policy --to my_run.yaml",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions")
    actions.add_parser("list", help="List all packaged configs with their first sentence. The default.")
    actions.add_parser("show", help="Print a packaged config.").add_argument("name", metavar="NAME")
    copy = actions.add_parser("copy", help="Copy a packaged config, to edit it.")
    copy.add_argument("name", metavar="NAME")
    copy.add_argument("--to", type=Path, metavar="FILE", help="File to write. Default: NAME.yaml in this folder.")
    options = parser.parse_args(args)
    if options.action == "show":
        print(_packaged(options.name).read_text(encoding="utf-8"), end="")
    elif options.action == "copy":
        source = _packaged(options.name)
        target = options.to or Path(source.name)
        if target.exists():
            raise ValueError(f"{target} exists already: choose another name with --to")
        shutil.copyfile(source, target)
        print(f"{target}: use it with --config {target}")
    else:
        print(listing())


def configs_folder() -> Path:
    """Return the folder of the packaged configs: inside an installed wheel, beside the package in a clone."""
    inside = PACKAGE / "configs"
    return inside if inside.is_dir() else PACKAGE.parent / "configs"


def config_names() -> list[str]:
    """Return the names of all packaged configs, such as ``demo`` and ``papers/a_gsm8k``; folders last."""
    folder = configs_folder()
    names = [path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob(f"*{SUFFIX}")]
    return sorted(names, key=lambda name: ("/" in name, name))


def listing() -> str:
    """Return a line or more for each config: its name and the first sentence of its comment."""
    width = max(map(len, config_names())) + 2
    indent = " " * width
    return "\n".join(
        textwrap.fill(
            f"{name:<{width}}{first_sentence(_packaged(name))}", 119, subsequent_indent=indent, break_on_hyphens=False
        )
        for name in config_names()
    )


def first_sentence(path: Path) -> str:
    """Return the first sentence of the comment at the top of a config."""
    words: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        words += line.lstrip("# ").split()
        ends = [i for i, word in enumerate(words) if word.endswith(".") and word not in ABBREVIATIONS]
        if ends or line.endswith(":"):  # commands follow a colon
            words = words[: ends[0] + 1] if ends else words
            break
    return " ".join(words).rstrip(".:")


def find_config(given: str) -> Path:
    """Return the file of a config that is given by its path, or by the name of a packaged one.

    Names may have the prefix ``configs/`` and the suffix ``.yaml``, so that commands written for a clone work anywhere.

    Raises:
        ValueError: If there is no such file and no packaged config of that name.
    """
    for path in (Path(given), Path(given + SUFFIX)):
        if path.is_file():
            return path
    return _packaged(given)


def with_config_paths(args: list[str]) -> list[str]:
    """Return the arguments of a command with every ``--config NAME`` replaced by the path of its file."""
    found, is_name = [], False
    for index, argument in enumerate(args):
        if is_name and not argument.startswith("-"):
            argument = _path_of(argument)
        elif argument.startswith("--config="):
            argument = "--config=" + _path_of(argument.removeprefix("--config="))
        is_name = argument == "--config" and index + 1 < len(args)
        found.append(argument)
    return found


def _path_of(given: str) -> str:
    """Return the path of a config as text. Inline YAML, which Lightning also accepts, stays as it is."""
    return given if not given or set(given) & set("{}[]:\n ") else str(find_config(given))


def _packaged(name: str) -> Path:
    known, short = config_names(), name.removeprefix("configs/").removesuffix(SUFFIX)
    if short in known:
        return configs_folder() / f"{short}{SUFFIX}"
    advice = nearest(short, known) or nearest(short.rpartition("/")[2], [other.rpartition("/")[2] for other in known])
    raise ValueError(
        f"there is no file {name}, and no packaged config of that name{advice or ';'} lgrpo configs lists all of them"
    )
