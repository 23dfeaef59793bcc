"""Check that invalid input raises an error that says what is wrong and what to do."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lgrpo import (
    ClippedLoss,
    Evaluation,
    GRPOModule,
    ReferenceRefresh,
    RolloutCallback,
    RolloutDataModule,
    Sampling,
    WeightSync,
    ZeroVarianceMask,
)
from lgrpo.advantages import GroupWhitened
from lgrpo.cli import is_user_error
from lgrpo.engines import EngineError, EnginePool, NoWeightsError, VLLMEngine, VLLMServerEngine
from lgrpo.losses import BehaviourForwardKL, ComposedLoss, ConstantSum
from lgrpo.policy.strategy import check_strategy
from lgrpo.rewards import Reward
from lgrpo.tasks import SortDigits
from tests.helpers import build, fit, largest_difference, tiny_policy
from tests.rewards.hostile import TooFew


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": {"group_size": 1}}, r"data\.group_size is 1; it must be at least 2: advantages compare"),
        ({"data": {"num_prompts": 0}}, r"data\.num_prompts is 0"),
        ({"i": 0}, r"data\.reuse is 0; it must be at least 1"),
        ({"v": -1}, r"weight_sync\.period is -1"),
        ({"data": {"group_size": 4.0}}, r"data\.group_size is 4\.0; it must be an integer"),
        ({"data": {"num_prompts": 4.0}}, r"data\.num_prompts is 4\.0; it must be an integer"),
        ({"data": {"num_rollouts": 2.5}}, r"data\.num_rollouts is 2\.5; it must be an integer"),
        ({"i": True}, r"data\.reuse is True; it must be an integer"),
        ({"callbacks": [WeightSync(2)]}, r"2 callbacks that sync the engine \(WeightSync\(period=1\), WeightS"),
        ({"callbacks": [ReferenceRefresh()]}, "kl_coef is 0, so none is kept"),
        ({"callbacks": [GradientAccumulationScheduler({0: 1, 1: 4})]}, "split into a constant number"),
        ({"trainer": {"accumulate_grad_batches": 17}}, r"16 completions .* = 17 micro-batches"),
        ({"data": {"sampling": Sampling(max_tokens=40)}}, "max_tokens is 40, but prompt and completion together"),
        ({"data": {"sampling": Sampling(max_tokens=30)}}, r"prompt 0 of the train set has 3 tokens, but only 2 fit"),
        ({"data": {"sampling": Sampling(top_p=0.9), "engine": VLLMEngine()}}, r"set data\.sampling\.top_k too"),
        ({"v": 3, "data": {"behaviour_logprobs": "policy"}}, r"period 3 most rollouts .* or set data\.generate_ahead"),
        ({"v": None, "data": {"behaviour_logprobs": "policy"}}, r"period null most rollouts .* Use 'engine'$"),
    ],
)
def test_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        fit(**settings)


def test_a_missing_weight_sync_is_an_error():
    with pytest.raises(NoWeightsError, match=r"WeightSync callback \(lgrpo\.WeightSync\(period=v\)\)"):
        fit(v=0)


def test_a_period_changed_in_a_run_is_refused():
    """The engine is told at each sync how many rollouts follow, so one sync would be off the grid."""

    class Changes(RolloutCallback):
        def on_rollout_start(self, trainer, pl_module, rollout):
            if rollout == 1:
                next(c for c in trainer.callbacks if isinstance(c, WeightSync)).period = 3

    with pytest.raises(AttributeError, match=r"period is 2 and cannot be changed to 3 in a run: .*EngineSync"):
        fit(v=2, callbacks=[Changes()])


@pytest.mark.parametrize("engine", [VLLMEngine, EnginePool, VLLMServerEngine])
def test_an_engine_without_vllm(engine, monkeypatch):
    """It is noticed before anything is loaded: there is no tokenizer to load here."""
    monkeypatch.setitem(sys.modules, "vllm", None)
    run = build(data={"engine": engine()})
    monkeypatch.setattr(RolloutDataModule, "_prompts", lambda *_: pytest.fail("prompts were loaded"))
    with pytest.raises(EngineError, match=r"needs vLLM, which is not installed: pip install 'lgrpo\[vllm\]'") as caught:
        run.trainer.fit(run.module, datamodule=run.data)
    assert is_user_error(caught.value)
    VLLMServerEngine(urls=["http://127.0.0.1:1"]).check_installed()


def test_compiling_on_a_cpu():
    with pytest.warns(UserWarning, match=r"policy\.compile is set, but the policy is on the CPU"):
        check_strategy(tiny_policy(compile=True), build().trainer)


@pytest.mark.parametrize("reshard", [True, False])
def test_reshard_without_fsdp2(reshard):
    with pytest.warns(
        UserWarning, match=rf"policy\.reshard is {str(reshard).lower()}, but has no effect with .*Single"
    ):
        check_strategy(tiny_policy(reshard=reshard), build().trainer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_strategy(tiny_policy(), build().trainer)


def returns(value):
    class Odd(Reward):
        def score(self, prompt, completion):
            return value

    return Odd()


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (returns(float("nan")), "Odd returned nan, not a finite number, for completion"),
        (returns(float("-inf")), "Odd returned -inf"),
        (returns(None), "Odd returned None"),
        (returns("good"), "Odd returned 'good'"),
        (returns("1"), "Odd returned '1'"),
        (TooFew(), "TooFew returned 3 rewards for 4 completions"),
    ],
)
def test_invalid_rewards(reward, message):
    """They stop the run, in the trainer's process and, if all of the first ones fail, in workers."""
    task = SortDigits(num_digits=2, num_held_out=20, reward=reward)
    with pytest.raises(ValueError, match=message):
        fit(data={"task": task, "scoring": None})
    with pytest.raises(RuntimeError, match=f"failed on each of the first 16 completions: ValueError: {message}"):
        fit(data={"task": task})


