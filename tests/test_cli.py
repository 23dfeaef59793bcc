"""The command line, as a user types it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import lightning as L
import pytest
import torch
import yaml

from lgrpo import Sampling
from lgrpo.arguments import is_sentence
from lgrpo.cli import LGRPOCLI, RESUMABLE, ParseOnly, main
from lgrpo.functional import named_checksums
from lgrpo.report import read_series
from lgrpo.run_folder import RunFolder

CONFIGS = Path(__file__).parent.parent / "configs"
PAPERS = {f"papers/{name}.yaml" for name in ("a_gsm8k", "a_deepscaler", "b_gsm8k", "b_math")}
BASES = {"on_policy.yaml", "demo.yaml", "tiny.yaml"} | PAPERS
ALL = sorted(path.relative_to(CONFIGS).as_posix() for path in CONFIGS.rglob("*.yaml") if path.parent.name != "sweeps")
QUICK = [
    "--data.num_rollouts=3",
    "--trainer.max_epochs=2",
    "--data.evaluation.num_problems=16",
    "--data.evaluation.num_samples=2",
]


def with_base(name: str) -> list[str]:
    files = [name] if name in BASES else ["on_policy.yaml", name]
    if name == "papers/a_reuse.yaml":
        files[0] = "papers/a_gsm8k.yaml"
    return [f"--config={CONFIGS / file}" for file in files]


def lgrpo(*arguments: str, cwd: Path | None = None, timeout: float = 120) -> subprocess.CompletedProcess:
    command = [str(Path(sys.executable).parent / "lgrpo"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=timeout)


@pytest.mark.parametrize("name", ALL)
def test_every_config_parses_and_builds(name):
    on_cpu = ["--trainer.strategy.class_path=tests.on_cpu.FSDPOnCPU", "--trainer.accelerator=cpu"]
    cli = LGRPOCLI(with_base(name) + (on_cpu if name == "fsdp.yaml" else []), run=False)
    assert cli.trainer.callbacks
    assert cli.model.policy is not None
    assert cli.datamodule.group_size >= 2


def test_the_rows_of_the_table_are_a_config_each():
    def place(*names):
        config = LGRPOCLI([f"--config={CONFIGS / n}" for n in ("on_policy.yaml", *names)], run=False)
        (sync,) = [c for c in config.trainer.callbacks if type(c).__name__ == "WeightSync"]
        masked = any(type(c).__name__ == "ZeroVarianceMask" for c in config.trainer.callbacks)
        return sync.period, config.datamodule.reuse, masked

    assert place() == (1, 1, False)
    assert place("off_policy.yaml") == (10, 1, False)
    assert place("reuse.yaml") == (1, 10, False)
    assert place("off_policy.yaml", "mask.yaml") == (10, 1, True)
    overlay = yaml.safe_load((CONFIGS / "off_policy.yaml").read_text())
    assert overlay == {"weight_sync": {"period": 10}}


def test_overrides_and_nulls():
    options = ["--weight_sync.period=7", "--data.reuse=4", "--zero_variance_mask=null", "--reference_refresh=null"]
    cli = LGRPOCLI([*with_base("demo.yaml"), *options], run=False)
    names = [type(c).__name__ for c in cli.trainer.callbacks]
    assert "ZeroVarianceMask" not in names
    assert "ReferenceRefresh" not in names
    assert cli.datamodule.reuse == 4
    (sync,) = [c for c in cli.trainer.callbacks if type(c).__name__ == "WeightSync"]
    assert sync.period == 7


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A short run of the demonstration, through the command."""
    run = tmp_path_factory.mktemp("runs") / "short"
    done = lgrpo("fit", *with_base("demo.yaml"), *QUICK, f"--run={run}")
    assert done.returncode == 0, done.stdout + done.stderr
    return run, done


def test_the_run_folder_has_everything(finished):
    run, _ = finished
    files = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    assert {"config.yaml", "completions.jsonl", "curves.png", "checkpoints/last.ckpt"} <= files
    assert "metrics/version_0/metrics.csv" in files
    assert any(name.startswith("tensorboard/version_0/events") for name in files)
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_last_line(finished):
    _, done = finished
    last = done.stdout.strip().splitlines()[-1].split()
    assert (last[0], last[2], last[4], last[6]) == ("pass@1", "->", "in", "s")
    assert 0 <= float(last[1]) <= 1
    assert 0 <= float(last[3]) <= 1
    assert "litlogger" not in done.stdout + done.stderr
    assert "Warning" not in done.stderr, done.stderr


