"""The command line, called as a user calls it."""

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
from lgrpo.cli import is_user_error, main
from lgrpo.commands import COMMANDS, RESUMABLE
from lgrpo.commands.fit import LGRPOCLI
from lgrpo.commands.settings import parse_settings
from lgrpo.functional import named_checksums
from lgrpo.report import read_series
from lgrpo.rewards import FunctionReward
from lgrpo.run.folder import RunFolder
from tests.helpers import tiny_policy

CONFIGS = Path(__file__).parent.parent / "configs"
PAPERS = {f"papers/{name}.yaml" for name in ("a_gsm8k", "a_deepscaler", "b_gsm8k", "b_math")}
BASES = {"on_policy.yaml", "demo.yaml", "tiny.yaml", "quickstart_gsm8k.yaml", "your_own.yaml"} | PAPERS
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
    if name == "turn_advantage.yaml":
        files[0] = "guess_number.yaml"
    own = {
        "your_own.yaml": ["--model.policy.name=nobody/model", "--data.task.train=my.jsonl"],
        "judge.yaml": ["--data.task.reward.url=http://localhost:8000"],
        "distil.yaml": ["--model.loss.regularisers.teacher.name=nobody/teacher"],
    }
    return [*(f"--config={CONFIGS / file}" for file in files), *own.get(name, [])]


def lgrpo(*arguments: str, cwd: Path | None = None, timeout: float = 120) -> subprocess.CompletedProcess:
    command = [str(Path(sys.executable).parent / "lgrpo"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=timeout)


@pytest.mark.parametrize("name", ALL)
def test_every_config_parses_and_builds(name):
    on_cpu = ["--trainer.strategy.class_path=tests.processes.fsdp_on_cpu.FSDPOnCPU"] if name == "fsdp.yaml" else []
    cli = LGRPOCLI([*with_base(name), *on_cpu, "--trainer.accelerator=cpu"], run=False)
    assert cli.trainer.callbacks
    assert cli.model.policy is not None
    assert cli.datamodule.group_size >= 2


@pytest.fixture
def your_own(tmp_path):
    """Return the options for a model and data of the user."""
    policy = tiny_policy()
    policy.build()
    policy.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}>{% endfor %}"
    policy.model.save_pretrained(tmp_path / "model")
    policy.tokenizer.save_pretrained(tmp_path / "model")
    rows = [{"question": str(n), "answer": str(n % 7)} for n in range(8)]
    (tmp_path / "my.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [f"--model.policy.name={tmp_path / 'model'}", f"--data.task.train={tmp_path / 'my.jsonl'}"]
    sizes = ["--data.num_prompts=4", "--data.group_size=2", "--data.sampling.max_tokens=6"]
    return ["--config=your_own", *given, *sizes, "--trainer.accelerator=cpu"]


def test_your_own_model_and_data(your_own, tmp_path):
    main(["fit", *your_own, f"--run={tmp_path / 'run'}"])
    series = read_series(tmp_path / "run")
    assert [step for step, _ in series["rollout/reward"]] == [0, 1]
    assert "val/pass@1" not in series
    main(["fit", *your_own, f"--run={tmp_path / 'validated'}", "--data.task.num_held_out=4"])
    assert [step for step, _ in read_series(tmp_path / "validated")["val/pass@1"]] == [0, 1]


def test_a_run_whose_checkpoints_omit_the_reference(your_own, tmp_path, capsys):
    """The commands that read a checkpoint load the reference, if they need it, with the model."""
    run, own = tmp_path / "run", [*your_own, "--model.loss.kl_coef=0.1", "--data.task.num_held_out=4"]
    main(["fit", *own, f"--run={run}"])
    last = run / "checkpoints" / "last.ckpt"
    first = torch.load(last, weights_only=True)
    assert all(name.startswith("policy.") for name in first["state_dict"])
    main(["fit", *own, f"--run={run}", "--trainer.max_epochs=2", "--ckpt_path=last"])
    assert torch.load(last, weights_only=True)["global_step"] == 2 * first["global_step"]
    main(["export", str(last), str(tmp_path / "exported")])
    assert (tmp_path / "exported" / "model.safetensors").is_file()
    main(["validate", *own, f"--ckpt_path={last}"])
    assert "val/pass@1" in capsys.readouterr().out


def test_your_own_without_model_or_data(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["fit", "--config=your_own", f"--run={tmp_path / 'run'}"])
    assert "lgrpo: data.task: lgrpo.tasks.DatasetTask needs train (--data.task.train …)\n" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"a policy has a policy\.name or a policy\.config"):
        main(["fit", "--config=your_own", "--data.task.train=my.jsonl", f"--run={tmp_path / 'run'}"])


