"""The page of one or several runs: one HTML file that works without a network connection.

The text of a run is untrusted: completions are written by a model. It is embedded as compressed JSON in base64, which
contains no markup; the page inserts it as text nodes only; and the page's content security policy runs no script but
the two embedded ones.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from lgrpo.report.page_data import page_data
from lgrpo.report.record import RunRecord, read_runs
from lgrpo.run.atomic import replaced

SCRIPTS = (
    "format",
    "dom",
    "address",
    "theme",
    "selection",
    "curves",
    "plot",
    "charts",
    "stages",
    "gantt",
    "table",
    "syncs",
    "filters",
    "completions",
    "settings",
    "head",
    "navigation",
    "live",
    "main",
)
"""The files ``assets/NAME.js`` in the order in which they are joined. They share one scope, so that names defined in
one file are visible in all of them; ``main`` runs last."""


def write_page(
    paths: Sequence[Path], out: Path, *, max_completions: int = 20_000, refresh: float | None = None
) -> list[RunRecord]:
    """Read the runs, write their page, and return what was read.

    The file is replaced atomically, so that a browser never loads half of it.

    Args:
        paths: Run folders.
        out: Path of the HTML file.
        max_completions: Maximum number of rows in the table of completions, over all runs.
        refresh: Seconds after which the open page reloads itself; None for never.
    """
    runs = read_runs(paths)
    html = page_html(page_data(runs, max_completions, refresh))
    with replaced(out) as unfinished:
        unfinished.write_text(html, encoding="utf-8")
    return runs


def page_html(data: dict[str, Any]) -> str:
    """Return the HTML file that shows ``data``, with styles, scripts and data embedded."""
    assets = files("lgrpo.report") / "assets"

    def read(name: str) -> str:
        return (assets / name).read_text(encoding="utf-8").strip()

    library = f"/*!\n{read('uPlot.LICENSE')}\n*/\n{read('uPlot.iife.min.js')}"
    modules = "\n\n".join(read(f"{name}.js") for name in SCRIPTS)
    script = f'(() => {{\n"use strict";\n\n{modules}\n}})();\n'
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    packed = base64.b64encode(gzip.compress(text.encode("ascii"), 6, mtime=0)).decode("ascii")
    parts = {
        "POLICY": f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"script-src {_digest(library)} {_digest(script)}",
        "LIBRARY_STYLE": read("uPlot.min.css"),
        "STYLE": read("page.css"),
        "DATA": packed,
        "LIBRARY": library,
        "SCRIPT": script,
    }
    html = read("page.html")
    for name, part in parts.items():
        html = html.replace(f"{{{{{name}}}}}", part, 1)
    return html


def _digest(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
