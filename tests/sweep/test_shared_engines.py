"""``lgrpo sweep --share-engines``: a run in a process that has done others equals the run in its own process."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from lgrpo.cli import main
from lgrpo.commands.engine_keeper import engine_settings
from lgrpo.commands.settings import parse_settings
from lgrpo.sweep.workers import SeparateProcesses, SharedWorkers
from tests.sweep.test_sweep import interrupted

ROOT = Path(__file__).parents[2]
CONFIG = f"--config={ROOT / 'configs' / 'tiny.yaml'}"
QUICK = [
    "--data.num_rollouts=2",
    "--data.num_prompts=4",
    "--trainer.max_epochs=2",
    "--data.evaluation.num_problems=16",
    "--data.evaluation.num_samples=2",
    "--weight_sync.period=2",
    "--log=csv",
]
POOL = [
    "--data.engine=lgrpo.engines.EnginePool",
    "--data.engine.engine=lgrpo.engines.TransformersEngine",
    "--data.engine.num_processes=2",
]
VLLM = [
    "--data.engine=lgrpo.engines.VLLMEngine",
    "--data.engine.max_model_len=48",
    '--data.engine.options={"block_size": 32}',
    f"--data.task.template.prompt={{question}}{'>' * 32}",  # longer than a block of the prefix cache
    "--data.shuffle=false",  # both runs begin with the same prompts
]
OTHER = ["--seed_everything=5", "--data.reuse=2", "--weight_sync.period=1", "--model.optimizer.init_args.lr=1e-3"]
OTHER += ["--model.loss.clip_high=0.4"]
KEPT, CLOSED = "The engine of the previous run continues", "The engine of the previous run was closed"


def own(name):
    return f"--trainer.callbacks+=tests.sweep.shared_own.{name}"


def environment():
    return os.environ | {"PYTHONPATH": str(ROOT)}


def run_in_turn(folder, runner, runs):
    """Do all runs and return their exit statuses by name."""
    statuses = {}
    for name, arguments in runs.items():
        given = [CONFIG, *QUICK, own("Surroundings"), *arguments, f"--run={folder / name}"]
        statuses[name] = runner.run(given, folder / f"{name}.log")
    runner.close()
    return statuses


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Do runs in one worker, and two of them alone; return the folder of all."""
    folder = tmp_path_factory.mktemp("shared")
    in_turn = {
        "first": [*OTHER, own("Careless")],
        "second": [],
        "pool-first": [*POOL, *OTHER, own("Careless")],
        "pool-second": POOL,
        "pool-third": [*POOL, "--seed_everything=7"],
        "failed": [own("Fragile")],
        "after": [],
    }
    statuses = run_in_turn(folder, SharedWorkers(1, environment()), in_turn)
    assert {name: status for name, status in statuses.items() if status} == {"failed": 1}, statuses
    for name, arguments in {"alone": [], "pool-alone": POOL}.items():
        assert run_in_turn(folder, SeparateProcesses(environment()), {name: arguments}) == {name: 0}
    return folder


def metrics(run):
    """Return all metrics of a run except times and memory."""
    with next((run / "metrics").rglob("metrics.csv")).open() as file:
        rows = list(csv.DictReader(file))
    changing = re.compile(r"time/|memory/|.*seconds|.*per_second")
    return [{name: value for name, value in row.items() if not changing.match(name)} for row in rows]