def test_every_metric_of_the_page_is_logged_and_every_logged_one_explained(finished):
    run, _ = finished
    page = (CONFIGS.parent / "tutorials" / "pages" / "metrics.md").read_text(encoding="utf-8")
    explained = {line.split("`")[1] for line in page.splitlines() if line.startswith("| `")}
    logged = {re.sub(r"@\d+(_stderr)?$", r"@k\1", name) for name in read_series(run)}
    only_sometimes = {"rollout/resampled_fraction", "val/maj@k"}  # with dynamic sampling; with more than two samples
    only_sometimes |= {"rollout/recorded_fraction"}  # with ReplayEngine
    only_sometimes |= {f"rollout/late_{kind}" for kind in ("waiting", "joined", "dropped")}  # where rewards are late
    failures = ("failures", "timeouts", "crashes", "memory", "output", "errors")
    only_sometimes |= {f"reward/{kind}" for kind in failures}  # of rewards in workers
    only_sometimes |= {n for n in explained if n.startswith(("monitor/", "calibration/", "sync/"))}  # have own tests
    writes = ("checkpoint_writes", "file_writes", "logger_writes")
    only_sometimes |= {f"fault/{kind}" for kind in ("nonfinite_steps", *writes)}  # where there were any
    only_sometimes |= {f"time/{kind}" for kind in ("monitor", "calibration", "divergence")}
    assert explained == logged | {"val/pass@1"} | only_sometimes


def test_curves_have_one_point_a_step(finished):
    run, _ = finished
    series = read_series(run)
    assert [step for step, _ in series["rollout/reward"]] == list(range(6))
    assert [step for step, _ in series["val/pass@1"]] == [0, 3, 6]
    assert [value for _, value in series["train/lag"]] == list(range(6))
    assert series["val/pass@1_over_reference"][0][1] == 0.0


def test_completions_can_be_read(finished):
    run, _ = finished
    rows = [json.loads(line) for line in (run / "completions.jsonl").read_text().splitlines()]
    assert len(rows) == 8
    assert {"prompt", "completion", "reward", "advantage", "lag", "behaviour_step"} <= rows[0].keys()
    assert all(row["prompt"].endswith(">") and row["lag"] == 0 for row in rows)


@pytest.mark.parametrize(
    "text", ["Answer: yes", "Question: {question}", "- {question}", "# {question}", "Solve {question}"]
)
@pytest.mark.parametrize("between", ["=", None])
def test_texts_are_kept_as_they_are_typed(text, between):
    """jsonargparse would make ``{'Answer': True}`` of the first."""
    option = "--data.task.init_args.template.system" if between else "--data.task.template.system"
    given = [f"{option}={text}"] if between else [option, text]
    config = ParseOnly([*with_base("papers/a_gsm8k.yaml"), *given, "--data.task.template.chat=true"]).config
    assert config.data.task.init_args.template.system == text
    assert config.data.task.init_args.template.chat is True


def test_an_existing_run_folder_is_not_touched(finished, tmp_path):
    run, _ = finished
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    done = lgrpo("fit", *with_base("demo.yaml"), *QUICK, f"--run={run}")
    assert done.returncode != 0
    assert "exists already, and nothing of it is overwritten" in done.stderr
    assert "--ckpt_path last" in done.stderr
    assert "Traceback" not in done.stderr
    assert before == {path: path.stat().st_mtime_ns for path in run.rglob("*")}


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("--data.engine.max_sequences=0", "max_sequences is 0"),
        ("--data.sampling.max_tokens=1000", "max_tokens is 1000"),
        ("--trainer.callbacks=tests.test_cli.FailsToBegin", "not today"),
    ],
)
def test_a_run_that_never_began_does_not_stand_in_its_own_way(tmp_path, mistake, message):
    run = f"--run={tmp_path / 'run'}"
    for _ in range(2):
        with pytest.raises((ValueError, RuntimeError), match=message):
            main(["fit", *with_base("demo.yaml"), *QUICK, run, mistake])
    assert not list(tmp_path.glob("run/*"))


@pytest.mark.parametrize("resuming", [False, True])
def test_a_folder_is_one_runs_at_a_time(finished, tmp_path, resuming):
    """Its own, though nothing is in it yet."""
    folder = finished[0] if resuming else tmp_path
    held = RunFolder(folder)
    held.claim(resuming)
    run = ["fit", *with_base("demo.yaml"), *QUICK, f"--run={folder}"]
    with pytest.raises(SystemExit, match="another process is at a run in"):
        main([*run, "--ckpt_path=last"] if resuming else run)
    held.release()
    again = RunFolder(folder)
    again.claim(resuming)
    again.release()


