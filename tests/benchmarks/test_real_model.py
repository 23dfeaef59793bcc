"""The study on a real model: its rows, its table, and which runs it trains."""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import pytest

from lgrpo.commands.engine_keeper import engine_settings
from lgrpo.commands.settings import settings_parser
from tests.benchmarks import real_model


def test_every_arm_with_rows_has_a_line():
    arms = {row["arm"] for row in real_model.read()}
    assert arms <= set(real_model.ARMS)
    arms -= real_model.GROUPS["lr"].keys()  # they are in a table of their own
    lines = real_model.table().splitlines()[2:]
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines] == [a for a in real_model.ARMS if a in arms]


def test_differences_are_paired_by_seed(tmp_path, monkeypatch):
    values = {("v=1", 0): 0.6, ("v=1", 1): 0.7, ("v=10", 0): 0.5, ("v=10", 1): 0.65, ("v=10", 2): 0.1}
    rows = [{"arm": a, "seed": s, "pass@1": [[30, x]], "pass@1_stderr": 0.02} for (a, s), x in values.items()]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(real_model, "ROWS", tmp_path / "rows.jsonl")
    assert real_model.difference(real_model.by_arm()["v=10"]) == "-0.075 ± 0.039"
    assert real_model.difference(real_model.by_arm()["v=1"]) == ""


def options(folder, **changes):
    """Return the options of the command."""
    given = {"folder": folder / "runs", "rows": folder / "rows.jsonl", "arms": ["v=1", "v=10"], "seeds": [0, 1]}
    given |= {"model": "model", "data": "data", "rollouts": 3, "set": [], "workers": 1, "seconds": math.inf}
    return argparse.Namespace(**given | changes)


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Replace training by a list of the runs that would be trained, and the published rows by two."""
    rows, runs = tmp_path / "published.jsonl", []
    rows.write_text('{"arm": "v=1", "seed": 0}\n{"arm": "v=10", "seed": 0, "error": "out of memory"}\n')

    def train(runner, options, arm, seed):
        runs.append((arm, seed))
        time.sleep(0.2)
        return {"arm": arm, "seed": seed, "error": "not trained"}

    monkeypatch.setattr(real_model, "ROWS", rows)
    monkeypatch.setattr(real_model, "train", train)
    return runs


def test_only_runs_without_a_row_are_trained(tmp_path, trained):
    (tmp_path / "rows.jsonl").write_text('{"arm": "v=10", "seed": 1}\n')
    real_model.launch(options(tmp_path))
    assert trained == [("v=10", 0), ("v=1", 1)]
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 3


def test_no_run_starts_after_the_given_seconds(tmp_path, trained):
    real_model.launch(options(tmp_path, seconds=0.1, arms=list(real_model.ARMS)))
    assert len(trained) == 1


def test_the_options_of_an_arm_come_after_the_shared_ones(tmp_path):
    given = real_model.arguments(
        options(tmp_path, set=["trainer.devices=1"]), "v=10, clip 0.6/2.0, lr 1e-5", 7, Path("run")
    )
    expected = ["weight_sync.period=10", "model.loss.init_args.clip_high=2.0", "model.optimizer.init_args.lr=1e-5"]
    for option in (*expected, "seed_everything=7", "data.task.init_args.num_held_out=200"):
        assert f"--{option}" in given
    assert given[-1] == "--trainer.devices=1"


def test_names_of_arms_are_unique():
    assert sum(map(len, real_model.GROUPS.values())) == len(real_model.ARMS)


@pytest.fixture(scope="module")
def parsed():
    """Return a function that parses the arguments of an arm as ``lgrpo fit`` does."""
    parser = settings_parser()
    parser.exit_on_error = False

    def parse(arm, folder):
        return parser.parse_args(real_model.arguments(options(folder), arm, 0, Path("run")))

    return parse


@pytest.mark.parametrize("arm", [*real_model.PERIODS, *real_model.AT_TEN])
def test_every_arm_is_a_valid_run(arm, parsed, tmp_path):
    """The settings are valid together, and the learning rate and the held-out problems can be set."""
    settings = parsed(arm, tmp_path)
    assert settings.weight_sync.init_args.period == int(arm.partition(",")[0][2:])
    assert settings.reference_refresh is None
    if arm in real_model.TUNED:
        settings = parsed(f"{arm}, lr 1e-5", tmp_path)
        assert settings.model.optimizer.init_args.lr == 1e-5
        assert settings.data.task.init_args.num_held_out == 200


def test_all_arms_share_an_engine(parsed, tmp_path):
    arms = ["v=1", "v=10, no clip", "v=10, RED-Weight", "v=10, M2PO, lr 1e-6", "v=2 at 1e-5"]
    assert len({engine_settings(parsed(arm, tmp_path)) for arm in arms}) == 1


def test_the_best_learning_rate_has_the_largest_area(tmp_path, monkeypatch):
    curves = {"1e-6": [0.4, 0.4, 0.5], "3e-6": [0.4, 0.6, 0.6], "1e-5": [0.4, 0.3, 0.7]}
    rows = [
        {"arm": f"v=10, lr {rate}", "seed": 0, "pass@1": [[10 * i, value] for i, value in enumerate(curve)]}
        for rate, curve in curves.items()
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(real_model, "ROWS", tmp_path / "rows.jsonl")
    assert real_model.area(rows[1]) == pytest.approx(0.55)
    assert real_model.best_rates() == {"v=10": "3e-6"}
    assert "| v=10 | 0.425 | 0.550 | 0.425 | 3e-6 |" in real_model.rate_table()
    assert real_model.table().count("\n") == 1, "held-out problems are not in the table of the test problems"


def test_verdicts_follow_from_the_rows():
    def arm(*values):
        return [{"seed": seed, "pass@1": [[30, value]]} for seed, value in enumerate(values)]

    arms = {"v=1": arm(0.6, 0.7, 0.8), "v=10": arm(0.5, 0.61, 0.69), "v=10, no clip": arm(0.55, 0.75, 0.8)}
    first, _, worse, same = real_model.verdicts(arms).splitlines()
    assert "for 2 comparisons" in first
    assert worse == "- v=10: -0.100 ± 0.036: **below v=1**."
    assert same.endswith("these seeds do not separate it from v=1.")
    assert real_model.verdicts({"v=10": arm(1, 1, 1)}).startswith("No verdict yet")
