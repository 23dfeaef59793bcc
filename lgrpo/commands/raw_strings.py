"""Strings of the command line that jsonargparse reads as YAML."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml
from jsonargparse import Namespace


def restore_raw_strings(config: Namespace, args: Sequence[str]) -> None:
    """Replace strings in a parsed config that are the ``str`` of parsed YAML by the strings the user typed.

    jsonargparse 4.53 loads every argument as YAML before it looks at the type of the setting. For a ``str`` setting of
    a dataclass inside a class it then keeps ``str(loaded)``: ``--data.task.template.system "Answer: yes"`` becomes
    ``"{'Answer': True}"``. No setting of jsonargparse prevents it: a custom loader does not know the type either, and
    ``[Question]`` is a list for one setting and a text for another. Values in config files are not affected.

    >>> config = Namespace(template=Namespace(class_path="Template", init_args=Namespace(prompt="{'Solve': None}")))
    >>> restore_raw_strings(config, ["--template.prompt", "Solve:"])
    >>> config.template.init_args.prompt
    'Solve:'

    Args:
        config: Result of parsing ``args``; changed in place.
        args: Arguments of the command.
    """
    for arg, next_arg in zip(args, [*args[1:], ""], strict=True):
        option, equals, text = arg.partition("=")
        typed = text if equals else next_arg
        *parents, name = option.removeprefix("--").split(".")
        node: Any = config
        for parent in parents:
            node = _namespace_with(node, parent).get(parent)
        namespace = _namespace_with(node, name)
        if option.startswith("--") and _is_str_of_yaml(namespace.get(name), typed):
            namespace[name] = typed


def _namespace_with(node: Any, name: str) -> Namespace:
    """Return ``node`` or its ``init_args``, the one that has ``name``; an empty namespace if neither has."""
    init_args = node.get("init_args") if isinstance(node, Namespace) else None
    candidates = [part for part in (node, init_args) if isinstance(part, Namespace) and name in part]
    return candidates[0] if candidates else Namespace()


def _is_str_of_yaml(value: Any, typed: str) -> bool:
    if not isinstance(value, str) or value == typed:
        return False
    try:
        return value == str(yaml.safe_load(typed))
    except yaml.YAMLError:
        return False