def test_a_callback_that_turns_the_mask_on():
    class Greedy(RolloutCallback):
        def on_rollout_end(self, trainer, pl_module, batch):
            batch.loss_mask.fill_(True)

    with pytest.raises(RuntimeError, match=r"Greedy\.on_rollout_end turned entries of loss_mask on"):
        fit(callbacks=[Greedy()])


@pytest.mark.parametrize("hook", ["on_rollout_start", "on_rollout_end"])
def test_log_in_a_rollout_hook(hook):
    logs = type("Logs", (RolloutCallback,), {hook: lambda self, trainer, module, _: module.log("mine/x", 1.0)})
    with pytest.raises(RuntimeError, match=r"Logs calls log in a rollout hook, .* pl_module\.add_metric\(name"):
        fit(callbacks=[logs()])


WRITES = {
    "in place": ("advantages", lambda batch: batch.advantages.mul_(2)),
    "another tensor": ("advantages", lambda batch: setattr(batch, "advantages", batch.advantages * 2)),
    "data": ("rewards", lambda batch: batch.rewards.data.add_(1)),
    "numpy": ("behaviour_logprobs", lambda batch: batch.behaviour_logprobs.numpy().fill(-1)),
    "number": ("temperature", lambda batch: setattr(batch, "temperature", 0.5)),
    "metric": ("metrics", lambda batch: batch.metrics.update(other=1.0)),
}


@pytest.mark.parametrize("way", WRITES)
def test_a_callback_that_writes_to_another_field(way):
    name, write = WRITES[way]

    class Writing(RolloutCallback):
        def on_rollout_end(self, trainer, pl_module, batch):
            write(batch)

    with pytest.raises(RuntimeError, match=rf"Writing\.on_rollout_end wrote to {name};"):
        fit(callbacks=[Writing()])


@pytest.mark.slow("starts two ranks")
def test_prompts_not_divisible_by_the_number_of_ranks(tmp_path):
    command = [sys.executable, "-m", "tests.processes.two_processes", "2", str(tmp_path / "out"), "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "data.num_prompts is 3, which is not divisible by the 2 ranks" in done.stderr


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ClippedLoss(clip_low=-0.1), "^clip_low is -0.1"),
        (lambda: ClippedLoss(clip_high=-0.1), "^clip_high is -0.1"),
        (lambda: ClippedLoss(ratio="alpha"), "^ratio is 'alpha'"),
        (lambda: ClippedLoss(kl="k9"), "^kl is 'k9'"),
        (lambda: ClippedLoss(kl_coef=-1), "^kl_coef is -1"),
        (lambda: ClippedLoss(kl_coef=float("inf")), "^kl_coef is inf; it must be below inf"),
        (lambda: ClippedLoss(centre="proximal", ratio="proximal"), "use centre 'one'"),
        (lambda: ConstantSum(0), "constant is 0"),
        (lambda: GroupWhitened(eps=0), "eps is 0"),
        (lambda: WeightSync(0), "period is 0"),
        (lambda: WeightSync(2.5), r"weight_sync\.period is 2\.5; it must be an integer"),
        (lambda: WeightSync({5: 1}), r"period is \{5: 1\}; the keys of a schedule are the first rollouts"),
        (lambda: WeightSync({0: 1, 4: 0}), "weight_sync.period from rollout 4 is 0; it must be at least 1"),
        (lambda: ClippedLoss(clip_high={0: 0.2, 9: None}), "^clip_high from rollout 9 is None; it must be a number"),
        (lambda: ClippedLoss(clip_low={0: 0.2, 9: 1.5}), "^clip_low from rollout 9 is 1.5; it must be at least 0 and"),
        (lambda: ReferenceRefresh(0), "period is 0"),
        (lambda: ReferenceRefresh(1.5), r"reference_refresh\.period is 1\.5; it must be an integer"),
        (lambda: Sampling(max_tokens=8.0), r"sampling\.max_tokens is 8\.0; it must be an integer"),
        (lambda: ReferenceRefresh(decay=1.0), "decay is 1.0"),
        (lambda: ZeroVarianceMask(-1), "tolerance is -1"),
        (lambda: Evaluation(num_samples=0), "num_samples is 0"),
        (lambda: Evaluation(num_problems=0), "num_problems is 0"),
    ],
)
def test_parts(make, message):
    with pytest.raises(ValueError, match=message):
        make()


