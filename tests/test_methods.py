"""Check that every named method trains, and that users can replace parts of it."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from jsonargparse import ActionConfigFile

from lgrpo import ClippedLoss, Sampling, ZeroVarianceMask
from lgrpo.advantages import BatchMean, BatchStd, ComposedAdvantage, DropNegatives
from lgrpo.callbacks import OverlongMask
from lgrpo.commands.fit import LGRPOCLI
from lgrpo.commands.settings import parse_settings
from lgrpo.data import DynamicSampling
from lgrpo.functional import has_reward_variance
from lgrpo.losses import ComposedLoss, EntropyBonus, MinClip
from lgrpo.rewards import ExactMatch, OverlongPenalty, Reward
from lgrpo.tasks import SortDigits
from tests.helpers import Logged, fit, largest_difference, tiny_policy

CONFIGS = Path(__file__).parent.parent / "configs"
METHODS = sorted(path.stem for path in (CONFIGS / "algorithms").glob("*.yaml"))
NAMED = """grpo off_policy_grpo off_policy_grpo_eq6 reinforce rec_oneside_is rec_oneside_nois rec_twoside_is
rec_twoside_nois rec_ring_is rec_ring_nois rec_gspo_is rec_gspo_nois rec_oneside_wide red_drop red_weight
red_weight_adaptive opmd opmd_log_mean_exp opmd_kimi asymre dr_grpo dapo gspo gmpo cispo rloo reinforce_plus_plus maxrl
topr decoupled_ppo tis_grpo mis_grpo m2po dppo_tv dppo_kl sapo vespo trm icepop tis_grpo_sequence tis_grpo_geometric
geo_rs_grpo k3_rs_grpo luspo gdpo rl_zvp mcpo opo estr a3po mu_grpo vcpo clip_cov kl_cov gac gpg"""


def test_the_list_of_methods_is_complete():
    assert sorted(NAMED.split()) == METHODS


@pytest.mark.parametrize("heading", ["The named methods", "Papers, and who else has the methods"])
def test_the_page_has_a_row_for_every_method(heading):
    page = (CONFIGS.parent / "tutorials" / "pages" / "methods.md").read_text(encoding="utf-8")
    section = page.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", " ".join(row[0] for row in rows))) == METHODS
    assert all(len(row) == 3 and all(cell.strip(" |") for cell in row) for row in rows)


def demonstration(folder, *options):
    """Build the demonstration with three digits and eight prompts per rollout."""
    return LGRPOCLI(
        [
            f"--config={CONFIGS / 'demo.yaml'}",
            f"--run={folder}",
            *options,
            "--data.task.init_args.num_digits=3",  # not 10,000 prompts to tokenise
            "--data.num_prompts=8",
            "--trainer.max_epochs=1",
            "--trainer.limit_val_batches=0",
            "--trainer.enable_progress_bar=false",
            "--trainer.enable_checkpointing=false",
            "--trainer.logger=false",
        ],
        run=False,
    )


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """Return the weights of the demonstration's policy after its warm start, when rewards have variance."""
    callbacks = "--trainer.callbacks=[{class_path: lgrpo.callbacks.SupervisedWarmStart, init_args: {num_steps: 26}}]"
    cli = demonstration(tmp_path_factory.mktemp("warm"), callbacks, "--data.num_rollouts=1")
    cli.trainer.fit(cli.model, cli.datamodule)
    return {name: p.detach().clone() for name, p in cli.model.policy.state_dict().items()}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.slow("trains each method")
def test_steps_on_the_demonstration(method, warm, tmp_path):
    overlay = f"--config={CONFIGS / 'algorithms' / method}.yaml"
    options = ("--weight_sync.period=3", "--data.num_rollouts=8", "--trainer.callbacks=[]")
    cli = demonstration(tmp_path, overlay, *options)
    logged = Logged()
    cli.trainer.callbacks.append(logged)
    cli.model.policy.build()
    cli.model.policy.load_state_dict(warm)
    cli.trainer.fit(cli.model, cli.datamodule)
    assert [row["train/lag"] for row in logged.rows] == [k % 3 for k in range(8)]
    assert all(math.isfinite(row["train/loss"]) for row in logged.rows)
    moved = [p for name, p in cli.model.policy.state_dict().items() if not torch.equal(p, warm[name])]
    assert moved
    assert all(p.isfinite().all() for p in moved)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.slow("parses the command line for each method")
