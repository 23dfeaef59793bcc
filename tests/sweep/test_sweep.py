"""``lgrpo sweep``: errors before anything runs, the runs, and their results."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lgrpo.cli import main
from lgrpo.commands.settings import settings_parser
from lgrpo.report import mean_interval, metric_names, paired_difference
from lgrpo.report.intervals import t_quantile
from lgrpo.sweep import SweepError, check_grid, read_grid

ROOT = Path(__file__).parents[2]
TINY = str(ROOT / "configs" / "tiny.yaml")
QUICK = {
    "data.num_rollouts": 2,
    "data.num_prompts": 4,
    "trainer.max_epochs": 2,
    "data.evaluation.num_problems": 16,
    "data.evaluation.num_samples": 2,
}


def grid_file(folder, **keys):
    path = folder / "grid.yaml"
    path.write_text(yaml.safe_dump({"configs": [TINY], "settings": QUICK} | keys, sort_keys=False))
    return path


# Statistics


def test_t_quantiles_of_printed_tables():
    table = {(0.95, 1): 12.7062, (0.95, 2): 4.3027, (0.95, 3): 3.1824, (0.95, 4): 2.7764, (0.95, 29): 2.0452}
    table |= {(0.99, 4): 4.6041, (0.99, 9): 3.2498, (0.9, 5): 2.0150, (0.8, 10): 1.3722, (0.95, 1000): 1.9623}
    for (confidence, degrees), expected in table.items():
        assert t_quantile(confidence, degrees) == pytest.approx(expected, abs=1e-4)


def test_intervals_of_two_values_and_of_one():
    assert mean_interval([2.0, 4.0]).half_width == pytest.approx(12.7062, abs=1e-3)  # the standard error is 1
    alone = mean_interval([0.3])
    assert math.isnan(alone.half_width)
    assert str(alone) == "0.3000"
    with pytest.raises(ValueError, match="at least one value"):
        mean_interval([])
    with pytest.raises(ValueError, match="confidence is 1"):
        mean_interval([1.0, 2.0], 1)


@given(st.dictionaries(st.integers(0, 9), st.floats(-5, 5), min_size=3), st.floats(-1, 1))
def test_pairing_cancels_the_effect_of_a_seed(values, gain):
    noisy = {seed: value + 100 * seed for seed, value in values.items()}
    difference = paired_difference({seed: value + gain for seed, value in noisy.items()}, noisy)
    assert difference.mean == pytest.approx(gain, abs=1e-9)
    assert difference.half_width == pytest.approx(0, abs=1e-9)
    assert paired_difference(noisy, {99: 1.0}) is None


# Errors


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"gird": {}}, "a grid has no key 'gird': did you mean grid"),
        ({}, "varies nothing"),
        ({"grid": [1, 2]}, r"grid is \[1, 2\]; it must map the names of settings"),
        ({"grid": {"data.reuse": 2}}, r"grid\.data\.reuse is 2; it must be a list of values"),
        ({"grid": {"data.reuse": [1, 1]}}, "has a value twice"),
        ({"grid": {"seed_everything": [1, 2]}}, "which a sweep sets for each of its runs"),
        ({"grid": {"data.reuse": [1]}, "seeds": []}, r"seeds is \[\]"),
        ({"grid": {"data.reuse": [1]}, "seeds": [1, 1]}, "seeds has a value twice"),
        ({"grid": {"data.reuse": [1]}, "seeds": "three"}, "seeds is 'three'"),
        ({"grid": {"data.reuse": [1]}, "baseline": "data.reuse=2"}, "is not an arm: did you mean data.reuse=1"),
        ({"grid": {"data.reuse": [1]}, "value": "best"}, "value is 'best'; it must be one of last, max, min, mean"),
        ({"grid": {"data.reuse": [1]}, "confidence": 95}, "confidence is 95"),
        ({"grid": {"data.reuse": [1]}, "configs": ["nowhere.yaml"]}, "there is no config .*nowhere.yaml"),
        ({"arms": ["a", "b"]}, r"arms is \['a', 'b'\]; it must map a name to configs and settings"),
        ({"arms": {"a": {"data.reuse": 2}}}, "the arm a has 'data.reuse'; an arm has configs and settings"),
    ],
)
def test_wrong_grids(tmp_path, keys, message):
    with pytest.raises(SweepError, match=message):
        read_grid(grid_file(tmp_path, **keys))


@pytest.mark.parametrize("text", ["- 1\n- 2\n", "just words", "a: [1", ""])
def test_files_that_are_not_a_grid(tmp_path, text):
    path = tmp_path / "grid.yaml"
    path.write_text(text)
    with pytest.raises(SweepError, match=r"is not a grid|is not YAML"):
        read_grid(path)
    with pytest.raises(SweepError, match="cannot be read"):
        read_grid(tmp_path / "nowhere.yaml")


@pytest.fixture(scope="module")
def parser():
    return settings_parser()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"grid": {"weight_sync.perod": [1]}},
            r"there is no setting weight_sync\.perod: did you mean weight_sync\.period",
        ),
        ({"grid": {"data.groupsize": [2]}}, r"there is no setting data\.groupsize: did you mean data\.group_size"),
        ({"grid": {"model.loss.clip_hi": [0.2]}}, r"model\.loss\.clip_hi: did you mean model\.loss\.clip_high"),
        ({"grid": {"weight_sync.period": ["often"]}}, r"the setting weight_sync\.period='often' is refused"),
        ({"grid": {"data.reuse": [1]}, "metrics": ["val/pas@1"]}, r"logs a metric val/pas@1: did you mean val/pass@1"),
        ({"grid": {"data.reuse": [1]}, "metrics": ["val/pass@4"]}, r"logs a metric val/pass@4: did you mean val/pass@"),
        ({"grid": {"data.reuse": [1]}, "metrics": ["xyzzy"]}, r"metrics\.md lists them"),
    ],
)
def test_the_message_names_the_nearest_known_name(tmp_path, parser, keys, message):
    with pytest.raises(SweepError, match=message):
        check_grid(read_grid(grid_file(tmp_path, **keys)), parser)


def test_known_names(tmp_path, parser):
    loss = {"class_path": "lgrpo.losses.ClippedLoss", "init_args": {"clip_low": 0.1}}
    arms = {
        "plain": None,
        "red": {"configs": [str(ROOT / "configs" / "algorithms" / "red_drop.yaml")]},
        "clipped": {"settings": {"model.loss": loss}},
    }
    metrics = ["train/loss", "val/pass@2", "reward/brevity"]
    path = grid_file(tmp_path, arms=arms, grid={"data.reuse": [1, 2]}, metrics=metrics, own_metrics=["mine/thing"])
    grid = read_grid(path)
    check_grid(grid, parser)
    assert [arm.name for arm in grid.arms] == [
        f"{name}, data.reuse={i}" for name in ("plain", "red", "clipped") for i in (1, 2)
    ]
    assert len({arm.folder for arm in grid.arms}) == 6
    assert grid.baseline == "plain, data.reuse=1"


def test_every_metric_of_the_page_is_known():
    """A metric added to the page must be added to lgrpo/report/names.py too."""
    page = (ROOT / "tutorials" / "pages" / "metrics.md").read_text(encoding="utf-8")
    explained = {line.split("`")[1] for line in page.splitlines() if line.startswith("| `")}
    known = metric_names({"": 8})
    assert explained <= {*known, *(re.sub(r"@\d+", "@k", name) for name in known)}


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "sweeps").glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_grid(path, parser):
    check_grid(read_grid(path), parser)


# Runs

MINE = """
import os
from lgrpo import RolloutCallback