def test_each_schedule_is_a_config():
    def schedule(*names):
        config = LGRPOCLI([f"--config={CONFIGS / n}" for n in ("on_policy.yaml", *names)], run=False)
        (sync,) = [c for c in config.trainer.callbacks if type(c).__name__ == "WeightSync"]
        masked = any(type(c).__name__ == "ZeroVarianceMask" for c in config.trainer.callbacks)
        return sync.period, config.datamodule.reuse, masked

    assert schedule() == (1, 1, False)
    assert schedule("off_policy.yaml") == (10, 1, False)
    assert schedule("reuse.yaml") == (1, 10, False)
    assert schedule("off_policy.yaml", "mask.yaml") == (10, 1, True)
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
    """Run ``configs/demo.yaml`` for a few steps in a subprocess."""
    run = tmp_path_factory.mktemp("runs") / "short"
    done = lgrpo("fit", *with_base("demo.yaml"), *QUICK, f"--run={run}")
    assert done.returncode == 0, done.stdout + done.stderr
    return run, done


def test_contents_of_the_run_folder(finished):
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


def test_the_size_of_a_checkpoint(finished, capsys):
    """The log has that of the file, and the plan nearly the same."""
    run, done = finished
    size = (run / "checkpoints" / "last.ckpt").stat().st_size / 2**20
    lines = re.findall(
        r"Wrote .*/checkpoints/step=(\d+)\.ckpt: ([\d.]+) MiB in [\d.]+ s; training waited [\d.]+ s\.",
        done.stderr,
    )
    assert [int(step) for step, _ in lines] == [3, 6]
    assert float(lines[-1][1]) == pytest.approx(size, abs=0.051)
    main(["plan", *with_base("demo.yaml"), *QUICK])
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("checkpoint")]
    assert float(row.split("about ")[1].split()[0]) == pytest.approx(size, rel=0.1)


def test_the_page_explains_exactly_the_logged_metrics(finished):
    run, _ = finished
    page = (CONFIGS.parent / "tutorials" / "pages" / "metrics.md").read_text(encoding="utf-8")
    explained = {line.split("`")[1] for line in page.splitlines() if line.startswith("| `")}
    logged = {re.sub(r"@\d+(_stderr)?$", r"@k\1", name) for name in read_series(run)}
    only_sometimes = {"rollout/resampled_fraction", "val/maj@k"}  # with dynamic sampling; with more than two samples
    only_sometimes |= {name for name in explained if name.startswith("train/distance_lag_")}  # lags that occur
    only_sometimes |= {"rollout/recorded_fraction"}  # with ReplayEngine
    some_methods = ("effective_sample_size", "gradient_cosine", "gradient_kept", "kl_teacher")
    only_sometimes |= {f"train/{name}" for name in some_methods}
    only_sometimes |= {f"rollout/{name}" for name in ("continued_fraction", "unfinished_groups", "dropped_groups")}
    only_sometimes |= {f"rollout/{name}" for name in ("kept_tokens", "kept_incomplete")}  # with truncated sampling
    only_sometimes |= {f"rollout/late_{kind}" for kind in ("waiting", "joined", "dropped")}  # if rewards are late
    failures = ("failures", "timeouts", "crashes", "memory", "output", "errors")
    only_sometimes |= {"val/reward_failures", *(f"reward/{kind}" for kind in failures)}  # rewards in workers
    only_sometimes |= {f"environment/{kind}" for kind in failures}  # with an environment
    of_episodes = ("turns", "observed_length", "dropped_observations", "turn_signal_fraction", "model_errors")
    only_sometimes |= {f"rollout/{name}" for name in of_episodes}
    only_sometimes |= {name for name in explained if name.startswith("judge/")}  # with a judge
    only_sometimes |= {
        n for n in explained if n.startswith(("monitor/", "calibration/", "sync/", "curriculum/"))
    }  # tested elsewhere
    writes = ("checkpoint_writes", "file_writes", "logger_writes")
    only_sometimes |= {f"fault/{kind}" for kind in ("nonfinite_steps", *writes)}  # after a failure
    only_sometimes |= {f"time/{kind}" for kind in ("monitor", "calibration", "divergence", "environment")}
    only_sometimes |= {"memory/gpu"}
    assert explained == logged | {"val/pass@1"} | only_sometimes