def test_overlays_replace_each_other_completely(method, monkeypatch):
    """The config of a method over that of another is the first method's."""
    others = [other for other in OTHERS if other != method]
    own, *after_others = settings_after_each(method, others, monkeypatch)
    for other, settings in zip(others, after_others, strict=True):
        assert settings == own, other


OTHERS = ("tis_grpo", "red_weight_adaptive", "dapo", "off_policy_grpo", "grpo", "vcpo")


def without_empty(value):
    """Return settings without empty dictionaries: a class may have no ``init_args``, or empty ones."""
    if isinstance(value, dict):
        return {name: without_empty(other) for name, other in value.items() if other != {}}
    return [without_empty(other) for other in value] if isinstance(value, list) else value


def settings_after_each(method, others, monkeypatch):
    """Parse the config of a method, and again after that of each other method, in one command line.

    Return the settings after each config of the method. Parsing a command line for each other method would take four
    times as long, most of it for what does not change.
    """
    seen, apply = [], ActionConfigFile.apply_config

    def record(parser, settings, key, path):
        apply(parser, settings, key, path)
        if path.endswith(f"/{method}.yaml"):
            found = settings.clone().as_dict()
            if method not in ("off_policy_grpo", "off_policy_grpo_eq6"):
                found.pop("weight_sync")  # only these two methods set v
            found.pop("config")
            seen.append(json.dumps(without_empty(found), sort_keys=True, default=str))

    monkeypatch.setattr(ActionConfigFile, "apply_config", staticmethod(record))
    names = [method, *(name for other in others for name in (other, method))]
    parse_settings(
        [f"--config={CONFIGS / 'tiny'}.yaml", *(f"--config={CONFIGS / 'algorithms' / n}.yaml" for n in names)]
    )
    return seen


@pytest.mark.parametrize("method", ["dppo_kl", "vespo", "trm", "k3_rs_grpo", "luspo", "estr", "a3po", "mu_grpo"])
@pytest.mark.slow("trains twice")
def test_micro_batches_and_packed_rows_do_not_matter(method, tmp_path):
    """Packed rows in one micro-batch, and padded rows in four, over two passes with stale samples."""
    overlay = f"--config={CONFIGS / 'algorithms' / method}.yaml"
    loss = demonstration(tmp_path, overlay).model.loss
    settings = {"rollouts": 4, "v": 2, "i": 2, "learning_rate": 0.3, "loss": loss}
    packed = fit(**settings, policy=tiny_policy(attention="packed"))
    padded = fit(**settings, policy=tiny_policy(attention="sdpa"), trainer={"accumulate_grad_batches": 4})
    start = fit(**settings | {"learning_rate": 0.0})
    assert largest_difference(packed.weights, padded.weights) < 5e-6
    assert largest_difference(packed.weights, start.weights) > 0.05


OWN_LOSS = (CONFIGS.parent / "tutorials" / "pages" / "own_loss.md").read_text(encoding="utf-8")


def write_own_loss(folder):
    """Write the files that tutorials/pages/own_loss.md shows."""
    own, *rest = re.findall(r"```python\n(.*?)```", OWN_LOSS, re.S)
    (folder / "mine.py").write_text(own + "\n\n" + rest[0])
    (folder / "test_mine.py").write_text(rest[1])


def test_the_page_on_your_own_loss(tmp_path, monkeypatch):
    write_own_loss(tmp_path)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "test_mine.py"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert "2 passed" in done.stdout, done.stdout + done.stderr
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    options = ["--model.loss=mine.SmoothSequences", "--model.loss.width=0.5", "--reference_refresh=null"]
    loss = LGRPOCLI([f"--config={CONFIGS / 'tiny.yaml'}", *options, "--trainer.logger=false"], run=False).model.loss
    assert loss.width == 0.5
    runs = [fit(rollouts=4, v=2, loss=loss, trainer={"accumulate_grad_batches": number}) for number in (1, 2)]
    assert largest_difference(*(run.weights for run in runs)) < 1e-6
    start = fit(rollouts=4, v=2, loss=loss, learning_rate=0.0)
    assert largest_difference(start.weights, runs[0].weights) > 1e-4


