"""The words of a command, before and after they are parsed, and what it says where they are wrong."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace


def with_config_of_run(args: list[str]) -> list[str]:
    """Before ``--checkpoints RUN``, where no ``--config`` is given, the one RUN was made with."""
    options = [arg.partition("=")[0] for arg in args]
    if args[:1] not in (["validate"], ["test"]) or "--checkpoints" not in options:
        return args
    place = options.index("--checkpoints")
    run = Path(args[place].partition("=")[2] or "".join(args[place + 1 : place + 2]))
    if not run.is_dir():
        raise SystemExit(f"lgrpo: --checkpoints names the folder of a run, and there is none at {run}")
    if "--config" in options:
        return args
    config = next((folder / "config.yaml" for folder in (run, run.parent) if (folder / "config.yaml").exists()), None)
    if config is None:
        raise SystemExit(f"lgrpo: there is no config.yaml in {run}: give the config it was made with by --config")
    own = ["--ckpt_path=null", *([] if "--run" in options else [f"--run={config.parent}"])]
    return [args[0], f"--config={config}", *own, *args[1:]]


def keep_texts(config: Namespace, args: Sequence[str]) -> None:
    """Puts texts into a config as they were typed, where jsonargparse took them for YAML and wrote that out.

    It does so with texts of a dataclass within a class. Elsewhere it keeps them, or refuses them.

    >>> config = Namespace(template=Namespace(class_path="Template", init_args=Namespace(prompt="{'Solve': None}")))
    >>> keep_texts(config, ["--template.prompt", "Solve:"])
    >>> config.template.init_args.prompt
    'Solve:'

    Args:
        config: What was made of the words.
        args: The words.
    """
    for arg, following in zip(args, [*args[1:], ""], strict=True):
        option, equals, text = arg.partition("=")
        typed = text if equals else following
        *names, last = option.removeprefix("--").split(".")
        node: Any = config
        for name in names:
            node = _holder(node, name).get(name)
        holder = _holder(node, last)
        if option.startswith("--") and _is_written_out(holder.get(last), typed):
            holder[last] = typed


def is_sentence(error: Exception) -> bool:
    """Whether lgrpo raised an error for its text: then a user needs no more than that.

    A mistake in settings or data is a ValueError or an OSError. Others are shown whole where something lies beneath.
    """
    if error.__cause__ is not None and not isinstance(error, ValueError | OSError):
        return False
    place = traceback.extract_tb(error.__traceback__)[-1]
    return Path(place.filename).is_relative_to(Path(__file__).parent) and (place.line or "").startswith("raise")


def _holder(node: Any, name: str) -> Namespace:
    """What has a name of a setting and the arguments of its class; nothing where neither has."""
    inner = node.get("init_args") if isinstance(node, Namespace) else None
    return next((place for place in (node, inner) if isinstance(place, Namespace) and name in place), Namespace())


def _is_written_out(held: Any, typed: str) -> bool:
    """Whether a text is what YAML makes of another, as Python writes it."""
    if not isinstance(held, str) or held == typed:
        return False
    try:
        return held == str(yaml.safe_load(typed))
    except yaml.YAMLError:
        return False