def test_one_point_per_step(finished):
    run, _ = finished
    series = read_series(run)
    assert [step for step, _ in series["rollout/reward"]] == list(range(6))
    assert [step for step, _ in series["val/pass@1"]] == [0, 3, 6]
    assert [value for _, value in series["train/lag"]] == list(range(6))
    assert series["val/pass@1_over_reference"][0][1] == 0.0


def test_completions_file(finished):
    run, _ = finished
    rows = [json.loads(line) for line in (run / "completions.jsonl").read_text().splitlines()]
    assert len(rows) == 8
    assert {"prompt", "completion", "reward", "advantage", "lag", "behaviour_step"} <= rows[0].keys()
    assert all(row["prompt"].endswith(">") and row["lag"] == 0 for row in rows)


@pytest.mark.parametrize(
    "text", ["Answer: yes", "Question: {question}", "- {question}", "# {question}", "Solve {question}"]
)
@pytest.mark.parametrize("between", ["=", None])
def test_strings_are_kept_as_typed(text, between):
    """jsonargparse alone changes the first to ``{'Answer': True}``."""
    option = "--data.task.init_args.template.system" if between else "--data.task.template.system"
    given = [f"{option}={text}"] if between else [option, text]
    config = parse_settings([*with_base("papers/a_gsm8k.yaml"), *given, "--data.task.template.chat=true"])
    assert config.data.task.init_args.template.system == text
    assert config.data.task.init_args.template.chat is True


def test_an_existing_run_folder_is_not_changed(finished, tmp_path):
    run, _ = finished
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    with pytest.raises(SystemExit, match=r"exists already, and nothing in it is overwritten.*--ckpt_path last"):
        main(["fit", *with_base("demo.yaml"), *QUICK, f"--run={run}"])
    assert before == {path: path.stat().st_mtime_ns for path in run.rglob("*")}


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("--data.engine.max_sequences=0", "max_sequences is 0"),
        ("--data.sampling.max_tokens=1000", "max_tokens is 1000"),
        ("--trainer.callbacks=tests.test_cli.FailsAtStart", "not today"),
    ],
)
def test_a_run_that_failed_at_the_start_leaves_no_folder(tmp_path, mistake, message):
    run = f"--run={tmp_path / 'run'}"
    for _ in range(2):
        with pytest.raises((ValueError, RuntimeError), match=message):
            main(["fit", *with_base("demo.yaml"), *QUICK, run, mistake])
    assert not list(tmp_path.glob("run/*"))


@pytest.mark.parametrize("resuming", [False, True])
def test_a_run_locks_its_folder(finished, tmp_path, resuming):
    """The folder is locked even while it is empty."""
    folder = finished[0] if resuming else tmp_path
    locked = RunFolder(folder)
    locked.claim(resuming)
    run = ["fit", *with_base("demo.yaml"), *QUICK, f"--run={folder}"]
    with pytest.raises(SystemExit, match="another process is using the run folder"):
        main([*run, "--ckpt_path=last"] if resuming else run)
    locked.release()
    again = RunFolder(folder)
    again.claim(resuming)
    again.release()


