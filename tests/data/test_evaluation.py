"""Tests of evaluation: several tasks at once, results on disk, all checkpoints of a run."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import lightning as L
import pytest
import torch
from datasets import load_dataset
from lightning.pytorch.callbacks import ModelCheckpoint

from lgrpo import Benchmark, CausalPolicy, Evaluation, Sampling, ValidateEvery
from lgrpo.callbacks import ExactResume
from lgrpo.cli import main
from lgrpo.functional import majority_at_k, pass_at_k
from lgrpo.metrics import PassAtK
from lgrpo.rewards import NOT_YET, NotedScore, NumericMatch, Reward
from lgrpo.tasks import Arithmetic, DatasetTask, SortDigits
from tests.helpers import MODEL, LowDigits, build, fit, largest_difference
from tests.processes.alive import process_stats, until_all_ended

TINY = [f"--config={Path(__file__).parents[2] / 'configs' / 'tiny.yaml'}"]
SHORT = ["--data.num_rollouts=3", "--trainer.max_epochs=3", "--data.evaluation.num_problems=16"]


def sort_digits(**settings):
    return SortDigits(num_digits=2, num_held_out=20, reward=LowDigits(), **settings)


def pass_names(*ks):
    return [f"pass@{k}{what}" for k in ks for what in ("", "_stderr")]


def by_hand(rewards, least):
    """Return pass@1 and its standard error, from the rewards of the problems."""
    means = [sum(r >= least for r in row) / len(row) for row in rewards]
    mean = sum(means) / len(means)
    variance = sum((m - mean) ** 2 for m in means) / (len(means) - 1)
    return mean, (variance / len(means)) ** 0.5


class TestSeveralTasks:
    @pytest.fixture(scope="class", params=["jsonl", "parquet"])
    def validated(self, request, tmp_path_factory):
        folder = tmp_path_factory.mktemp("evaluation")
        benchmarks = {
            "greedy": Benchmark(
                task=sort_digits(seed=1),
                num_samples=3,
                num_problems=5,
                sampling=Sampling(temperature=0.5, top_k=1, max_tokens=4),
                success_reward=0.1,
                results=request.param,
            ),
            "sums": Benchmark(
                task=Arithmetic(1, num_held_out=12, reward=LowDigits(), template=sort_digits().template),
                num_samples=5,
                success_reward=0.5,
            ),
        }
        run = build(
            data={
                "evaluation": Evaluation(success_reward=0.5, num_samples=4, results=request.param),
                "benchmarks": benchmarks,
                "task": sort_digits(),
            },
            policy=CausalPolicy(config=MODEL, characters="0123456789>+"),
            trainer={"limit_val_batches": 1.0, "default_root_dir": str(folder)},
        )
        (metrics,) = run.trainer.test(run.module, datamodule=run.data, verbose=False)
        return metrics, folder / "evaluations", request.param

    def test_each_task_has_separate_metrics(self, validated):
        metrics, _, _ = validated
        own = {*pass_names(1, 2, 4), "maj@4"}
        greedy = {*pass_names(1, 2, 3), "maj@3"}
        sums = {*pass_names(1, 2, 4, 5), "maj@4", "maj@5"}
        assert set(metrics) == (
            {f"test/{n}" for n in own} | {f"test/greedy/{n}" for n in greedy} | {f"test/sums/{n}" for n in sums}
        )
        assert metrics["test/greedy/pass@1"] == metrics["test/greedy/maj@3"] == metrics["test/greedy/pass@3"]

    def test_every_problem_is_written_and_agrees_with_the_metrics(self, validated):
        metrics, folder, form = validated
        assert sorted(p.name for p in folder.iterdir()) == [f"test-greedy-step=0.{form}", f"test-step=0.{form}"]
        rows = load_dataset(
            {"jsonl": "json"}.get(form, form), data_files=str(folder / f"test-step=0.{form}"), split="train"
        ).to_list()
        assert [row["problem"] for row in rows] == list(range(20))
        mean, error = by_hand([row["rewards"] for row in rows], 0.5)
        assert metrics["test/pass@1"] == pytest.approx(mean)
        assert metrics["test/pass@1_stderr"] == pytest.approx(error)
        for row in rows:
            data = json.loads(row["row"]) if form == "parquet" else row["row"]
            assert row["prompt"] == data["question"] + ">"
            assert [len(row[name]) for name in ("completions", "correct", "num_tokens", "finish_reasons")] == [4] * 4
            assert row["correct"] == [reward >= 0.5 for reward in row["rewards"]]
            assert row["final_answers"] == [text.strip() or None for text in row["completions"]]


class Remarks(Reward):
    """Notes what it thinks of most answers, in different types, with half of an emoji."""

    is_inline = True

    def score(self, prompt, completion):
        if prompt.position == 0:
            return 0.0
        return NotedScore(1.0, {"why": "odd \ud83d"} if prompt.position % 2 else {"why": prompt.position, "parts": {}})


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_notes_of_scores_are_written_whatever_they_are(tmp_path, form):
    data = {
        "evaluation": Evaluation(num_samples=2, num_problems=4, results=form),
        "task": SortDigits(num_digits=2, num_held_out=20, reward=Remarks()),
    }
    trainer = {"limit_val_batches": 1.0, "default_root_dir": str(tmp_path)}
    run = build(data=data, policy=CausalPolicy(config=MODEL, characters="0123456789>+"), trainer=trainer)
    run.trainer.test(run.module, datamodule=run.data, verbose=False)
    (path,) = (tmp_path / "evaluations").iterdir()
    if form == "jsonl":
        notes = [json.loads(line).get("notes") or [None] * 2 for line in path.read_text().splitlines()]
    else:
        rows = load_dataset("parquet", data_files=str(path), split="train").to_list()
        notes = [[None if own is None else json.loads(own) for own in row["notes"]] for row in rows]
    odd, even = {"why": "odd \ud83d"}, {"why": 2, "parts": {}}
    assert notes == [[None] * 2, [odd] * 2, [even] * 2, [odd] * 2]


class TestMajority:
    def test_against_counting(self):
        generator = torch.Generator().manual_seed(0)
        answers = torch.randint(-1, 4, (50, 12), generator=generator)
        truth = torch.randint(0, 4, (50, 1), generator=generator)
        for k in (1, 3, 4, 12):
            expected = []
            for row, right in zip(answers.tolist(), truth.tolist(), strict=True):
                blocks = [row[i : i + k] for i in range(0, 12, k)]
                voted = [[a for a in block if a >= 0] for block in blocks]
                wins = [bool(v) and max(v, key=lambda a, v=v: (v.count(a), -v.index(a))) == right[0] for v in voted]
                expected.append(sum(wins) / len(wins))
            found = majority_at_k(answers, answers == truth, k)
            assert found.tolist() == pytest.approx(expected), k

    def test_too_few_samples(self):
        with pytest.raises(ValueError, match="maj@5 requires k of at least 1, and at least k samples"):
            majority_at_k(torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, 4).bool(), 5)

    def test_the_metric_does_not_depend_on_the_batches(self):
        correct = torch.rand(9, 6, generator=torch.Generator().manual_seed(1)) < 0.4
        answers = torch.where(correct, 0, torch.arange(6) % 3 + 1)
        whole, pieces = PassAtK(), PassAtK()
        whole.update(correct, answers)
        for start, end in ((0, 1), (1, 6), (6, 9)):
            pieces.update(correct[start:end], answers[start:end])
        metrics = whole.compute()
        assert metrics == pieces.compute()
        assert list(metrics) == [*pass_names(1, 2, 4, 6), "maj@4", "maj@6"]
        of_problems = pass_at_k(torch.full((9,), 6), correct.sum(1), 4)
        assert metrics["pass@4"] == of_problems.mean()
        assert metrics["pass@4_stderr"] == pytest.approx(float(of_problems.std()) / 3)


class TestSchedule:
    def test_validation_every_n_rollouts_across_epochs(self):
        class ValidationSteps(L.Callback):
            def __init__(self):
                self.steps = []

            def on_validation_end(self, trainer, pl_module):
                self.steps.append(trainer.global_step)

        validations = ValidationSteps()
        trainer = {"limit_val_batches": 1.0, "num_sanity_val_steps": 0, "accumulate_grad_batches": 2}
        fit(rollouts=3, i=2, epochs=3, callbacks=[ValidateEvery(2), validations], trainer=trainer)
        assert validations.steps == [4, 8, 12, 16]

    def test_a_resumed_run_validates_at_the_same_steps_with_the_same_results(self, tmp_path):
        def settings(folder, save=False):
            callbacks = [ValidateEvery(2), ExactResume()]
            if save:
                callbacks.append(ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1))
            trainer = {
                "limit_val_batches": 1.0,
                "num_sanity_val_steps": 0,
                "enable_checkpointing": save,
                "default_root_dir": str(folder),
            }
            data = {"evaluation": Evaluation(success_reward=0.5, results="jsonl")}
            return {"rollouts": 3, "epochs": 2, "callbacks": callbacks, "trainer": trainer, "data": data}

        straight = fit(**settings(tmp_path / "straight", save=True), learning_rate=0.5)
        whole = sorted((tmp_path / "straight" / "evaluations").iterdir())
        assert [path.name for path in whole] == [f"step={s}.jsonl" for s in (2, 4, 6)]
        for step in (1, 3, 5):
            folder = tmp_path / f"from-{step}"
            checkpoint = str(tmp_path / "straight" / f"step={step}.ckpt")
            run = fit(**settings(folder), learning_rate=0.5, ckpt_path=checkpoint)
            assert largest_difference(straight.weights, run.weights) == 0
            later = sorted((folder / "evaluations").iterdir())
            assert [path.name for path in later] == [path.name for path in whole if path.name > f"step={step}.jsonl"]
            assert all(path.read_text() == (whole[0].parent / path.name).read_text() for path in later)

    def test_a_task_without_a_validation_set(self):
        rows = [{"question": f"{n}>", "answer": str(n)} for n in range(10)]
        task = DatasetTask(NumericMatch(), rows)
        run = fit(rollouts=1, data={"task": task}, trainer={"limit_val_batches": 1.0, "num_sanity_val_steps": -1})
        assert run.trainer.global_step == 1
        assert not [name for name in run.trainer.callback_metrics if name.startswith("val/")]
        checkpoint = ModelCheckpoint(monitor="val/pass@1")
        with pytest.raises(ValueError, match="a callback monitors val/pass@1, but the task has no validation set"):
            fit(data={"task": task}, callbacks=[checkpoint], trainer={"enable_checkpointing": True})
        run = build(data={"task": task}, trainer={"limit_val_batches": 1.0})
        with pytest.raises(ValueError, match=r"nothing to validate on.*data\.benchmarks"):
            run.trainer.validate(run.module, datamodule=run.data, verbose=False)
        benchmarks = {"digits": Benchmark(task=sort_digits(), num_samples=2)}
        run = build(data={"task": task, "benchmarks": benchmarks}, trainer={"limit_val_batches": 1.0})
        (metrics,) = run.trainer.validate(run.module, datamodule=run.data, verbose=False)
        assert set(metrics) == {f"val/digits/{name}" for name in pass_names(1, 2)}

    def test_unknown_scores_are_not_correct(self):
        class Never(Reward):
            is_inline = True

            def score(self, prompt, completion):
                return NOT_YET

        run = build(data={"task": SortDigits(2, num_held_out=20, reward=Never())}, trainer={"limit_val_batches": 1.0})
        (metrics,) = run.trainer.validate(run.module, datamodule=run.data, verbose=False)
        assert metrics["val/pass@1"] == 0

    def test_names_that_cannot_be_logged(self):
        with pytest.raises(ValueError, match="must have no slash"):
            build(data={"benchmarks": {"a/b": Benchmark(task=sort_digits())}})


class TestFromTheCommandLine:
    @pytest.fixture(scope="class")
    def run(self, tmp_path_factory):
        run = tmp_path_factory.mktemp("runs") / "run"
        main(["fit", *TINY, *SHORT, f"--run={run}", "--checkpoint.every_n_epochs=1", "--checkpoint.save_top_k=-1"])
        return run

    def test_every_checkpoint_of_a_run(self, run, capsys):
        main(["test", f"--checkpoints={run}"])
        printed = capsys.readouterr().out
        table = json.loads((run / "evaluations" / "checkpoints-test.json").read_text())
        assert list(table) == ["3", "6", "9"]
        values = sorted(metrics["test/pass@1"] for metrics in table.values())
        line = next(line for line in printed.splitlines() if line.startswith("test/pass@1 "))
        numbers = [float(text) for text in line.split()[1:]]
        assert numbers == pytest.approx([values[0], values[2], values[1], sum(values) / 3], abs=1e-4)
        assert "over 3 checkpoints" in printed
        assert "min      max   median     mean" in printed
        for step, metrics in table.items():
            assert f"step {step}: test/pass@1 {metrics['test/pass@1']:.4f} ± " in printed

    def test_a_run_that_was_resumed_and_moved(self, run, tmp_path, capsys):
        """The newest config names the checkpoint it resumed from and its old folder."""
        moved = tmp_path / "moved"
        shutil.copytree(run, moved)
        shutil.rmtree(moved / "evaluations", ignore_errors=True)
        last = "--ckpt_path=last"
        main(["fit", *TINY, *SHORT, "--trainer.max_epochs=4", f"--run={moved}", last, "--checkpoint.save_top_k=-1"])
        main(["test", f"--checkpoints={moved}", "--data.evaluation.results=jsonl"])
        assert "over 4 checkpoints" in capsys.readouterr().out
        names = {path.name for path in (moved / "evaluations").iterdir()}
        assert names == {"checkpoints-test.json", *(f"test-step={step}.jsonl" for step in (3, 6, 9, 12))}

    def test_without_the_reference_of_the_run(self, run, capsys):
        options = ["--model.loss.init_args.kl_coef=0", "--reference_refresh=null"]
        main(["test", *TINY, *SHORT, *options, f"--ckpt_path={run / 'checkpoints' / 'step=6.ckpt'}"])
        table = json.loads((run / "evaluations" / "checkpoints-test.json").read_text())
        assert f"{table['6']['test/pass@1']:.4f} ± " in capsys.readouterr().out

    def test_each_checkpoint_gives_the_same_result_alone(self, run, capsys):
        table = json.loads((run / "evaluations" / "checkpoints-test.json").read_text())
        main(["test", f"--config={run / 'config.yaml'}", f"--ckpt_path={run / 'checkpoints' / 'step=6.ckpt'}"])
        printed = capsys.readouterr().out
        assert f"{table['6']['test/pass@1']:.4f} ± {table['6']['test/pass@1_stderr']:.4f}" in printed

    def test_a_model_folder_without_a_checkpoint(self, tmp_path, capsys):
        policy = CausalPolicy(config=MODEL, characters="0123456789>")
        policy.build()
        policy.model.save_pretrained(tmp_path / "model")
        policy.tokenizer.save_pretrained(tmp_path / "model")
        overlay = tmp_path / "overlay.yaml"
        overlay.write_text(
            f"model:\n  policy:\n    name: {tmp_path / 'model'}\n    config: null\n    characters: null\n"
        )
        options = ["--data.evaluation.results=parquet", f"--run={tmp_path / 'out'}", "--data.sampling.max_tokens=5"]
        main(["test", *TINY, f"--config={overlay}", *SHORT, *options])
        assert "test/pass@1 " in capsys.readouterr().out
        (path,) = (tmp_path / "out" / "evaluations").iterdir()
        assert len(load_dataset("parquet", data_files=str(path), split="train")) == 16

    def test_benchmarks_in_a_config(self, tmp_path, capsys):
        overlay = tmp_path / "overlay.yaml"
        overlay.write_text("""
