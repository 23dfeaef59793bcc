"""Check the improvement monitor: its metrics are right, and it does not change the run."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lgrpo import ClippedLoss, ImprovementMonitor, ReferenceRefresh, RolloutCallback, WeightSync, ZeroVarianceMask
from lgrpo import functional as F
from lgrpo.callbacks import ExactResume
from lgrpo.report import read_series
from lgrpo.tasks import SortDigits
from tests.helpers import LowDigits, build, fit, largest_difference

SETTINGS = {"v": 3, "i": 2, "rollouts": 6, "learning_rate": 0.5}
VALIDATES = {"limit_val_batches": 1.0}


def monitored(folder, every=1, num_held_out=8, callbacks=(), ckpt_path=None, trainer=None, **settings):
    logger = CSVLogger(str(folder), name="metrics")
    options = VALIDATES | {"logger": logger, "accumulate_grad_batches": 2, "default_root_dir": str(folder)}
    monitor = ImprovementMonitor(every, num_held_out)
    arguments = SETTINGS | settings | {"callbacks": [monitor, *callbacks], "trainer": options | (trainer or {})}
    return fit(**arguments, ckpt_path=ckpt_path)


def test_the_run_has_identical_bits(tmp_path):
    def loss():
        return ClippedLoss(0.05, 0.05, centre="proximal", kl_coef=0.1)

    masks = [ZeroVarianceMask(0.2), ReferenceRefresh(period=2)]
    plain = fit(**SETTINGS, loss=loss(), callbacks=masks, trainer=VALIDATES | {"accumulate_grad_batches": 2})
    run = monitored(tmp_path, loss=loss(), callbacks=masks)
    assert largest_difference(plain.weights, run.weights) == 0
    assert largest_difference(plain.weights, build().weights) > 0
    for a, b in zip(plain.recorder.rollouts, run.recorder.rollouts, strict=True):
        assert torch.equal(a.tokens, b.tokens)
        assert torch.equal(a.behaviour_logprobs, b.behaviour_logprobs)
    assert plain.recorder.lags == run.recorder.lags
    assert [r.step for r in plain.data.engine.state.ledger] == [r.step for r in run.data.engine.state.ledger]


class SavedStates(RolloutCallback):
    """Weights of the policy before every optimizer step."""

    def __init__(self):
        self.states = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self.states.append({n: p.detach().clone() for n, p in pl_module.policy.state_dict().items()})


def test_metrics_use_the_policy_after_the_last_step(tmp_path):
    """Recompute them from saved weights, rollout by rollout."""
    saved = SavedStates()
    run = monitored(tmp_path, callbacks=[saved])
    series = {name: dict(points) for name, points in read_series(tmp_path).items()}
    assert sorted(series["monitor/gain"]) == [1, 3, 5, 7, 9, 11]  # the row of each rollout's last step
    states = [*saved.states, {n: p.clone() for n, p in run.module.policy.state_dict().items()}]
    for k, batch in enumerate(run.recorder.rollouts):
        ratios, tokens = [], []
        for state in (states[2 * k + 2], states[2 * k]):  # after its two steps, and before them
            run.module.policy.load_state_dict(state)
            logprobs, _ = run.module.policy(batch.tokens, batch.completion_mask, 1.0)
            per_token = (logprobs - batch.behaviour_logprobs).detach().double() * batch.completion_mask
            tokens.append(per_token)
            ratios.append(per_token.sum(1).view(4, 4))
        terms = F.improvement_terms(*ratios, batch.rewards.view(4, 4).double())
        row = 2 * k + 1
        rewards = batch.rewards.view(4, 4).double()
        trm = F.trust_region_terms(tokens[0], batch.behaviour_logprobs, batch.completion_mask, rewards)
        varied = F.has_reward_variance(batch.rewards, 4).view(4, 4)[:, 0]
        bound = (trm["surrogate_trm"] - trm["penalty_trm"] - terms["tv_proximal"])[varied]
        assert series["monitor/bound_trm"][row] == pytest.approx(float(bound.mean()), rel=1e-3, abs=1e-4)
        assert series["monitor/bound_trm_informative"][row] == float((bound > -1).double().mean())
        assert series["monitor/penalty_trm"][row] == pytest.approx(float(trm["penalty_trm"].mean()), rel=1e-3, abs=1e-4)
        assert series["monitor/gain"][row] == pytest.approx(float(terms["gain"].mean()), rel=1e-3, abs=1e-5)
        for name in ("gain_rollout", "tv", "tv_proximal", "tv_pinsker", "s", "coefficient_bernoulli", "bound_1"):
            assert series[f"monitor/{name}"][row] == pytest.approx(float(terms[name].mean()), rel=1e-3, abs=1e-4)
        assert series["monitor/gain_stderr"][row] == pytest.approx(float(terms["gain"].std() / 2), rel=1e-3, abs=1e-5)
        w = ratios[0].flatten().exp()
        assert series["monitor/chi_squared"][row] == pytest.approx(float(((w - 1) ** 2).mean()), rel=1e-3)
        assert series["monitor/ratio_max"][row] == pytest.approx(float(w.max()), rel=1e-3)
        # one rollout is trained on at two consecutive lags
        first = 2 * (k % 3)
        buckets = {0: "0", 1: "1", 2: "2-3", 3: "2-3", 4: "4-7", 5: "4-7"}
        expected = {buckets[first]: 0.5, buckets[first + 1]: 0.5} if first == 0 else {buckets[first]: 1.0}
        for name in ("0", "1", "2-3", "4-7", "8-15"):
            assert series[f"monitor/lag_{name}"][row] == pytest.approx(expected.get(name, 0.0))
        if first == 0:
            assert series["monitor/tv_proximal"][row] < 1e-4
    assert min(series["time/monitor"].values()) > 0


class HeldOut(RolloutCallback):
    """Samples of held-out prompts at each sync."""

    def __init__(self):
        self.groups = []

    def on_rollout_end(self, trainer, pl_module, batch):
        if trainer.datamodule.engine.state.step == trainer.global_step:
            self.groups.append(trainer.datamodule.sample_held_out(8))


def test_calibration_compares_the_prediction_with_new_samples(tmp_path):
    """Recompute it from separate samples of old and new weights."""
    saved, held_out = SavedStates(), HeldOut()
    run = monitored(tmp_path, callbacks=[saved, held_out], rollouts=9)
    series = {name: dict(points) for name, points in read_series(tmp_path).items()}
    assert sorted(series["calibration/predicted"]) == [6, 12]  # at each sync but the first
    groups = held_out.groups
    assert len(groups) == 3
    run.module.policy.load_state_dict(saved.states[6])
    logprobs, _ = run.module.policy(groups[0].tokens, groups[0].completion_mask, 1.0)
    log_ratio = ((logprobs - groups[0].behaviour_logprobs) * groups[0].completion_mask).sum(1).detach()
    old, new = (group.rewards.view(8, 4).double() for group in groups[:2])
    predicted = F.expected_gain(log_ratio.view(8, 4).double(), old)
    assert series["calibration/predicted"][6] == pytest.approx(float(predicted.mean()), rel=1e-3, abs=1e-5)
    assert series["calibration/realised"][6] == pytest.approx(float(new.mean() - old.mean()), abs=1e-6)
    assert series["calibration/reward"][12] == pytest.approx(float(groups[2].rewards.mean()), abs=1e-6)
    questions = {row["question"] for row in SortDigits(num_digits=2, num_held_out=20).rows("validation")}
    is_prompt = groups[0].attention_mask & ~groups[0].completion_mask
    prompts = [run.data.tokenizer.decode(row[mask]) for row, mask in zip(groups[0].tokens, is_prompt, strict=True)]
    assert len(set(prompts)) == 8
    assert {text.removesuffix(">") for text in prompts} <= questions


def saving(folder):
    return ModelCheckpoint(folder / "ckpt", filename="{step}", every_n_train_steps=1, save_top_k=-1)


def test_resume_from_every_step(tmp_path):
    """A resumed run logs the same metrics as one that was not interrupted."""
    exact = {"callbacks": [ExactResume()], "every": 2}
    checkpoints = {"callbacks": [ExactResume(), saving(tmp_path)], "trainer": {"enable_checkpointing": True}}
    straight = monitored(tmp_path / "straight", every=2, **checkpoints)
    expected = read_series(tmp_path / "straight")
    names = [n for n in expected if n.startswith(("monitor/", "calibration/"))]
    assert len(expected["calibration/realised"]) == 1
    for step in (1, 2, 3, 6, 7, 11):
        folder = tmp_path / f"from-{step}"
        run = monitored(folder, ckpt_path=str(tmp_path / "ckpt" / f"step={step}.ckpt"), **exact)
        assert largest_difference(straight.weights, run.weights) == 0
        got = read_series(folder)
        for name in names:
            later = [point for point in expected[name] if point[0] >= step]
            assert got.get(name, []) == later, f"{name} from step {step}"


def test_it_can_be_added_to_a_resumed_run(tmp_path):
    trainer = VALIDATES | {"accumulate_grad_batches": 2, "enable_checkpointing": True}
    fit(**SETTINGS, callbacks=[ExactResume(), saving(tmp_path)], trainer=trainer)
    monitored(tmp_path, callbacks=[ExactResume()], ckpt_path=str(tmp_path / "ckpt" / "step=5.ckpt"))
    series = read_series(tmp_path)
    assert [step for step, _ in series["monitor/gain"]] == [
        7,
        9,
        11,
    ]  # without the partly trained one
    assert "calibration/predicted" not in series  # it saw only one sync


def test_rewards_outside_the_range_of_the_theorem(tmp_path):
    class Marks(LowDigits):
        def score(self, prompt, completion):
            return 10 * super().score(prompt, completion)

    task = SortDigits(num_digits=2, num_held_out=20, reward=Marks())
    with pytest.warns(UserWarning, match=r"rewards outside \[0, 1\]"):
        monitored(tmp_path, rollouts=2, data={"task": task})
    names = read_series(tmp_path).keys()
    assert "monitor/gain" in names
    assert not any(name.startswith("monitor/bound") for name in names)


@pytest.mark.slow("starts two ranks")
def test_two_processes_give_the_metrics_of_one(tmp_path):
    rows = {}
    for devices in (1, 2):
        out = tmp_path / f"{devices}.pt"
        command = [sys.executable, "-m", "tests.processes.two_monitors", str(devices), str(out)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
        rows[devices] = torch.load(out)
    one, two = rows[1], rows[2]
    assert two["world_size"] == 2
    assert one["syncs"] == two["syncs"]
    assert 1 < len(one["syncs"]) < 6
    names = {name for name in one["logged"] if name.startswith(("monitor/", "calibration/", "sync/"))}
    assert {"monitor/gain_stderr", "monitor/ratio_q10", "monitor/lag_1", "calibration/error_stderr"} <= names
    for name in names:
        assert one["logged"][name] == pytest.approx(two["logged"][name], rel=2e-3, abs=2e-4), name


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ImprovementMonitor(every=0), "every is 0"),
        (lambda: ImprovementMonitor(num_held_out=-1), "num_held_out is -1"),
        (lambda: ImprovementMonitor(clip_low=1.5), r"clip_low is 1\.5"),
        (lambda: ImprovementMonitor(eps=0.0), r"eps is 0\.0"),
    ],
)
def test_settings(make, message):
    with pytest.raises(ValueError, match=message):
        make()


class WithoutValidation(SortDigits):
    def rows(self, split):
        return super().rows(split) if split == "train" else []


def test_a_task_without_held_out_prompts():
    task = WithoutValidation(num_digits=2, num_held_out=20, reward=LowDigits())
    with pytest.raises(ValueError, match="no held-out prompts: the task has no validation set"):
        fit(callbacks=[ImprovementMonitor(1, 8)], data={"task": task})


def test_the_order_of_callbacks_does_not_matter(tmp_path):
    def run(folder, order):
        callbacks = [WeightSync(3), ImprovementMonitor(1, 8), ZeroVarianceMask(0.2)]
        trainer = VALIDATES | {"logger": CSVLogger(str(folder), name="metrics")}
        fit(**SETTINGS | {"v": 0}, callbacks=callbacks[::order], trainer=trainer)
        return read_series(folder)

    a, b = run(tmp_path / "a", 1), run(tmp_path / "b", -1)
    assert a["monitor/gain"] == b["monitor/gain"]
    assert a["calibration/predicted"] == b["calibration/predicted"]