def test_a_user_error_has_no_traceback(tmp_path, monkeypatch):
    """LGRPO_TRACEBACK shows it."""
    wrong = ["fit", *with_base("demo.yaml"), *QUICK, "--data.group_size=1"]
    done = lgrpo(*wrong, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("lgrpo: data.group_size is 1")
    assert not list(tmp_path.glob("runs/*"))
    assert "Traceback" not in done.stderr
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lgrpo", *wrong])
    with pytest.raises(SystemExit, match=r"^lgrpo: data\.group_size is 1"):
        main()
    monkeypatch.setenv("LGRPO_TRACEBACK", "1")
    with pytest.raises(ValueError, match="group_size is 1"):
        main()


def fails(text):
    raise ValueError(text)


def error_of(act):
    try:
        act()
    except Exception as error:
        return error


def test_user_errors():
    assert is_user_error(error_of(lambda: Sampling(max_tokens=0)))
    assert not is_user_error(error_of(lambda: fails("raised outside of lgrpo")))
    assert not is_user_error(error_of(lambda: named_checksums([("a", "no tensor")]))), "a bug inside lgrpo"


def test_an_unknown_command():
    done = lgrpo("reprot", "runs/x")
    assert done.returncode == 1
    assert "there is no command 'reprot'; the commands are fit, validate, test, plan" in done.stderr


def test_ctrl_c_before_the_first_step(tmp_path):
    """Before a callback of lgrpo handles signals, the exit code is the shell's, and no folder is left."""
    command = [str(Path(sys.executable).parent / "lgrpo"), "fit", *with_base("demo.yaml"), f"--run={tmp_path / 'run'}"]
    slow = ["--trainer.callbacks=tests.test_cli.WaitsAtStart"]
    with subprocess.Popen([*command, *slow], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert any("now" in line for line in process.stdout)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130
    assert not (tmp_path / "run").exists()


class WaitsAtStart(L.Callback):
    def on_fit_start(self, trainer, pl_module):
        print("now", flush=True)
        time.sleep(60)


@pytest.mark.parametrize("command", ["validate", "test"])
def test_an_error_without_a_run_folder(command):
    with pytest.raises(ValueError, match="max_sequences is 0"):
        main([command, *with_base("demo.yaml"), *QUICK, "--data.engine.max_sequences=0"])


def test_a_failed_run_keeps_its_folder(tmp_path):
    with pytest.raises(RuntimeError, match="no more"):
        main(["fit", *with_base("demo.yaml"), *QUICK, f"--run={tmp_path}", "--trainer.callbacks=tests.test_cli.Fails"])
    assert (tmp_path / "config.yaml").is_file()
    assert (tmp_path / "syncs.jsonl").is_file()


class FailsAtStart(L.Callback):
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


def test_a_run_resumed_after_ctrl_c_is_exact(tmp_path):
    """A process that was interrupted and resumed ends with the weights of one that was not interrupted."""
    options = [*with_base("tiny.yaml"), *QUICK, "--data.num_rollouts=10", "--trainer.accumulate_grad_batches=2"]
    straight, interrupted = tmp_path / "straight", tmp_path / "interrupted"
    main(["fit", *options, f"--run={straight}"])

    command = [str(Path(sys.executable).parent / "lgrpo"), "fit", *options, f"--run={interrupted}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = interrupted / "metrics" / "version_0" / "metrics.csv"
    end = time.monotonic() + 90
    while not (metrics.exists() and metrics.read_text().count("\n") > 8) and time.monotonic() < end:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == RESUMABLE
    assert "nothing is lost" in out + err
    assert "--ckpt_path last" in out + err
    assert "Traceback" not in err
    stopped_at = torch.load(interrupted / "checkpoints" / "last.ckpt", weights_only=True)["global_step"]
    assert 6 < stopped_at < 20

    done = lgrpo("fit", *options, f"--run={interrupted}", "--ckpt_path=last")
    assert done.returncode == 0, done.stderr
    ends = [torch.load(run / "checkpoints" / "last.ckpt", weights_only=True) for run in (straight, interrupted)]
    assert ends[0]["global_step"] == ends[1]["global_step"] == 20
    for name, tensor in ends[0]["state_dict"].items():
        assert torch.equal(tensor, ends[1]["state_dict"][name]), name
    a, b = read_series(straight), read_series(interrupted)
    for name in ("rollout/reward", "train/loss", "train/lag", "val/pass@1"):
        assert a[name] == b[name], name
    assert (interrupted / "config-2.yaml").exists()


def test_resuming_needs_a_run_folder(tmp_path):
    with pytest.raises(SystemExit, match="name its folder with --run"):
        main(["fit", *with_base("tiny.yaml"), "--ckpt_path=last"])
    with pytest.raises(SystemExit, match="there is no checkpoint in"):
        main(["fit", *with_base("tiny.yaml"), f"--run={tmp_path}", "--ckpt_path=last"])


@pytest.mark.slow("starts the command for each case")
def test_classes_of_the_user(tmp_path):
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


def test_a_function_as_reward(tmp_path):
    (tmp_path / "mine.py").write_text("def long(text, row):\n    return 100 * len(text)\n")
    given = ["--data.task.init_args.reward", "mine.py:long"]
    done = lgrpo("fit", *with_base("tiny.yaml"), *QUICK, "--run=there", *given, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Starting 2 reward workers for FunctionReward.") == 1
    rows = [json.loads(line) for line in (tmp_path / "there" / "completions.jsonl").read_text().splitlines()]
    assert max(row["reward"] for row in rows) >= 100


@pytest.mark.parametrize(
    "reward",
    ["mine.py:long", "{class_path: lgrpo.rewards.WeightedSum, init_args: {rewards: {a: mine.py:long}}}"],
)
def test_a_function_as_reward_in_a_config(tmp_path, monkeypatch, reward):
    (tmp_path / "mine.py").write_text("def long(text, row):\n    return 100 * len(text)\n")
    (tmp_path / "overlay.yaml").write_text(f"data:\n  task:\n    init_args:\n      reward: {reward}\n")
    monkeypatch.chdir(tmp_path)
    built = LGRPOCLI([f"--config={CONFIGS / 'tiny.yaml'}", "--config=overlay.yaml"], run=False)
    found = built.datamodule.task.reward
    assert isinstance(found.rewards["a"] if "WeightedSum" in reward else found, FunctionReward)


def test_an_overlay_keeps_other_settings_of_the_base():
    files = [f"--config={CONFIGS / name}" for name in ("papers/a_gsm8k.yaml", "fast.yaml")]
    optimizer = parse_settings(files).model.optimizer.init_args
    assert (optimizer.lr, optimizer.fused) == (5e-6, True)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--data.group_sise=4", "there is no setting data.group_sise: did you mean data.group_size?"),
        ("--config={data: {grup_size: 4}}", "there is no setting data.grup_size: did you mean data.group_size?"),
        ("--config={xyz: 4}", "there is no setting xyz; --help lists all of them"),
        (
            "--config={weight_sync: {perod: 3}}",
            "weight_sync (lgrpo.WeightSync) has no setting perod: did you mean period?",
        ),
        ("--data.group_size=four", "data.group_size is 'four'; it must be an int"),
        ("--weight_sync.period=2.5", "weight_sync.period is '2.5'; it must be an int or a dict or null"),
        (
            "--model.loss.centre=two",
            "model.loss.centre is 'two'; it must be one of 'one', 'proximal', 'proximal_multiplicative'",
        ),
        (
            "--data.task=NoSuchTask",
            "data.task: there is no class NoSuchTask. Give its module and name, such as lgrpo.losses.ClippedLoss",
        ),
        (
            "--model.loss=nowhere.Loss",
            "model.loss: there is no class nowhere.Loss (No module named 'nowhere'). Give its module and name, such as "
            "lgrpo.losses.ClippedLoss",
        ),
        (
            "--data.task.reward=lgrpo.rewards.Reward",
            "data.task.reward: lgrpo.rewards.Reward is an abstract class: name a subclass of it with score",
        ),
        (
            "--data.task=lgrpo.tasks.DatasetTask",
            "data.task: lgrpo.tasks.DatasetTask needs reward, train (--data.task.reward … --data.task.train …)",
        ),
        ("--model.optimizer.lr=low", "model.optimizer.lr is 'low'; it must be a float"),
        ("stray", "unexpected argument 'stray': every setting has the form --NAME VALUE"),
    ],
)
def test_wrong_options_are_answered_in_one_line(option, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["fit", *with_base("tiny.yaml"), option])
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"lgrpo: {message}\n"


def test_an_overlay_without_a_base(capsys):
    with pytest.raises(SystemExit):
        main(["fit", f"--config={CONFIGS / 'vllm.yaml'}"])
    assert capsys.readouterr().err.startswith("lgrpo: data.task is not set: add a complete config, such as demo")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--weight_sync.period=0", "weight_sync.period is 0; it must be at least 1: it is a number of rollouts"),
        ("--trainer.callbacks.every=0", "RolloutLog.every is 0; it must be at least 1"),
        ("--model.policy.lora.rank=0", "lora.rank is 0; it must be at least 1"),
        ("--model.loss.clip_low=-1", "clip_low is -1.0; it must be at least 0 and at most 1: no ratio is negative"),
        ("--model.loss.init_args.clip_high=-1", "clip_high is -1.0; it must be at least 0"),
    ],
)
def test_an_error_of_a_class_is_its_sentence(option, message, tmp_path):
    """Also where the type of the setting has several classes or None."""
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$") as caught:
        main(["fit", *with_base("tiny.yaml"), option, f"--run={tmp_path / 'run'}"])
    assert is_user_error(caught.value)


