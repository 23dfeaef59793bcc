"""The study on a real model: its rows, its table, and which runs it trains."""

from __future__ import annotations

import argparse
import json
import math
import threading
import time
from pathlib import Path

import pytest

from lgrpo.commands.engine_keeper import engine_settings
from lgrpo.commands.settings import settings_parser
from lgrpo.sweep.workers import Runner
from tests.benchmarks import real_model
from tests.benchmarks import real_model_report as report


def test_every_arm_with_rows_has_a_line():
    arms = {row["arm"] for row in real_model.read()}
    assert arms <= set(real_model.ARMS)
    arms &= report.main_arms().keys()  # others have tables of their own
    lines = report.table(report.main_arms()).splitlines()[2:]
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines] == [a for a in real_model.ARMS if a in arms]


def test_differences_are_paired_by_seed(tmp_path, monkeypatch):
    values = {("v=1", 0): 0.6, ("v=1", 1): 0.7, ("v=10", 0): 0.5, ("v=10", 1): 0.65, ("v=10", 2): 0.1}
    rows = [{"arm": a, "seed": s, "pass@1": [[30, x]], "pass@1_stderr": 0.02} for (a, s), x in values.items()]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(real_model, "ROWS", tmp_path / "rows.jsonl")
    found = report.by_arm()
    assert report.difference(found["v=10"], found["v=1"]) == "-0.075 ± 0.039"
    assert report.difference(found["v=1"], found["v=1"]) == ""


def test_curves_have_a_column_for_each_metric_that_some_arm_has():
    shared = {"workers": 1, "seed": 0, "update_seconds": [2.0, 2.0]}
    plain = shared | {"pass@1": [[0, 0.4], [2, 0.6]], "generate_seconds": [1.0, 1.0]}
    tool = shared | {"pass@1": [[0, 0.3], [2, 0.5]], "generate_seconds": [4.0, 6.0]}
    tool |= {"turns": [1.92, 1.04], "environment_seconds": [1.5, 0.5], "other_load": "a league"}
    title, _, first, second = report.curves({"v=1": [plain], "tool": [tool, tool | {"seed": 1}]}).splitlines()
    assert title == "| seeds 0 | step 0 | step 2 | turns | tools | s/step beside other processes |"
    assert first == "| v=1 | 0.400 | 0.600 |  |  |  |"
    assert second == "| tool | 0.300 | 0.500 | 1.9 to 1 | 20% of sampling | 7.0 |"


