"""The data that a page receives; no browser needed."""

from __future__ import annotations

import json
from importlib.resources import files

import pytest

from lgrpo.report.charts import chart_sections
from lgrpo.report.gantt import gantt, shown_rollouts
from lgrpo.report.page import SCRIPTS
from lgrpo.report.page_data import _curves, page_data
from lgrpo.report.record import read_runs
from lgrpo.report.seeds import seed_groups
from lgrpo.report.timeline import timeline
from tests.report.made_up import clocked, completions, metrics, settings, write_metrics, write_run


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


def boxes(chart, stage):
    return [(b["first"], b["last"], b["start"], b["end"]) for b in chart["boxes"] if b["stage"] == stage]


def written(folder, rows, **options):
    (run,) = read_runs([write_run(folder, rows=rows, period=4, **options)])
    return run


class TestGantt:
    def test_a_cycle_sampled_before_its_training(self, tmp_path):
        chart = gantt(written(tmp_path / "run", clocked(metrics(8), overlaps=False)))
        assert (chart["first"], chart["last"], chart["num_rollouts"], chart["begin"]) == (0, 7, 8, 5.0)
        assert boxes(chart, "generate") == [(0, 3, 6.0, 14.0), (4, 7, 25.0, 33.0)]
        assert boxes(chart, "sync") == [(0, 0, 5.0, 6.0), (4, 4, 24.0, 25.0)]
        assert boxes(chart, "update")[:2] == [(0, 0, 14.5, 16.5), (1, 1, 17.0, 19.0)]
        assert boxes(chart, "idle") == [(0, 0, 5.0, 6.0), (4, 4, 14.0, 25.0)]
        wait = next(box for box in chart["boxes"] if box["stage"] == "wait")
        assert (wait["start"], wait["end"]) == (6.0, 14.5)
        assert wait["parts"] == {"sync": 1.0, "generation": 8.0, "scores": 0.0, "preparation": 0.5}

    def test_a_cycle_sampled_during_its_training(self, tmp_path):
        chart = gantt(written(tmp_path / "run", clocked(metrics(8), overlaps=True)))
        generated, updated = boxes(chart, "generate"), boxes(chart, "update")
        assert generated[:2] == [(0, 0, 6.0, 8.0), (1, 1, 8.0, 10.0)]
        assert updated[0] == (0, 0, 8.5, 10.5)
        assert (boxes(chart, "idle")[1], generated[4]) == ((4, 4, 14.0, 19.0), (4, 4, 19.0, 21.0))

    def test_lead(self, tmp_path):
        """A sync comes after the rollouts that were requested before it."""
        rows = clocked(metrics(8), overlaps=True)
        rows[3] |= {"time/wait": 3.0, "time/sync": 1.0}
        rows[3]["time/sampled_at"] = rows[3]["time/clock"] - 1.5
        chart = gantt(written(tmp_path / "run", rows, config=settings(data__lead=1)))
        assert boxes(chart, "sync")[1] == (4, 4, rows[3]["time/sampled_at"], rows[3]["time/sampled_at"] + 1.0)

    def test_steps_of_a_rollout_and_validation(self, tmp_path):
        rows = []
        for row in clocked(metrics(8), overlaps=False):
            rows += [{**row, "step": 2 * row["step"], "time/update": 0.5}]
            rows += [{"step": rows[-1]["step"] + 1, "train/loss": 0.0, "time/update": 1.0}]
        rows += [{"step": 0, "time/validate": 9.0}, {"step": 4, "time/validate": 0.25}]
        chart = gantt(written(tmp_path / "run", rows, config=settings(data__reuse=2)))
        assert boxes(chart, "update")[1] == (1, 1, 17.0, 18.5)
        assert boxes(chart, "validate") == [(1, 1, 18.5, 18.75)]

    def test_resumed(self, tmp_path):
        """The clock restarts, even if it shows more than before, and restored rollouts have no time."""
        rows = clocked(metrics(20), overlaps=True)
        resumed = [dict(row) for row in rows[6:]]
        for row in resumed:
            row["time/clock"] += 100
            row["time/sampled_at"] += 100
        resumed[0]["time/sampled_at"] = resumed[1]["time/sampled_at"] = 0.0
        folder = write_run(tmp_path / "run", rows=rows[:8], period=4)
        write_metrics(folder, resumed, attempt=1)
        (run,) = read_runs([folder])
        assert run.attempt_starts == [0, 6]
        chart = gantt(run)
        assert (chart["first"], chart["last"], chart["num_rollouts"]) == (6, 19, 20)
        assert [first for first, *_ in boxes(chart, "generate")] == list(range(8, 20))
        for row in resumed:
            row["time/clock"] -= 110
        write_metrics(folder, resumed, attempt=1)
        run.attempt_starts, run.series = [], read_runs([folder])[0].series
        assert gantt(run)["first"] == 6, "the clock decreases"

    def test_runs_without_the_clock(self, tmp_path):
        assert gantt(written(tmp_path / "old", metrics(8))) is None
        rows = clocked(metrics(8), overlaps=True)
        del rows[3]["time/update"]
        assert gantt(written(tmp_path / "sparse", rows)) is None

    def test_the_middle_of_a_long_run(self):
        assert shown_rollouts(range(24), syncs=[0, 10, 20]) == range(24)
        assert shown_rollouts(range(200), syncs=list(range(200))) == range(94, 106)
        assert shown_rollouts(range(200), syncs=list(range(0, 200, 4))) == range(92, 104)
        assert shown_rollouts(range(200), syncs=list(range(0, 200, 50))) == range(100, 124)
        assert shown_rollouts(range(200), syncs=[0]) == range(94, 118)
        assert shown_rollouts(range(40, 70), syncs=[60]) == range(49, 70)

    def test_clock_has_no_chart_of_its_own(self):
        assert chart_sections(["time/clock", "time/sampled_at"]) == []


@pytest.mark.parametrize(
    ("changed", "overlaps"),
    [
        ({}, False),
        ({"data__overlap": True}, True),
        ({"data__overlap": True, "weight_sync__init_args__period": 1}, False),
        ({"data__overlap": True, "weight_sync__init_args__period": 1, "data__lead": 1}, True),
        ({"data__engine": {"class_path": "lgrpo.engines.VLLMServerEngine"}, "data__overlap": None}, True),
        ({"data__engine": {"class_path": "lgrpo.engines.VLLMServerEngine"}, "data__overlap": False}, False),
    ],
)
def test_whether_stages_overlap(tmp_path, changed, overlaps):
    (run,) = page_data(read_runs([write_run(tmp_path / "run", config=settings(**changed))]))["runs"]
    assert run["overlaps"] is overlaps


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