class Fragile(RolloutCallback):
    def on_rollout_start(self, trainer, pl_module, rollout):
        if rollout == 2 and os.environ["BREAKS"] == "yes" and trainer.datamodule.seed == 1:
            raise OSError("the disk is full")
"""


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Run two equal arms, one of which fails with one seed; then run the same command again."""
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "sweeps_own.py").write_text(MINE)
    fragile = {"trainer.callbacks+": ["sweeps_own.Fragile"]}
    arms = {"straight": {}, "fragile": {"settings": fragile}}
    path = grid_file(folder, arms=arms, seeds=[0, 1], metrics=["val/pass@1", "train/loss"])
    done = [sweep_in(folder, path, breaks) for breaks in ("yes", "no")]
    return folder, *done


def sweep_in(folder, path, breaks):
    """Return the output of the command and its exit message."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as output:
        patch.setenv("BREAKS", breaks)
        patch.setenv("PYTHONPATH", f"{ROOT}:{folder}")
        patch.syspath_prepend(folder)
        try:
            main(["sweep", str(path), "--jobs=2", f"--out={folder / 'out'}"])
        except SystemExit as end:
            return output.getvalue(), str(end)
        return output.getvalue(), ""


@pytest.mark.slow("starts several runs")
def test_a_failed_run_does_not_stop_the_others(swept):
    folder, (output, end), _ = swept
    assert re.search(r"fragile, seed 1: FAILED with status 1, see .*fragile/seed-1\.log", output)
    assert "the disk is full" in (folder / "out" / "fragile" / "seed-1.log").read_text()
    assert "1 of 4 runs failed" in end
    assert output.count("finished in") == 3
    assert re.search(r"\| fragile +\| 1 +\| ", output)


def test_the_same_command_resumes(swept):
    """Finished runs are skipped; the failed one resumes from its checkpoint and ends with the same results."""
    folder, _, (output, end) = swept
    assert end == "", output
    assert output.count("finished already") == 3
    assert "fragile, seed 1: resumed and finished" in output
    with (folder / "out" / "runs.csv").open() as file:
        rows = {(row["arm"], row["seed"]): row for row in csv.DictReader(file)}
    assert len(rows) == 4
    for seed in "01":
        for metric in ("val/pass@1", "train/loss"):
            assert rows["straight", seed][metric] == rows["fragile", seed][metric]
    assert rows["straight", "0"]["train/loss"] != rows["straight", "1"]["train/loss"]
    assert re.search(r"\| fragile +\| 2 +\| .* \| 0\.0000 ± 0\.0000 +\|", output)
    assert "baseline" in (folder / "out" / "table.md").read_text()
    assert (folder / "out" / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_a_changed_grid_is_refused(swept, tmp_path, capsys):
    folder, _, _ = swept
    path = grid_file(tmp_path, arms={"straight": {"settings": {"data.reuse": 2}}}, seeds=[0, 1])
    with pytest.raises(SystemExit, match="was run with other settings than the grid has now"):
        main(["sweep", str(path), f"--out={folder / 'out'}"])


def test_a_dry_run_runs_nothing(swept, tmp_path, capsys):
    folder, _, _ = swept
    path = grid_file(tmp_path, arms={"straight": {}}, grid={"data.reuse": [1, 2]}, seeds=1)
    main(["sweep", str(path), f"--out={tmp_path / 'out'}", "--dry-run"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("new       lgrpo fit --config=") for line in lines)
    assert not (tmp_path / "out").exists()
    path = grid_file(tmp_path, arms={"straight": {}}, seeds=[0, 1])
    main(["sweep", str(path), f"--out={folder / 'out'}", "--dry-run"])
    assert all(line.startswith("finished") for line in capsys.readouterr().out.splitlines())


def test_nothing_runs_if_a_name_is_wrong(tmp_path):
    path = grid_file(tmp_path, grid={"data.reuse": [1]}, metrics=["val/pass@one"])
    with pytest.raises(
        SystemExit, match=r"lgrpo: no run of data\.reuse=1 logs a metric val/pass@one: did you mean val/"
    ):
        main(["sweep", str(path), f"--out={tmp_path / 'out'}"])
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="--jobs is 0"):
        main(["sweep", str(path), "--jobs=0"])


def interrupted(process, run):
    """Interrupt a sweep when a run of it has trained for some steps; return its output and its errors."""
    begun = run / "metrics" / "version_0" / "metrics.csv"
    deadline = time.monotonic() + 300
    while not (begun.exists() and begun.read_text().count("\n") > 3):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    return process.communicate(timeout=120)


@pytest.mark.slow("starts several runs")
def test_runs_write_checkpoints_on_ctrl_c(tmp_path):
    long = {"arms": {"long": {"settings": {"data.num_rollouts": 5000}}}, "seeds": [3]}
    path = grid_file(tmp_path, **long)
    out = tmp_path / "out"
    command = [sys.executable, "-m", "lgrpo.cli", "sweep", str(path), f"--out={out}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    output, errors = interrupted(process, out / "long" / "seed-3")
    assert process.returncode == 1
    assert "long, seed 3: stopped" in output
    assert f"the same command resumes it: lgrpo sweep {path}" in errors
    assert list((out / "long" / "seed-3").glob("checkpoints/last*.ckpt"))
    assert not json.loads((out / "long" / "seed-3.json").read_text())["finished"]