def syncs(run):
    lines = [json.loads(line) for line in (run / "syncs.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def surroundings(run):
    found = json.loads((run / "surroundings.json").read_text())
    found["arguments"] = [a for a in found["arguments"] if not a.startswith("--run=")]
    return found


def checkpoint(run):
    return torch.load(next(run.glob("checkpoints/last*.ckpt")), weights_only=True)


def tensors(part, path=""):
    """Yield all tensors in nested containers with their paths."""
    if isinstance(part, torch.Tensor):
        yield path, part
    elif isinstance(part, dict | list | tuple):
        items = part.items() if isinstance(part, dict) else enumerate(part)
        for key, value in items:
            yield from tensors(value, f"{path}/{key}")


@pytest.mark.slow("starts several runs")
@pytest.mark.parametrize(("name", "alone"), [("second", "alone"), ("after", "alone"), ("pool-second", "pool-alone")])
def test_a_later_run_equals_the_run_alone(finished, name, alone):
    """Weights, optimizer, rollouts and the engine's weights are equal bit for bit; so are metrics and completions."""
    run, expected = finished / name, finished / alone
    own, other = dict(tensors(checkpoint(run))), dict(tensors(checkpoint(expected)))
    assert own.keys() == other.keys()
    assert len(own) > 20
    for path, tensor in own.items():
        assert torch.equal(tensor, other[path]), path
    assert metrics(run) == metrics(expected)
    assert syncs(run) == syncs(expected)
    assert (run / "completions.jsonl").read_text() == (expected / "completions.jsonl").read_text()


@pytest.mark.slow("starts several runs")
@pytest.mark.parametrize(("name", "alone"), [("second", "alone"), ("after", "alone"), ("pool-second", "pool-alone")])
def test_a_later_run_finds_the_process_as_if_new(finished, name, alone):
    """Random states, environment, signal handlers, torch's settings; and no policy of an earlier run is in memory."""
    assert surroundings(finished / name) == surroundings(finished / alone)


@pytest.mark.slow("starts several runs")
def test_engines_are_started_once_for_equal_settings(finished):
    logs = {path.stem: path.read_text() for path in finished.glob("*.log")}
    assert {name for name, log in logs.items() if KEPT in log} == {"second", "pool-second", "pool-third"}
    assert {name for name, log in logs.items() if CLOSED in log} == {"pool-first", "failed"}
    workers = {name: (finished / name / "workers.json").read_text() for name in ("pool-first", "pool-second")}
    assert len(set(workers.values())) == 1
    assert workers["pool-first"] != (finished / "pool-alone" / "workers.json").read_text()


@pytest.mark.slow("starts several runs")
def test_each_run_has_its_own_log(finished):
    for name in ("second", "pool-second", "after", "alone"):
        log = (finished / f"{name}.log").read_text()
        assert log.count("UserWarning: shown once per run") == 1
        assert log.count("The run is in") == 1
        assert f"The run is in {finished / name}/" in log
    assert "the disk is full" in (finished / "failed.log").read_text()
    assert "the disk is full" not in (finished / "after.log").read_text()


@pytest.mark.slow("starts vLLM")
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")
def test_vllm_serves_a_second_run(tmp_path):
    """The completions are equal; the weights nearly, because sums of floats may be taken in another order."""
    runs = {"first": [*VLLM, *OTHER], "second": VLLM}
    assert run_in_turn(tmp_path, SharedWorkers(1, environment()), runs) == {"first": 0, "second": 0}
    assert run_in_turn(tmp_path, SeparateProcesses(environment()), {"alone": VLLM}) == {"alone": 0}
    assert KEPT in (tmp_path / "second.log").read_text()
    texts = [(tmp_path / name / "completions.jsonl").read_text() for name in ("second", "alone")]
    rows = [[json.loads(line) for line in text.splitlines()] for text in texts]
    assert [row["completion"] for row in rows[0]] == [row["completion"] for row in rows[1]]
    own, other = (checkpoint(tmp_path / name)["state_dict"] for name in ("second", "alone"))
    for name, tensor in own.items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-4, atol=1e-5)


def test_settings_that_an_engine_depends_on():
    def settings(*arguments):
        return engine_settings(parse_settings([CONFIG, *arguments]))

    same = settings()
    for arguments in (["--seed_everything=3"], OTHER, ["--data.num_prompts=3"], ["--model.policy.chunk_size=8"]):
        assert settings(*arguments) == same
    for arguments in (
        POOL,
        ["--data.engine.max_sequences=3"],
        ["--model.policy.dtype=bfloat16"],
        ["--model.policy.config.hidden_size=32"],
        ["--model.policy.characters=0123456789> "],
        ["--trainer.precision=bf16-mixed"],
    ):
        assert settings(*arguments) != same
    assert settings(*POOL, *OTHER) == settings(*POOL)


@pytest.mark.slow("starts several runs")
def test_two_jobs_have_an_engine_each(tmp_path, capsys, monkeypatch):
    settings = dict(setting.removeprefix("--").split("=") for setting in QUICK)
    grid = {"configs": [CONFIG.removeprefix("--config=")], "settings": settings, "grid": {"data.reuse": [1, 2]}}
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(grid | {"seeds": [0, 1]}))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    main(["sweep", str(tmp_path / "grid.yaml"), f"--out={tmp_path / 'out'}", "--jobs=2", "--share-engines"])
    assert capsys.readouterr().out.count("finished in") == 4
    logs = [path.read_text() for path in (tmp_path / "out").rglob("seed-*.log")]
    assert sum(KEPT in log for log in logs) == 2


@pytest.mark.slow("starts several runs")
def test_ctrl_c_and_the_same_command_again(tmp_path):
    """The second run of a worker is interrupted. Resumed in a new one, it ends as the first, which has its settings."""
    grid = {
        "configs": [CONFIG.removeprefix("--config=")],
        "settings": dict(setting.removeprefix("--").split("=") for setting in QUICK) | {"data.num_rollouts": 10},
        "arms": {"straight": {}, "slow": {"settings": {"trainer.callbacks+": ["tests.sweep.shared_own.Slow"]}}},
        "seeds": [3],
        "metrics": ["val/pass@1", "train/loss"],
    }
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(grid, sort_keys=False))
    out = tmp_path / "out"
    command = [sys.executable, "-m", "lgrpo.cli", "sweep", "grid.yaml", "--out=out", "--share-engines"]
    slow = environment() | {"SLOW": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path, env=slow, text=True
    )
    output, errors = interrupted(process, out / "slow" / "seed-3")
    assert process.returncode == 1
    assert "straight, seed 3: finished" in output
    assert "slow, seed 3: stopped" in output
    assert "the same command resumes it" in errors
    assert list((out / "slow" / "seed-3").glob("checkpoints/last*.ckpt"))
    assert KEPT in (out / "slow" / "seed-3.log").read_text()
    again = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment(), timeout=300)
    assert again.returncode == 0, again
    assert "straight, seed 3: finished already" in again.stdout
    assert "slow, seed 3: resumed and finished" in again.stdout
    states = [checkpoint(out / arm / "seed-3")["state_dict"] for arm in ("straight", "slow")]
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