def options(folder, **changes):
    """Return the options of the command."""
    given = {"folder": folder / "runs", "rows": folder / "rows.jsonl", "arms": ["v=1", "v=10"], "seeds": [0, 1]}
    given |= {"model": "model", "data": "data", "rollouts": 3, "set": [], "workers": 1, "seconds": math.inf}
    given |= {"math500": None, "teacher": None, "deadline": math.inf}
    return argparse.Namespace(**given | changes)


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Replace training by a list of the runs that would be trained, and the published rows by two."""
    rows, runs = tmp_path / "published.jsonl", []
    before = '{"arm": "before training", "seed": 0}\n'
    rows.write_text(before + '{"arm": "v=1", "seed": 0}\n{"arm": "v=10", "seed": 0, "error": "out of memory"}\n')

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


def test_the_model_before_training_is_evaluated_first_and_once(tmp_path, trained):
    real_model.launch(options(tmp_path, arms=["v=2"], math500="math500"))
    assert trained == [(real_model.INITIAL, 0), ("v=2", 0), ("v=2", 1)], "its row has no MATH-500"
    row = json.dumps({"arm": real_model.INITIAL, "seed": 0, "math500": {}})
    (tmp_path / "rows.jsonl").write_text(row + "\n")
    trained.clear()
    real_model.launch(options(tmp_path, arms=["v=2"], math500="math500"))
    assert trained == [("v=2", 0), ("v=2", 1)]


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

    def parse(arm, folder, **changes):
        return parser.parse_args(real_model.arguments(options(folder, **changes), arm, 0, Path("run")))

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
    assert report.area(rows[1]) == pytest.approx(0.55)
    assert report.best_rates() == {"v=10": "3e-6"}
    assert "| v=10 | 0.425 | 0.550 | 0.425 | 3e-6 |" in report.rate_table()
    assert not report.main_arms(), "held-out problems are not in the table of the test problems"


def test_verdicts_follow_from_the_rows():
    def arm(*values):
        return [{"seed": seed, "pass@1": [[30, value]]} for seed, value in enumerate(values)]

    arms = {"v=1": arm(0.6, 0.7, 0.8), "v=10": arm(0.5, 0.61, 0.69), "v=10, no clip": arm(0.55, 0.75, 0.8)}
    first, _, worse, same = report.verdicts(arms).splitlines()
    assert "for 2 comparisons" in first
    assert worse == "- v=10: -0.100 ± 0.036: **below v=1**."
    assert same.endswith("these seeds do not separate it from v=1.")
    assert report.verdicts({"v=10": arm(1, 1, 1)}).startswith("No verdict yet")


class FakeRunner(Runner):
    """Writes a checkpoint when it is stopped, as a run does, and otherwise runs to its end."""

    def __init__(self, folder, seconds):
        super().__init__()
        self.folder, self.seconds, self.given = folder, seconds, []
        self.stopped = threading.Event()

    def run(self, arguments, log):
        self.given = arguments
        run = Path(next(value.partition("=")[2] for value in arguments if value.startswith("--run=")))
        (run / "checkpoints").mkdir(parents=True, exist_ok=True)
        log.write_text("")
        if self.stopped.wait(self.seconds):
            (run / "checkpoints" / "last.ckpt").write_text("")
            return None
        return 0

    def stop(self):
        self.stopped.set()


def test_a_long_run_stops_in_time_and_continues(tmp_path, monkeypatch):
    monkeypatch.setattr(real_model, "measured", lambda run: {"pass@1": [[200, 0.7]]})
    monkeypatch.setattr(real_model, "setup", lambda options, arm: {"rollouts": real_model.num_rollouts(options, arm)})
    given = options(tmp_path, deadline=time.monotonic() + 0.2)
    given.folder.mkdir()
    (given.folder / "v_1__200_steps-0").mkdir()  # of a run that wrote no checkpoint
    (given.folder / "v_1__200_steps-0" / "rest").touch()

    runner = FakeRunner(tmp_path, 30)
    assert real_model.train(runner, given, "v=1, 200 steps", 0) is None
    assert "--ckpt_path=last" not in runner.given
    assert {"--data.num_rollouts=200", "--trainer.enable_checkpointing=true"} <= set(runner.given)
    assert not (given.folder / "v_1__200_steps-0" / "rest").exists()

    runner = FakeRunner(tmp_path, 0)
    given.deadline = math.inf
    row = real_model.train(runner, given, "v=1, 200 steps", 0)
    assert "--ckpt_path=last" in runner.given
    assert row["rollouts"] == 200
    assert 0.2 <= row["seconds"] < 20, "the seconds of both commands"
    assert not real_model.can_resume(given.folder / "v_1__200_steps-0"), "a checkpoint is large"


def test_the_best_arms_with_enough_seeds_are_trained_for_longer():
    values = {
        "v=1": [0.6, 0.7, 0.6],
        "v=1 at 1e-5": [0.9],
        "v=10": [0.5, 0.5, 0.5],
        "v=10, no clip": [0.6, 0.6, 0.6],
        "v=10, no clip at 1e-6": [0.9, 0.9],
        "v=2": [0.9, 0.9, 0.9],
    }
    rows = [
        {"arm": arm, "seed": seed, "pass@1": [[30, value]]}
        for arm, each in values.items()
        for seed, value in enumerate(each)
    ]
    assert real_model.best_of_each(rows) == ["v=1, 200 steps", "v=10, no clip, 200 steps"]
    assert set(real_model.best_of_each([])) == {"v=1, 200 steps", "v=10, 200 steps"}


def test_the_groups_of_the_mask_and_of_i(parsed, tmp_path):
    off, on = (parsed(arm, tmp_path) for arm in real_model.GROUPS["mask"])
    assert (off.zero_variance_mask, on.zero_variance_mask is None) == (None, False)
    assert {each.model.loss.init_args.kl_coef for each in (off, on)} == {0.1}
    i4, v4 = (parsed(arm, tmp_path) for arm in real_model.GROUPS["i"])
    assert (i4.data.reuse, i4.weight_sync.init_args.period) == (4, 1)
    assert (v4.data.reuse, v4.weight_sync.init_args.period) == (1, 4)
    assert i4.data.num_rollouts == v4.data.num_rollouts, "equal numbers of completions"


def test_the_groups_of_the_tool_and_of_the_teacher(parsed, tmp_path):
    (tool,) = (parsed(arm, tmp_path) for arm in real_model.GROUPS["tool"])
    assert tool.data.task.init_args.source.init_args.train == "data"
    engines = [tool.data.engine, inner := tool.data.engine.init_args.engine, inner.init_args.engine]
    names = [engine.class_path.rpartition(".")[2] for engine in engines]
    assert names == ["EnvironmentEngine", "EnginePool", "VLLMEngine"]
    assert tool.data.sampling.max_tokens == tool.data.evaluation.sampling.max_tokens == 448
    assert not any("held_out" in callback.class_path for callback in tool.trainer.callbacks)
    distilled = [parsed(arm, tmp_path, teacher="after_rl") for arm in real_model.GROUPS["distillation"]]
    assert [each.weight_sync.init_args.period for each in distilled] == [1, 10]
    for each in distilled:
        (regulariser,) = each.model.loss.init_args.regularisers
        assert regulariser.init_args.teacher.init_args.name == "after_rl"
        assert each.model.loss.init_args.scale == 0.0


def test_the_teacher_is_written_once(tmp_path):
    given = options(tmp_path, teacher=str(tmp_path / "teacher"))
    assert any("SaveModel" in each for each in real_model.arguments(given, "v=1", 0, Path("run")))
    assert not any("SaveModel" in each for each in real_model.arguments(given, "v=10", 0, Path("run")))
    (tmp_path / "teacher").mkdir()
    assert not any("SaveModel" in each for each in real_model.arguments(given, "v=1", 0, Path("run")))


def test_trl_is_evaluated_as_the_other_arms(tmp_path, monkeypatch):
    given = options(tmp_path)
    given.folder.mkdir()
    given.rows.write_text(json.dumps({"arm": real_model.INITIAL, "seed": 0, "pass@1": [[0, 0.4], [1, 0.41]]}) + "\n")
    found = {"reward": [0.1, 0.2], "step_seconds": [3.0, 2.0]}

    def run(arguments, folder, limit):
        assert "--weight_sync.period=1" in arguments
        (folder / "model").mkdir()
        return found

    monkeypatch.setattr(real_model, "ROWS", tmp_path / "none.jsonl")
    monkeypatch.setattr(real_model.trl_arm, "run", run)
    monkeypatch.setattr(real_model, "setup", lambda options, arm: {})
    after = {"pass@1": [[0, 0.6], [1, 0.61]], "pass@1_stderr": 0.02}
    monkeypatch.setattr(real_model, "measured", lambda run: after)
    runner = FakeRunner(tmp_path, 0)
    row = real_model.train(runner, given, real_model.TRL, 0)
    assert row["pass@1"] == [[0, 0.41], [2, 0.61]], "before training, and after TRL's steps"
    assert (row["seconds_at"], row["reward"]) == ([0.0, 5.0], [0.1, 0.2])
    loads = [value for value in runner.given if "LoadWeights" in value]
    assert str(given.folder / "TRL-0" / "model") in loads[0]
    assert "--model.optimizer.init_args.lr=0.0" in runner.given, "the weights stay as they are"
    assert not (given.folder / "TRL-0" / "model").exists()

    found["error"] = "out of memory"
    assert real_model.train(runner, given, real_model.TRL, 0)["error"] == "out of memory"


def scored(arm, seed, final, **sets):
    """Return a row with the scores of the final policy."""
    row = {"arm": arm, "seed": seed, "pass@1": [[0, 0.4], [30, final]], "pass@1_stderr": 0.02, "rollouts": 30}
    row |= {"reward": [0.5], "kl_behaviour": [0.1], "workers": 1}
    row |= {"generate_seconds": [1.0, 2.0, 2.0, 2.0], "update_seconds": [40.0, 3.0, 3.0, 3.0]}
    names = ("pass@1", "forgiving", "truncated", "finished", "tokens")
    return row | {name: dict.fromkeys(names, value) | {"pass@1_stderr": 0.01} for name, value in sets.items()}


@pytest.fixture
def published(tmp_path, monkeypatch):
    """Return a function that replaces the published rows."""

    def publish(*rows):
        (tmp_path / "published.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        monkeypatch.setattr(real_model, "ROWS", tmp_path / "published.jsonl")

    return publish


def test_gains_are_separated_by_what_they_are(published):
    before = scored(real_model.INITIAL, 0, 0.4, test=0.4, math500=0.3)
    published(
        before, scored("v=1", 0, 0.6, test=0.6, math500=0.35), scored("v=1", 1, 0.6, test=0.7), scored("v=2", 0, 1)
    )
    text = report.format_section()
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert [line.split(" | ")[:2] for line in table[2:]] == [["| before training", "1"], ["| v=1", "2"]]
    assert "0.650 ± 0.007" in table[3]
    (sentence,) = [line for line in text.splitlines() if line.startswith("- ")]
    assert sentence.startswith("- v=1 gains +0.250 ± 0.024 (pass@1), +0.250 (forgiving)")
    assert "+0.050 ± 0.028 (MATH-500)" in sentence
    published(scored("v=1", 0, 0.6))
    assert report.format_section() == "", "rows before the scores were recorded have none"


def test_other_comparisons_have_their_own_baseline(published):
    on, off = "v=1, KL, mask", "v=1, KL, no mask"
    rows = [scored(arm, seed, final + seed / 100) for arm, final in ((on, 0.6), (off, 0.5)) for seed in range(3)]
    rows += [scored("v=1", seed, 0.6) for seed in range(3)] + [scored("TRL", 0, 0.61)]
    rows += [scored("v=1, 200 steps", 0, 0.7), scored("v=10, no clip, 200 steps", 0, 0.65)]
    published(*rows, scored(real_model.INITIAL, 0, 0.4))
    found = {title: (list(arms), baseline) for title, arms, baseline in report.comparisons()}
    assert list(found.values()) == [
        ([off, on], off),
        (["v=1", "TRL"], "v=1"),
        (["v=1, 200 steps", "v=10, no clip, 200 steps"], "v=1, 200 steps"),
    ]
    text = report.section()
    assert f"- {on}: +0.100 ± 0.000: **above {off}**." in text
    assert "| v=10, no clip, 200 steps | 1 | 0.650 | -0.050 ± 0.055 |" in text
    assert list(report.main_arms()) == ["v=1"]
    assert list(report.drawn()) == ["v=1", "TRL"]


def test_seconds_leave_out_compilation_and_shared_gpus():
    row = scored("v=1", 0, 0.6)
    assert report.step_seconds(row) == [5.0, 5.0, 5.0, 5.0], "the first step compiles"
    assert report.seconds_until(row, 1) == 20
    assert report.step_seconds(row | {"workers": 2}) == []
    assert report.step_seconds(row | {"step_seconds": [3.0, 2.0]}) == [3.0, 2.0]


LEARNING = {
    "loss": lambda settings: settings.model.loss,
    "learning rate": lambda settings: settings.model.optimizer.init_args.lr,
    "weight decay": lambda settings: settings.model.optimizer.init_args.weight_decay,
    "v": lambda settings: settings.weight_sync.init_args.period,
    "i": lambda settings: settings.data.reuse,
    "group size": lambda settings: settings.data.group_size,
    "sampling": lambda settings: settings.data.sampling,
    "advantage": lambda settings: settings.data.advantage,
    "prompt": lambda settings: settings.data.task.init_args.template,
    "mask": lambda settings: settings.zero_variance_mask,
    "clipped gradients": lambda settings: settings.trainer.gradient_clip_val,
}
"""Settings that decide what a run learns; the numbers of prompts and steps may differ."""


def test_the_quick_start_is_the_best_arm(parsed, tmp_path):
    """It has the settings of v=1, and no arm is clearly above that: otherwise change the quick start."""
    settings, arm = settings_parser().parse_args(["--config=configs/quickstart_gsm8k.yaml"]), parsed("v=1", tmp_path)
    assert {name: str(get(settings)) for name, get in LEARNING.items()} == {
        name: str(get(arm)) for name, get in LEARNING.items()
    }
    assert "**above" not in report.verdicts(report.main_arms())