OTHER_TASK = "{data: {task: {class_path: lgrpo.tasks.DatasetTask, init_args: {train: x.jsonl, reward: ExactMatch}}}}"


@pytest.mark.parametrize(
    "options",
    [
        ["--data.task=lgrpo.tasks.DatasetTask", "--data.task.train=x.jsonl", "--data.task.reward=ExactMatch"],
        [f"--config={OTHER_TASK}"],
    ],
    ids=["options", "config"],
)
def test_another_task_starts_from_its_own_defaults(options):
    """``num_held_out`` of the base's task is a setting of this one too."""
    settings = parse_settings([*with_base("tiny.yaml"), *options]).data.task.init_args
    assert (settings.num_held_out, settings.template.prompt, settings.train) == (0, "{question}", "x.jsonl")
    same = parse_settings([*with_base("tiny.yaml"), "--data.task=SortDigits", "--data.task.seed=1"])
    assert same.data.task.init_args.num_held_out == 128


def test_another_optimizer_keeps_the_learning_rate():
    settings = parse_settings([*with_base("tiny.yaml"), "--model.optimizer=torch.optim.SGD"])
    assert settings.model.optimizer.init_args.lr == 6e-4


@pytest.mark.parametrize("command", ["fit", "plan", "validate"])
def test_a_model_folder_without_a_model(command, tmp_path):
    made = ["--model.policy.config=null", "--model.policy.characters=null", f"--model.policy.name={tmp_path}"]
    with pytest.raises(FileNotFoundError, match=r"a folder without config\.json") as caught:
        main([command, *with_base("tiny.yaml"), *made, f"--run={tmp_path / 'run'}"])
    assert is_user_error(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--trainer.accelerator=gpu"],
            r"trainer\.accelerator is gpu, but PyTorch finds no GPU: set it to cpu",
        ),
        (["--trainer.accelerator=cpu", "--trainer.devices=0"], r"`Trainer\(devices='0'\)` value is not a valid input"),
    ],
)
def test_devices_that_do_not_exist(options, message, tmp_path):
    with pytest.raises(ValueError, match=message) as caught:
        main(["fit", *with_base("tiny.yaml"), *options, f"--run={tmp_path / 'run'}"])
    assert is_user_error(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["weight_sync.period", "data.reuse"])