data:
  benchmarks:
    two_digits:
      task:
        class_path: lgrpo.tasks.SortDigits
        init_args:
          num_digits: 2
          num_held_out: 10
      num_samples: 4
      sampling:
        temperature: 0.7
        top_p: 0.9
        max_tokens: 4
""")
        main(["validate", *TINY, f"--config={overlay}", *SHORT])
        printed = capsys.readouterr().out
        assert "val/pass@8" in printed
        assert "val/two_digits/pass@4" in printed
        assert "val/two_digits/maj@4" in printed

    def test_invalid_combinations_of_options(self, run, tmp_path):
        with pytest.raises(SystemExit, match="an option of validate and test"):
            main(["fit", *TINY, f"--checkpoints={run}"])
        with pytest.raises(SystemExit, match="give one of the two"):
            main(["test", *TINY, f"--checkpoints={run}", f"--ckpt_path={run / 'checkpoints' / 'last.ckpt'}"])
        with pytest.raises(SystemExit, match="there is no checkpoint in"):
            main(["test", *TINY, f"--checkpoints={tmp_path}"])
        with pytest.raises(SystemExit, match="there is no folder nowhere"):
            main(["test", "--checkpoints", "nowhere"])
        with pytest.raises(SystemExit, match=r"there is no config\.yaml in"):
            main(["test", f"--checkpoints={tmp_path}"])
        (tmp_path / "broken.ckpt").write_bytes(b"not a checkpoint")
        with pytest.raises(SystemExit, match=r"broken\.ckpt cannot be read as a checkpoint"):
            main(["test", *TINY, f"--checkpoints={tmp_path}"])


@pytest.mark.parametrize(
    ("command", "number", "code"),
    [("test", signal.SIGTERM, 143), ("fit", signal.SIGINT, 130), ("fit", signal.SIGTERM, 143)],
)
@pytest.mark.slow("starts several runs")
def test_a_run_that_waits_for_scores_can_be_stopped(tmp_path, command, number, code):
    """Every worker hangs for half an hour; a signal ends all processes."""
    (tmp_path / "graders.py").write_text("import time\n\ndef wait(text, row):\n    time.sleep(1800)\n")
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text("""
data:
  scoring:
    timeout: 1800
  task:
    class_path: lgrpo.tasks.SortDigits
    init_args:
      reward:
        class_path: lgrpo.rewards.FunctionReward
        init_args:
          function: graders.wait
