"""The study on a real model: its rows, its table, and which runs it trains."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tests.benchmarks import real_model


def test_every_arm_with_rows_has_a_line():
    arms = {row["arm"] for row in real_model.read()}
    assert arms <= set(real_model.ARMS)
    lines = real_model.table().splitlines()[2:]
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines] == [a for a in real_model.ARMS if a in arms]


def test_differences_are_paired_by_seed(tmp_path, monkeypatch):
    values = {("v=1", 0): 0.6, ("v=1", 1): 0.7, ("v=10", 0): 0.5, ("v=10", 1): 0.65, ("v=10", 2): 0.1}
    rows = [{"arm": a, "seed": s, "pass@1": [[30, x]], "pass@1_stderr": 0.02} for (a, s), x in values.items()]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(real_model, "ROWS", tmp_path / "rows.jsonl")
    assert real_model.difference(real_model.by_arm()["v=10"]) == "-0.075 ± 0.039"
    assert real_model.difference(real_model.by_arm()["v=1"]) == ""


def test_only_runs_without_a_row_are_trained(tmp_path, monkeypatch):
    rows, trained = tmp_path / "rows.jsonl", []
    rows.write_text('{"arm": "v=1", "seed": 0}\n{"arm": "v=10", "seed": 0, "error": "out of memory"}\n')

    def train(options, arm, seed):
        trained.append((arm, seed))
        return {"arm": arm, "seed": seed, "error": "not trained"}

    monkeypatch.setattr(real_model, "ROWS", rows)
    monkeypatch.setattr(real_model, "train", train)
    options = argparse.Namespace(folder=tmp_path / "runs", arms=["v=1", "v=10"], seeds=[0, 1], workers=1)
    real_model.launch(options)
    assert trained == [("v=10", 0), ("v=1", 1), ("v=10", 1)]
    assert len(rows.read_text().splitlines()) == 5


def test_the_options_of_an_arm_come_after_the_shared_ones():
    options = argparse.Namespace(model="model", data="data", rollouts=3, set=["trainer.devices=1"])
    command = real_model.command(options, "v=10, clip 0.6/2.0", 7, Path("run"))
    for option in ("--weight_sync.period=10", "--model.loss.init_args.clip_high=2.0", "--seed_everything=7"):
        assert option in command
    assert command[-1] == "--trainer.devices=1"
