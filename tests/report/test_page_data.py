"""The data that a page receives; no browser needed."""

from __future__ import annotations

import json
from importlib.resources import files

import pytest

from lgrpo.report.page import SCRIPTS
from lgrpo.report.page_data import _curves, page_data
from lgrpo.report.record import read_runs
from lgrpo.report.seeds import seed_groups
from lgrpo.report.timeline import timeline
from tests.report.made_up import completions, settings, write_run


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


def test_long_curves_are_smoothed_from_all_points():
    """The lowest and the highest value of each piece, which are drawn, would bias a mean."""
    points = [(step, float(step % 7)) for step in range(4000)]
    curves = _curves({"rollout/reward": points, "short": points[:9]}, [])
    assert set(curves["smoothed"]) == {"rollout/reward"}
    assert set(curves["smoothed"]["rollout/reward"]) == {5, 20, 100, curves["smoothing_window"]}
    for window, (steps, means) in curves["smoothed"]["rollout/reward"].items():
        assert (500 < len(steps) <= 750, steps[-1]) == (True, 3999)
        for step, mean in zip(steps, means, strict=True):
            last = [value for _, value in points[max(0, step - window + 1) : step + 1]]
            assert mean == pytest.approx(sum(last) / len(last), rel=1e-5)


def test_timeline(tmp_path):
    rows = [{"step": step, "train/loss": 0.0, "time/update": 1.0, "time/wait": 2.0} for step in range(700)]
    for row in rows:
        row |= {"time/sync": 5.0 if row["step"] == 0 else 0.0, "time/score": 0.5}
    rows += [{"step": step, "time/validate": seconds} for step, seconds in ((0, 3.0), (6, 1.0), (700, 4.0))]
    (run,) = read_runs([write_run(tmp_path / "run", rows=rows, config=settings(data__reuse=2))])
    columns = timeline(run)
    assert (columns[0]["first"], columns[0]["last"], columns[-1]["last"]) == (0, 2, 349)
    assert columns[0]["seconds"] == [2.0, 3.0, 1.0, 6.0, 4.0], "a sync that overlaps is cut to the time waited"
    assert columns[1]["seconds"] == [0.0, 4.5, 1.5, 6.0, 0.0]
    assert columns[-1]["seconds"][4] == 4.0
    del run.series["time/update"][5]
    assert timeline(run) == [], "not every step was logged"


def test_runs_with_the_same_seed_are_not_grouped(tmp_path):
    """They are of two versions of the code, for example."""
    runs = read_runs([write_run(tmp_path / name, config=settings(seed_everything=seed)) for name, seed in ("a0", "b1")])
    assert len(seed_groups(runs)) == 1
    runs = read_runs([write_run(tmp_path / name, config=settings(seed_everything=0)) for name in "cd"])
    assert seed_groups(runs) == []


def test_a_schedule_of_v(tmp_path):
    config = settings(weight_sync={"class_path": "lgrpo.WeightSync", "init_args": {"period": {"0": 1, "20": None}}})
    (run,) = page_data(read_runs([write_run(tmp_path / "run", config=config)]))["runs"]
    assert run["sync_period"] == "0: 1, 20: ∞"


def test_runs_with_unknown_or_different_settings_are_not_grouped(tmp_path):
    paths = [write_run(tmp_path / name, config=settings(data__reuse=k)) for k, name in enumerate("ab", start=1)]
    runs = read_runs(paths)
    assert seed_groups(runs) == []
    for run in runs:
        run.settings = {}
    assert seed_groups(runs) == []