PARAMETERS = [torch.nn.Parameter(torch.zeros(1))]
SGD = torch.optim.SGD(PARAMETERS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"policy": "Qwen/Qwen3-0.6B"},
            "policy is 'Qwen/Qwen3-0.6B'; it must be a CausalPolicy, such as Causal",
        ),
        ({"loss": ClippedLoss}, r"loss is the class ClippedLoss; it must be a PolicyLoss, such as ClippedLoss\(\)"),
        ({"optimizer": SGD}, "optimizer is an instance of SGD; it must be a function: lambda parameters: "),
        (
            {"scheduler": torch.optim.lr_scheduler.LinearLR(SGD)},
            "scheduler is an instance of LinearLR; it must be a function: lambda optimizer: ",
        ),
    ],
)
def test_arguments_of_the_module(arguments, message):
    with pytest.raises(ValueError, match=message):
        GRPOModule(**{"policy": tiny_policy()} | arguments)
    with pytest.raises(ValueError, match=r"task is 'gsm8k'; it must be a Task, such as lgrpo\.tasks\.GSM8K\(\)"):
        RolloutDataModule("gsm8k")
    for engine, shown in (("vllm", "'vllm'"), (VLLMEngine, "the class VLLMEngine")):
        with pytest.raises(ValueError, match=f"engine is {shown}; it must be a RolloutEngine, such as"):
            RolloutDataModule(SortDigits(), engine)


def test_an_epoch_with_an_incomplete_step():
    with pytest.raises(ValueError, match="an epoch of 5 batches is not a whole number of optimizer steps of 2"):
        fit(trainer={"accumulate_grad_batches": 2, "limit_train_batches": 5})
    fit(trainer={"accumulate_grad_batches": 2, "fast_dev_run": True})


@pytest.mark.parametrize("regularisers", [[], [BehaviourForwardKL()]], ids=["surrogate alone", "regulariser"])
def test_a_step_without_advantages(regularisers):
    """It is skipped, so that neither momentum nor weight decay moves the weights, unless the loss has another term."""
    run = fit(
        loss=ComposedLoss(regularisers=regularisers),
        optimizer=torch.optim.AdamW,
        data={"task": SortDigits(num_digits=2, num_held_out=20, reward=returns(1.0))},
    )
    before = fit(rollouts=1, trainer={"limit_train_batches": 0}).weights
    is_skipped = not regularisers
    assert [row["train/step_skipped"] for row in run.logged] == [float(is_skipped)] * 4
    assert all(row["train/live_tokens"] > 0 for row in run.logged)
    assert (largest_difference(run.weights, before) == 0) == is_skipped


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_rollout_without_variance_skips_the_step(micro_batches):
    run = fit(
        callbacks=[ZeroVarianceMask()],
        loss=ClippedLoss(kl_coef=0.1),
        optimizer=torch.optim.AdamW,
        data={"task": SortDigits(num_digits=2, num_held_out=20, reward=returns(1.0))},
        trainer={"accumulate_grad_batches": micro_batches},
    )
    before = fit(rollouts=1, trainer={"limit_train_batches": 0}).weights
    assert [row["train/step_skipped"] for row in run.logged] == [1.0] * 4
    assert all(row["train/loss"] == 0 for row in run.logged)
    assert all(bool((p == before[name]).all()) for name, p in run.weights.items())