def test_a_mistake_is_a_sentence(tmp_path):
    """And a traceback where it is asked for; an error of the user's own code has one."""
    wrong = ["fit", *with_base("demo.yaml"), *QUICK, "--data.group_size=1"]
    done = lgrpo(*wrong, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("lgrpo: data.group_size is 1")
    assert not list(tmp_path.glob("runs/*"))
    assert "Traceback" not in done.stderr
    done = subprocess.run(
        [sys.executable, "-m", "lgrpo.cli", *wrong],
        capture_output=True,
        text=True,
        env=os.environ | {"LGRPO_TRACEBACK": "1"},
        cwd=tmp_path,
    )
    assert "Traceback" in done.stderr
    assert "group_size is 1" in done.stderr.splitlines()[-1]


def fails(text):
    raise ValueError(text)


def error_of(act):
    try:
        act()
    except Exception as error:
        return error


def test_which_errors_are_sentences():
    assert is_sentence(error_of(lambda: Sampling(max_tokens=0)))
    assert not is_sentence(error_of(lambda: fails("of another's code")))
    assert not is_sentence(error_of(lambda: named_checksums([("a", "no tensor")]))), "an accident in our own"


def test_a_command_that_is_not_there():
    done = lgrpo("reprot", "runs/x")
    assert done.returncode == 1
    assert "there is no command 'reprot': there are fit, validate, test, plan, report" in done.stderr


def test_ctrl_c_before_the_first_step(tmp_path):
    """In the warm start, before any callback of lgrpo's listens: as a shell has it, and no folder is left."""
    command = [str(Path(sys.executable).parent / "lgrpo"), "fit", *with_base("demo.yaml"), f"--run={tmp_path / 'run'}"]
    slow = ["--trainer.callbacks=tests.test_cli.WaitsToBegin"]
    with subprocess.Popen([*command, *slow], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert any("now" in line for line in process.stdout)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130
    assert not (tmp_path / "run").exists()


class WaitsToBegin(L.Callback):
    def on_fit_start(self, trainer, pl_module):
        print("now", flush=True)
        time.sleep(60)


@pytest.mark.parametrize("command", ["validate", "test"])
def test_a_mistake_where_there_is_no_folder(command):
    with pytest.raises(ValueError, match="max_sequences is 0"):
        main([command, *with_base("demo.yaml"), *QUICK, "--data.engine.max_sequences=0"])


def test_a_run_that_began_keeps_its_folder(tmp_path):
    with pytest.raises(RuntimeError, match="no more"):
        main(["fit", *with_base("demo.yaml"), *QUICK, f"--run={tmp_path}", "--trainer.callbacks=tests.test_cli.Fails"])
    assert (tmp_path / "config.yaml").is_file()
    assert (tmp_path / "syncs.jsonl").is_file()


class FailsToBegin(L.Callback):
    def on_fit_start(self, trainer, pl_module):
        assert (Path(trainer.default_root_dir) / "config.yaml").is_file()
        raise RuntimeError("not today")


class Fails(L.Callback):
    def on_train_batch_end(self, *_):
        raise RuntimeError("no more")


@pytest.mark.parametrize(("command", "prefix"), [("validate", "val"), ("test", "test")])
def test_evaluate_a_checkpoint(finished, capsys, command, prefix):
    run, _ = finished
    checkpoint = f"--ckpt_path={run / 'checkpoints' / 'last.ckpt'}"
    main([command, *with_base("demo.yaml"), *QUICK, checkpoint])
    trained = read_series(run)["val/pass@1"][-1][1]
    printed = capsys.readouterr().out
    assert f"{prefix}/pass@1" in printed
    assert f"{trained:.4f}"[:6] in printed


def test_ctrl_c_leaves_a_checkpoint_that_goes_on_exactly(tmp_path):
    """Interrupt a real process at some moment, go on, and end at the weights of a run nobody interrupted."""
    options = [*with_base("tiny.yaml"), *QUICK, "--data.num_rollouts=20", "--trainer.accumulate_grad_batches=2"]
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    done = lgrpo("fit", *options, f"--run={straight}")
    assert done.returncode == 0, done.stderr

    command = [str(Path(sys.executable).parent / "lgrpo"), "fit", *options, f"--run={broken}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = broken / "metrics" / "version_0" / "metrics.csv"
    end = time.monotonic() + 90
    while not (metrics.exists() and metrics.read_text().count("\n") > 12) and time.monotonic() < end:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == RESUMABLE
    assert "nothing is lost" in out + err
    assert "--ckpt_path last" in out + err
    assert "Traceback" not in err
    stopped_at = torch.load(broken / "checkpoints" / "last.ckpt", weights_only=True)["global_step"]
    assert 10 < stopped_at < 40

    done = lgrpo("fit", *options, f"--run={broken}", "--ckpt_path=last")
    assert done.returncode == 0, done.stderr
    ends = [torch.load(run / "checkpoints" / "last.ckpt", weights_only=True) for run in (straight, broken)]
    assert ends[0]["global_step"] == ends[1]["global_step"] == 40
    for name, tensor in ends[0]["state_dict"].items():
        assert torch.equal(tensor, ends[1]["state_dict"][name]), name
    a, b = read_series(straight), read_series(broken)
    for name in ("rollout/reward", "train/loss", "train/lag", "val/pass@1"):
        assert a[name] == b[name], name
    assert (broken / "config-2.yaml").exists()


def test_going_on_needs_to_know_with_what(tmp_path):
    with pytest.raises(SystemExit, match="say which one with --run"):
        main(["fit", *with_base("tiny.yaml"), "--ckpt_path=last"])
    with pytest.raises(SystemExit, match="there is no checkpoint in"):
        main(["fit", *with_base("tiny.yaml"), f"--run={tmp_path}", "--ckpt_path=last"])


def test_parts_of_the_users_own(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from lgrpo import RolloutCallback\n"
        "from lgrpo.rewards import Reward\n"
        "class Announce(RolloutCallback):\n"
        "    def __init__(self, word: str = 'hello'):\n"
        "        self.word = word\n"
        "    def on_rollout_end(self, trainer, pl_module, batch):\n"
        "        print(self.word, batch.rollout, float(batch.rewards.max()), flush=True)\n"
        "class Long(Reward):\n"
        "    def __init__(self, scale: float = 1.0):\n"
        "        self.scale = scale\n"
        "    def score(self, prompt, completion):\n"
        "        return self.scale * len(completion.token_ids)\n"
    )
    options = [
        *with_base("tiny.yaml"),
        *QUICK,
        "--run=there",
        "--trainer.callbacks+=mine.Announce",
        "--trainer.callbacks.word=ahoy",
        "--data.task.init_args.reward=mine.Long",
        "--data.task.init_args.reward.scale=100",
    ]
    done = lgrpo("fit", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = [line.split() for line in done.stdout.splitlines() if line.startswith("ahoy")]
    assert [int(line[1]) for line in said] == list(range(6))
    assert all(float(line[2]) >= 100 for line in said)
    shown = lgrpo("fit", *options, "--print_config", cwd=tmp_path).stdout
    assert "class_path: mine.Long" in shown
    assert "word: ahoy" in shown


def test_an_overlay_for_speed_keeps_what_the_base_says():
    files = [f"--config={CONFIGS / name}" for name in ("papers/a_gsm8k.yaml", "fast.yaml")]
    optimizer = ParseOnly(files).config.model.optimizer.init_args
    assert (optimizer.lr, optimizer.fused) == (5e-6, True)


class TestPlan:
    def plan(self, capsys, *options):
        main(["plan", *with_base("demo.yaml"), *options])
        lines = capsys.readouterr().out.splitlines()
        return {line.split("  ")[0]: line.split("  ", 1)[1].strip() for line in lines if "  " in line}

    def test_off_policy(self, capsys):
        rows = self.plan(capsys)
        assert rows["schedule"].startswith("v = 10, i = 1: off-policy")
        assert rows["lags that occur"].startswith("0, 1, …, 9 optimizer steps")
        assert rows["whole run"] == "800 rollouts, 800 optimizer steps, 80 syncs, 204,800 completions"
        assert rows["policy"].startswith("223,488 parameters")
        assert "reference" in rows["memory, held"]

    def test_v_by_measurement(self, capsys):
        rows = self.plan(capsys, f"--config={CONFIGS / 'adaptive.yaml'}")
        assert rows["schedule"].startswith("v by measurement, 1 to 50, i = 1")
        assert rows["sync"] == "when tv reaches 0.25, after 1 to 50 rollouts"
        assert rows["lags that occur"] == "0, 1, …, 49 optimizer steps, at most"
        assert "16 to 800 syncs" in rows["whole run"]

    def test_the_lags_are_those_that_occur(self, capsys):
        from tests.helpers import fit

        rows = self.plan(capsys, "--weight_sync.period=3", "--data.reuse=2")
        assert rows["lags that occur"].startswith("0, 1, …, 5 ")
        assert set(fit(v=3, i=2, rollouts=6).recorder.lags) == {0, 1, 2, 3, 4, 5}

    def test_on_policy_offline_and_no_reference(self, capsys):
        options = ["--weight_sync.period=1", "--model.loss.kl_coef=0"]
        rows = self.plan(capsys, *options)
        assert rows["lags that occur"] == "0: every completion is fresh"
        assert "reference" not in rows["memory, held"]
        grpo, dapo = (f"--config={CONFIGS / 'algorithms' / name}.yaml" for name in ("grpo", "dapo"))
        assert "reference 0.9 MiB" in self.plan(capsys, grpo)["memory, held"]
        assert "reference" not in self.plan(capsys, dapo)["memory, held"]
        assert self.plan(capsys, dapo)["zero-variance groups"].startswith("sampled again with other prompts, 4 times")
        rows = self.plan(capsys, "--weight_sync.period=null")
        assert rows["sync"] == "before the first rollout only"

    def test_an_engine_in_what_the_trainer_computes_in(self, capsys):
        vllm, fast = (f"--config={CONFIGS / name}.yaml" for name in ("vllm", "fast"))
        on_gpu = ["--trainer.accelerator=auto", "--trainer.precision=bf16-mixed"]
        assert "engine's copy 0.9 MiB" in self.plan(capsys, *on_gpu)["memory, held"], (
            "the embedded one keeps the policy's"
        )
        assert "engine's copy 0.9 MiB" in self.plan(capsys, vllm)["memory, held"]
        assert "engine's copy 0.4 MiB" in self.plan(capsys, vllm, *on_gpu)["memory, held"]
        own = self.plan(capsys, vllm, *on_gpu, "--data.engine.dtype=float32")
        assert "engine's copy 0.9 MiB" in own["memory, held"]
        assert "engines' 2 copies 0.9 MiB" in self.plan(capsys, fast, *on_gpu)["memory, held"]
        assert "engines' 2 copies 1.7 MiB" in self.plan(capsys, fast)["memory, held"], "on a CPU"

    def test_length_of_a_run_as_lightning_counts_it(self, capsys):
        by_steps = self.plan(capsys, "--trainer.max_epochs=null", "--trainer.max_steps=1000")
        assert by_steps["whole run"].startswith("1000 rollouts, 1000 optimizer steps, 100 syncs")
        odd = self.plan(capsys, "--trainer.max_steps=10", "--data.reuse=3")
        assert odd["whole run"].startswith("4 rollouts, 10 optimizer steps, 1 syncs")
        assert self.plan(capsys, "--trainer.max_epochs=-1")["whole run"].startswith("without end")
        assert "each of 4 devices, about 64 completions" in self.plan(capsys, "--trainer.devices=4")["micro-batches"]

    def test_a_share_of_activations_counts_where_layers_are_compiled(self, capsys):
        share = "--model.policy.activation_memory=0.1"
        whole, plain, less = (
            self.plan(capsys, *options)["memory, in a step"]
            for options in ([], [share], [share, "--model.policy.compile=true"])
        )
        assert whole == plain != less

    def test_a_model_that_cannot_be_reached(self, capsys):
        rows = self.plan(capsys, "--model.policy.name=nobody/nothing", "--model.policy.config=null")
        assert rows["memory"].startswith("not estimated: the model's config cannot be read")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--weight_sync.period=0", "weight_sync"),
        ("--data.reuse=0", "data.reuse"),
        ("--data.group_sise=4", "group_sise"),
        ("--model.loss.centre=two", "centre"),
        ("--data.task=NoSuchTask", "NoSuchTask"),
    ],
)
def test_wrong_options_are_refused_while_parsing(option, message, capsys):
    with pytest.raises(SystemExit):
        main(["fit", *with_base("tiny.yaml"), option])
    assert message in capsys.readouterr().err


def test_help_reads_well():
    text = lgrpo("fit", "--help").stdout
    for line in (
        "i, optimizer steps on each rollout",
        "--run RUN",
        "Folder of the run",
        "--weight_sync",
        "P, prompts in a rollout",
    ):
        assert line in text, line
    assert "lgrpo plan" in lgrpo("--help").stdout