def test_a_users_gate(tmp_path, monkeypatch, capsys):
    write_own_loss(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    options = [
        f"--config={CONFIGS / 'tiny.yaml'}",
        f"--config={CONFIGS / 'algorithms' / 'reinforce'}.yaml",
        "--model.loss.gate=mine.OnlyUnlikely",
        "--model.loss.gate.below=0.07",
    ]
    with pytest.raises(SystemExit):
        LGRPOCLI([*options, "--print_config"], run=False)
    assert "class_path: mine.OnlyUnlikely\n        init_args:\n          below: 0.07" in capsys.readouterr().out
    loss = LGRPOCLI([*options, "--trainer.logger=false"], run=False).model.loss
    assert type(loss.gate).__name__ == "OnlyUnlikely"
    run = fit(rollouts=4, v=2, loss=loss)
    assert all(math.isfinite(row["train/loss"]) for row in run.logged)
    assert any(row["train/clip_fraction_low"] + row["train/clip_fraction_high"] > 0 for row in run.logged)


@pytest.mark.slow("trains nine times")
class TestDataShaping:
    class Often(Reward):
        """Reward of four in five completions, whatever the prompt: many groups of four have no variance."""

        is_inline = True  # a process for it takes longer to start than a run

        def score(self, prompt, completion):
            return float(completion.token_ids[0] > 4)

    def test_dynamic_sampling_replaces_groups_without_variance(self):
        task = self.task()
        plain = fit(rollouts=4, v=2, data={"task": task})
        dynamic = fit(rollouts=4, v=2, data={"task": task, "dynamic_sampling": DynamicSampling(max_rounds=20)})
        zero_variance = [~has_reward_variance(b.rewards, 4) for b in plain.recorder.rollouts]
        assert any(rows.any() for rows in zero_variance)
        for before, after in zip(plain.recorder.rollouts[:1], dynamic.recorder.rollouts[:1], strict=True):
            kept = has_reward_variance(before.rewards, 4)
            assert torch.equal(before.positions[kept], after.positions[kept])  # groups with variance are kept
            assert (after.positions[~kept] >= 2**40).all()
        for batch, row in zip(dynamic.recorder.rollouts, dynamic.logged, strict=True):
            assert has_reward_variance(batch.rewards, 4).all()
            assert len(batch) == 16
            assert row["rollout/zero_variance_fraction"] == 0
        assert dynamic.logged[0]["rollout/resampled_fraction"] > 0
        assert dynamic.recorder.lags == plain.recorder.lags

    def test_dynamic_sampling_uses_other_rows_without_shuffling(self):
        data = {"task": self.task(always=True), "shuffle": False, "dynamic_sampling": DynamicSampling(max_rounds=3)}
        run = fit(rollouts=1, data=data)
        (batch,) = run.recorder.rollouts
        first = {run.data.train_prompts.at(position).text for position in range(4)}
        last = {run.data.train_prompts.at(position).text for position in batch.positions.tolist()}
        assert len(last) == 4
        assert not first & last

    def test_dynamic_sampling_is_bounded(self):
        task = self.task(always=True)
        run = fit(rollouts=3, data={"task": task, "dynamic_sampling": DynamicSampling(max_rounds=2)})
        assert [len(batch) for batch in run.recorder.rollouts] == [16] * 3
        assert all(row["rollout/resampled_fraction"] == 2 for row in run.logged)
        assert all(row["rollout/zero_variance_fraction"] == 1 for row in run.logged)

    def test_tolerance_of_dynamic_sampling(self):
        """Rewards that differ by less than the tolerance count as equal."""
        data = {"task": self.task(), "shuffle": False}
        wide = DynamicSampling(max_rounds=1, tolerance=2.0)
        run = fit(rollouts=1, data=data | {"dynamic_sampling": wide})
        assert run.logged[0]["rollout/resampled_fraction"] == 1
        narrow = DynamicSampling(max_rounds=1, tolerance=0.5)
        run = fit(rollouts=1, data=data | {"dynamic_sampling": narrow})
        assert run.logged[0]["rollout/resampled_fraction"] < 1

    def test_dynamic_sampling_does_not_depend_on_generate_ahead(self):
        data = {"task": self.task(), "dynamic_sampling": DynamicSampling()}
        one = fit(rollouts=6, v=3, data=data)
        ahead = fit(rollouts=6, v=3, data=data | {"generate_ahead": True})
        for a, b in zip(one.recorder.rollouts, ahead.recorder.rollouts, strict=True):
            assert torch.equal(a.tokens, b.tokens)
            assert torch.equal(a.positions, b.positions)

    def test_the_overlong_mask_removes_truncated_completions(self):
        run = fit(rollouts=4, callbacks=[OverlongMask()], data={"sampling": Sampling(max_tokens=3)})
        cut = [batch.truncated for batch in run.recorder.rollouts]
        assert any(c.any() for c in cut)
        assert any(not c.all() for c in cut)
        for batch, c in zip(run.recorder.rollouts, cut, strict=True):
            assert not batch.loss_mask[c].any()
            assert torch.equal(batch.loss_mask[~c], batch.completion_mask[~c])

    def test_the_overlong_penalty(self):
        run = fit(rollouts=1, data={"task": self.task(penalty=True)})
        (batch,) = run.recorder.rollouts
        lengths = batch.completion_mask.sum(1)
        first = batch.tokens[torch.arange(16), batch.attention_mask.sum(1) - lengths]
        expected = (first > 4).float() - ((lengths - 2).clamp(min=0) / 4).clamp(max=1)
        assert torch.allclose(batch.rewards, expected)
        with pytest.raises(ValueError, match="buffer is 9"):
            OverlongPenalty(ExactMatch(), max_tokens=6, buffer=9)

    def test_a_step_without_live_tokens_is_skipped_and_counted(self):
        task = self.task(always=True)
        for advantage in (DropNegatives(), ComposedAdvantage()):
            run = fit(
                rollouts=3,
                loss=ClippedLoss(kl_coef=0.1),
                callbacks=[ZeroVarianceMask()],
                data={"task": task, "advantage": advantage},
            )
            assert [row["train/step_skipped"] for row in run.logged] == [1.0] * 3
            assert all(row["train/loss"] == 0 for row in run.logged)
            assert all(p.isfinite().all() for p in run.weights.values())

    def test_bad_settings(self):
        with pytest.raises(ValueError, match="max_rounds is 0"):
            DynamicSampling(max_rounds=0)

        class Broken(ComposedAdvantage):
            def __call__(self, scores):
                return super().__call__(scores) / 0

        with pytest.raises(ValueError, match=r"Broken returned .* of them not finite"):
            fit(rollouts=1, data={"advantage": Broken()})

    def task(self, always=False, penalty=False):
        reward = self.Often()
        if always:
            reward.score = lambda prompt, completion: 1.0
        if penalty:
            reward = OverlongPenalty(reward, max_tokens=6, buffer=4)
        return SortDigits(num_digits=2, num_held_out=20, reward=reward)


def test_an_entropy_bonus_raises_the_entropy():
    plain = fit(rollouts=12, learning_rate=0.3, loss=ComposedLoss(gate=MinClip()))
    bonus = fit(rollouts=12, learning_rate=0.3, loss=ComposedLoss(gate=MinClip(), regularisers=[EntropyBonus(0.5)]))
    assert bonus.logged[-1]["train/entropy"] > plain.logged[-1]["train/entropy"] + 0.01


def test_batch_statistics_are_over_the_rollout():
    advantage = ComposedAdvantage(BatchMean(), BatchStd())
    (batch,) = fit(rollouts=1, data={"advantage": advantage}).recorder.rollouts
    own = batch.advantages[torch.arange(16), batch.attention_mask.sum(1) - 1]
    expected = (batch.rewards - batch.rewards.mean()) / (batch.rewards.std() + 1e-6)
    assert torch.allclose(own, expected, atol=1e-5)
