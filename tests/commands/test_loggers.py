"""``--log``: loggers by name, with the real packages and without a network. Skipped where a package is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lgrpo.callbacks import rollout_log
from lgrpo.cli import main
from lgrpo.commands import loggers
from lgrpo.report import read_series

TINY = f"--config={Path(__file__).parents[2] / 'configs' / 'tiny.yaml'}"
QUICK = ["--trainer.max_epochs=1", "--data.evaluation.num_problems=4", "--trainer.enable_progress_bar=false"]
QUICK += ["--trainer.callbacks.every=1", "--checkpoint.every_n_train_steps=2", "--checkpoint.save_top_k=-1"]


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)


def fit(run, *options, rollouts=4):
    main(["fit", TINY, *QUICK, f"--run={run}", f"--data.num_rollouts={rollouts}", *options])


def values(run):
    return {name: points for name, points in read_series(run).items() if not name.startswith(("time/", "memory/"))}


def test_csv_alone(tmp_path):
    fit(tmp_path / "run", "--log", "csv", rollouts=1)
    assert (tmp_path / "run" / "metrics").exists()
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(loggers, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="--log wandb requires a package: pip install wandb"):
        fit(tmp_path / "run", "--log", "wandb")
    assert not (tmp_path / "run").exists()


def test_two_ways_to_choose(tmp_path):
    logger = "--trainer.logger=lightning.pytorch.loggers.CSVLogger"
    with pytest.raises(SystemExit, match=r"--log and trainer\.logger both choose loggers"):
        fit(tmp_path / "run", "--log", "csv", logger, f"--trainer.logger.save_dir={tmp_path}")


@pytest.mark.parametrize("command", ["validate", "test"])
def test_an_evaluation_refuses_it(command):
    with pytest.raises(SystemExit, match=f"--log is an option of lgrpo fit; lgrpo {command} prints its metrics"):
        main([command, TINY, "--log", "csv"])


@pytest.mark.slow("trains three times")
def test_mlflow(tmp_path, monkeypatch):
    """A resumed run continues in its MLflow run, with the values of a run that was not interrupted."""
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    run, whole = tmp_path / "run", tmp_path / "whole"
    monkeypatch.setattr(rollout_log, "PER_ARTIFACT", 2)
    fit(whole, "--log", "csv")
    fit(run, "--log", "mlflow")
    checkpoint = run / "checkpoints" / "step=2.ckpt"
    fit(run, "--log", "mlflow", f"--ckpt_path={checkpoint}")
    assert values(run) == values(whole)
    client = mlflow.MlflowClient(f"sqlite:///{run}/mlflow.db")
    run_id = (run / "mlflow_id.txt").read_text().strip()
    assert [found.info.run_id for found in client.search_runs(["1"])] == [run_id]
    assert {point.step for point in client.get_metric_history(run_id, "rollout/reward")} == {0, 1, 2, 3}
    assert client.get_run(run_id).data.metrics["val/pass_at_1"] == values(run)["val/pass@1"][-1][1]
    assert client.get_run(run_id).data.params["data.group_size"] == "8"
    tables = {path.name: json.loads(path.read_text()) for path in (run / "mlflow_artifacts").rglob("completions/*")}
    assert set(tables) == {"from_rollout_0.json", "from_rollout_2.json"}
    assert all("completion" in table["columns"] for table in tables.values())
    assert [row[0] for row in tables["from_rollout_0.json"]["data"]] == [0] * 8 + [1] * 8
    assert not (tmp_path / "mlruns").exists()


@pytest.mark.slow("trains three times")
def test_wandb(tmp_path):
    wandb = pytest.importorskip("wandb")
    run, whole = tmp_path / "run", tmp_path / "whole"
    fit(whole, "--log", "csv")
    fit(run, "--log", "wandb", "tensorboard")
    wandb.finish()
    fit(run, "--log", "wandb", f"--ckpt_path={run / 'checkpoints' / 'step=2.ckpt'}")
    wandb.finish()
    assert values(run) == values(whole)
    run_id = (run / "wandb_id.txt").read_text().strip()
    first, second = sorted((run / "wandb").glob("offline-run-*"))
    assert {folder.name.rpartition("-")[2] for folder in (first, second)} == {run_id}
    tables = [json.loads(path.read_text()) for path in first.rglob("*.table.json")]
    assert len(tables) == 4, "one for each rollout"
    assert all("completion" in table["columns"] and len(table["data"]) == 8 for table in tables)
    assert any((run / "tensorboard").rglob("events*"))
