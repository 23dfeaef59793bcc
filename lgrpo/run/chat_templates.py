"""Chat templates from files, and those that TRL ships by name."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

from lgrpo.checks import nearest


def read_chat_template(name: str) -> str:
    """Return the chat template of a file, or the one that TRL ships by this name, such as ``qwen3_training``."""
    path = Path(name).expanduser()
    if path.is_file():
        return path.read_text(encoding="utf-8")
    if path.suffix or len(path.parts) > 1:
        raise FileNotFoundError(f"policy.chat_template is {name}: there is no such file")
    folder = _trl_folder()
    if folder is None:
        raise ModuleNotFoundError(
            f"policy.chat_template is {name!r}, which is not a file, and templates by name are those of TRL: "
            "pip install 'trl>=1.16', or give a file with the ending .jinja"
        )
    known = {file.stem: file for file in folder.glob("*.jinja")}
    if name not in known:
        raise ValueError(
            f"policy.chat_template is {name!r}{nearest(name, known)}, which is neither a file nor a template of TRL; "
            f"TRL has {', '.join(sorted(known))}"
        )
    return known[name].read_text(encoding="utf-8")


def training_variant(chat_template: object) -> str | None:
    """Return the name of TRL's training variant of a template; None if there is none or TRL is not installed."""
    folder = _trl_folder()
    for file in [] if folder is None else sorted(folder.glob("*.jinja")):
        if file.with_stem(f"{file.stem}_training").is_file() and file.read_text(encoding="utf-8") == chat_template:
            return f"{file.stem}_training"
    return None


@cache
def _trl_folder() -> Path | None:
    """Return the folder of TRL's chat templates, without importing TRL."""
    spec = find_spec("trl")
    folders = [] if spec is None else [Path(path) / "chat_templates" for path in spec.submodule_search_locations or ()]
    return next((folder for folder in folders if folder.is_dir()), None)
