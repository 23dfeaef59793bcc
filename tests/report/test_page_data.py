"""The data that a page receives; no browser needed."""

from __future__ import annotations

import json
from importlib.resources import files

from lgrpo.report.page import SCRIPTS
from lgrpo.report.page_data import page_data
from lgrpo.report.record import read_runs
from tests.report.made_up import completions, write_run


def test_every_number_of_a_row_reaches_the_page(tmp_path):
    table = completions(3)
    table[1]["extra"] = 7
    run = write_run(tmp_path / "run", table=table)
    with (run / "syncs.jsonl").open("a") as file:
        file.write(json.dumps({"version": 99, "step": 99, "checksum": "0", "num_chunks": 4}) + "\n")
    data = page_data(read_runs([run]))
    assert data["completions"]["columns"]["extra"][:3] == [None, 7, None]
    assert data["runs"][0]["syncs"]["num_chunks"][-2:] == [None, 4]


def test_every_script_is_listed():
    """A file that is missing from ``SCRIPTS`` would not be on the page."""
    assets = files("lgrpo.report") / "assets"
    names = {path.name.removesuffix(".js") for path in assets.iterdir() if path.name.endswith(".js")}
    assert names - {"uPlot.iife.min"} == set(SCRIPTS)
    assert SCRIPTS[-1] == "main"