""")
    options = [command, *TINY, f"--config={overlay}", "--trainer.num_sanity_val_steps=0"]
    process = subprocess.Popen(
        [str(Path(sys.executable).parent / "lgrpo"), *options],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    workers = waiting_workers(process.pid)
    process.send_signal(number)
    _, errors = process.communicate(timeout=40)
    assert process.returncode == code, errors
    assert until_all_ended(lambda stat: int(stat[0]) in workers)


def waiting_workers(parent: int) -> list[int]:
    """Return children and grandchildren of a process, when there are at least two grandchildren."""
    for _ in range(600):
        time.sleep(0.2)
        parents = {int(stat.split()[0]): int(stat[stat.rindex(")") :].split()[2]) for stat in process_stats()}
        children = [pid for pid, of in parents.items() if of == parent]
        workers = [pid for pid, of in parents.items() if of in children]
        if len(workers) >= 2:
            time.sleep(1.0)
            return children + workers
    raise AssertionError("no worker was started")


@pytest.mark.slow("starts two ranks")
def test_two_processes_give_the_results_of_one(tmp_path):
    """Two tasks of 11 problems each: one rank takes six, the other five."""
    found = []
    for devices in (1, 2):
        out = tmp_path / f"{devices}.json"
        command = [
            sys.executable,
            "-m",
            "tests.processes.two_evaluations",
            str(devices),
            str(out),
            str(tmp_path / str(devices)),
        ]
        subprocess.run(command, check=True, timeout=200, cwd=Path(__file__).parents[2])
        files = sorted((tmp_path / str(devices) / "evaluations").iterdir())
        found.append((json.loads(out.read_text()), [(path.name, path.read_text()) for path in files]))
    (one, one_files), (two, two_files) = found
    assert one == pytest.approx(two)
    assert {"val/pass@1", "val/pass@1_stderr", "val/maj@4", "val/other/pass@1"} <= set(one)
    assert one_files == two_files
    assert len(one_files[0][1].splitlines()) == 11
