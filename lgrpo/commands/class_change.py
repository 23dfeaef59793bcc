"""A task named over another one starts from its own defaults."""

from __future__ import annotations

from typing import Any

from jsonargparse import _typehints

from lgrpo.tasks import Task

_discard_unknown = _typehints.discard_init_args_on_class_path_change


def reset_replaced_tasks() -> None:
    """Make jsonargparse drop all settings of a task when a later config or option names another task.

    jsonargparse 4.53 keeps those that the other class has too. For an optimizer this is useful (``lr``), but a task's
    ``num_held_out`` or ``template`` belongs to its data.
    """
    _typehints.discard_init_args_on_class_path_change = _discard


def _discard(parser: Any, previous: Any, value: Any) -> None:
    if previous and "init_args" in previous and previous["class_path"] != value["class_path"]:
        named = _typehints.import_object(value["class_path"])
        if isinstance(named, type) and issubclass(named, Task):
            for name in list(vars(previous["init_args"])):
                del previous["init_args"][name]
            return
    _discard_unknown(parser, previous, value)
