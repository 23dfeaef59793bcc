"""``lgrpo report``: errors, and the data of its page; no browser needed."""

from __future__ import annotations

import pytest
from lightning.pytorch.loggers import CSVLogger

from lgrpo.callbacks import ImprovementMonitor
from lgrpo.cli import main
from lgrpo.commands.report import _with_interval
from lgrpo.report import read_series
from lgrpo.report.charts import chart_sections
from lgrpo.report.record import read_runs
from tests.helpers import fit
from tests.report.made_up import settings, write_run


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "runs" / "one")


def refused(capsys, *arguments):
    """Return the message of a command that fails."""
    with pytest.raises((SystemExit, ValueError)) as error:
        main(["report", *map(str, arguments)])
    return f"{error.value} {capsys.readouterr().err}"


def test_wrong_arguments(run, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert f"there is no run folder {tmp_path / 'nowhere'}" in refused(capsys, tmp_path / "nowhere")
    assert "empty contains no metrics: there is no" in refused(capsys, tmp_path / "empty")
    assert "is a file" in refused(capsys, run / "config.yaml")
    assert f"is not a run, but contains 1: name them ({run})" in refused(capsys, tmp_path / "runs")
    assert "are the same run: name each once" in refused(capsys, run, run / ".." / "one")
    assert "--watch is 0" in refused(capsys, run, "--watch", 0)
    assert "--completions is 0" in refused(capsys, run, "--completions", 0)
    assert "is a folder" in refused(capsys, run, "--out", tmp_path)
    assert "cannot be written" in refused(capsys, run, "--out", run / "config.yaml" / "page.html")
    assert "required: RUN" in refused(capsys)
    assert not (run / "report.html").exists()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--watch", "runs/a"], ["--watch", "10", "runs/a"]),
        (["--watch", "5", "runs/a"], ["--watch", "5", "runs/a"]),
        (["runs/a", "--watch"], ["runs/a", "--watch"]),
        (["--watch", "--out", "x.html", "runs/a"], ["--watch", "10", "--out", "x.html", "runs/a"]),
    ],
)
def test_watch_without_an_interval(given, expected):
    assert _with_interval(given) == expected


def test_path_of_the_page(run, tmp_path, capsys, monkeypatch):
    other = write_run(tmp_path / "two")
    monkeypatch.chdir(tmp_path)
    main(["report", str(run)])
    assert (run / "report.html").stat().st_size > 50_000
    main(["report", str(run), str(other)])
    assert (tmp_path / "report.html").exists()
    main(["report", str(run), "--out", "deep/page.html"])
    assert (tmp_path / "deep" / "page.html").exists()
    assert "The page is deep/page.html (0." in capsys.readouterr().out
    names = [path.name for folder in (run, tmp_path, tmp_path / "deep") for path in folder.iterdir()]
    assert not [name for name in names if name.startswith(".")], "no temporary file is left"


def test_names_are_as_short_as_possible(tmp_path):
    paths = [write_run(tmp_path / "a" / "run"), write_run(tmp_path / "b" / "run"), write_run(tmp_path / "b" / "x")]
    assert [record.name for record in read_runs(paths)] == ["a/run", "b/run", "b/x"]
    assert [record.name for record in read_runs(paths[1:])] == ["run", "x"]


def test_the_last_attempt_overrides_earlier_ones(run):
    """Settings and metrics are those of the last attempt; changed settings are listed with their old values."""
    import yaml

    (run / "config-2.yaml").write_text(yaml.safe_dump(settings(data__reuse=3)))
    later = run / "metrics" / "version_1" / "metrics.csv"
    later.parent.mkdir()
    later.write_text("step,train/loss\n98,5.0\n99,6.0\n100,7.0\n")
    (record,) = read_runs([run])
    assert (record.settings["data.reuse"], record.changed) == (3, {"data.reuse": 1})
    assert [value for _, value in record.series["train/loss"][-3:]] == [5, 6, 7]
    assert record.num_steps == 101


def test_evaluations_of_checkpoints_are_a_curve(run):
    folder = run / "evaluations"
    folder.mkdir()
    (folder / "checkpoints-test.json").write_text('{"50": {"test/pass@1": 0.5}, "9": {"test/pass@1": 0.25}}')
    (folder / "checkpoints-validate.json").write_text('{"50": {"val/pass@1": 0.9}, "9"')
    (record,) = read_runs([run])
    assert record.series["test/pass@1"] == [(9, 0.25), (50, 0.5)]
    assert (50, 0.9) not in record.series["val/pass@1"]


def test_every_metric_is_in_one_chart():
    names = ["rollout/reward", "val/pass@1", "val/pass@1_stderr", "val/aime/pass@4", "train/lag", "train/new", "alone"]
    names += ["monitor/gain", "monitor/gain_stderr", "reward/format", "reward/format_std", "mine/deep/x"]
    shown = [
        (section["title"], name)
        for section in chart_sections(names)
        for chart in section["charts"]
        for name in chart["lines"]
    ]
    assert sorted(name for _, name in shown) == sorted(n for n in names if not n.endswith("_stderr"))
    assert {("Improvement", "monitor/gain"), ("Mine/deep", "mine/deep/x"), ("Other", "alone")} <= set(shown)
    assert ("Learning", "val/aime/pass@4") in shown


def test_the_monitor_has_seven_charts(tmp_path):
    """With the names that a run really logs: a chart of other names would never be drawn."""
    logger = CSVLogger(tmp_path, name="metrics")
    monitor = ImprovementMonitor(every=1, num_held_out=4)
    fit(v=2, rollouts=6, callbacks=[monitor], trainer={"logger": logger, "log_every_n_steps": 1})
    names = [name for name in read_series(tmp_path) if name.startswith(("monitor/", "calibration/"))]
    assert len(names) > 40
    (section,) = chart_sections(names)
    assert section["title"] == "Improvement"
    drawn = {chart["title"]: len(chart["lines"]) for chart in section["charts"]}
    assert list(drawn.values()) == [2, 2, 3, 3, 2, 1, 5], drawn