def test_a_setting_out_of_range_leaves_no_run_folder(name, tmp_path):
    with pytest.raises(ValueError, match=f"{name} is 0; it must be at least 1"):
        main(["fit", *with_base("tiny.yaml"), f"--{name}=0", f"--run={tmp_path / 'run'}"])
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match=f"{name} is 0; it must be at least 1"):
        main(["plan", *with_base("tiny.yaml"), f"--{name}=0"])


def test_help_reads_well(capsys):
    def shown(option):
        with pytest.raises(SystemExit) as ended:
            main(["fit", option])
        assert ended.value.code == 0
        return capsys.readouterr().out

    text = shown("--help")
    for line in (
        "i, optimizer steps on each rollout",
        "--run RUN",
        "Folder of the run",
        "--weight_sync",
        "P, prompts in a rollout",
        "Temperature of the softmax",
    ):
        assert line in text, line
    assert {"--data.engine", "--model.loss"} <= {*text.split()}
    lightning = {"--trainer.callbacks", "--checkpoint.save_last"}
    assert not lightning & {*text.split()}
    assert "--help_all also lists Lightning's settings" in text.splitlines()[-1]
    assert lightning <= {*shown("--help_all").split()}


@pytest.mark.slow("starts the command for each case")
def test_help_of_a_class_and_short_names():
    shown = lgrpo("fit", "--data.engine.help", "ReplayEngine").stdout
    assert "--data.engine.path PATH" in shown
    settings = parse_settings([*with_base("tiny.yaml"), "--trainer.callbacks+=RolloutLog"])
    assert settings.trainer.callbacks[-1].class_path.endswith(".RolloutLog")


def test_help_lists_every_command():
    lines = lgrpo("--help").stdout.splitlines()
    listed = {line.split()[0]: line for line in lines if line.startswith("  ")}
    for name, command in COMMANDS.items():
        assert listed[name].endswith(command.summary)


LIGHT_HELP = [[], *([name] for name, command in COMMANDS.items() if command.module != "fit")]


@pytest.mark.parametrize("command", LIGHT_HELP, ids=lambda command: " ".join(command) or "lgrpo")
def test_help_imports_nothing_heavy(command):
    code = f"""
import sys
from lgrpo.cli import main
try:
    main({[*command, "--help"]!r})
except SystemExit as end:
    assert end.code == 0
heavy = {{"torch", "lightning", "transformers", "torchmetrics", "datasets", "pyarrow", "numpy"}} & sys.modules.keys()
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(" ".join(["usage: lgrpo", *command]))
    assert "example:" in done.stdout


class TestFoldersThatCannotBeWritten:
    """Permission bits do not bind root, but a file in place of a folder and ``/proc`` do."""

    @pytest.fixture(params=["below a file", "/proc"])
    def folder(self, tmp_path, request):
        (tmp_path / "file").write_text("x")
        return tmp_path / "file" / "run" if request.param == "below a file" else Path("/proc/lgrpo-run")

    @pytest.fixture(autouse=True)
    def no_model(self, monkeypatch):
        monkeypatch.setattr(LGRPOCLI, "instantiate_classes", lambda self: pytest.fail("the model would be loaded"))

    def test_fit(self, folder):
        with pytest.raises(SystemExit, match=rf"^lgrpo: nothing can be written to the folder {folder} \(.*: choose an"):
            main(["fit", *with_base("tiny.yaml"), f"--run={folder}"])

    def test_fit_with_a_folder_for_checkpoints(self, folder, tmp_path):
        with pytest.raises(SystemExit, match=f"nothing can be written to the folder {folder}"):
            main(
                [
                    "fit",
                    *with_base("tiny.yaml"),
                    f"--run={tmp_path / 'run'}",
                    f"--checkpoint.dirpath={folder}",
                ]
            )
        assert not (tmp_path / "run").exists()

    def test_validate_with_files_of_results(self, folder):
        with pytest.raises(SystemExit, match=f"nothing can be written to the folder {folder}"):
            main(["validate", *with_base("tiny.yaml"), f"--run={folder}", "--data.evaluation.results=jsonl"])
