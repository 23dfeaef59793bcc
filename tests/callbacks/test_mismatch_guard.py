"""A run stops before it trains on completions that were not sampled from the policy."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch

from lgrpo import CausalPolicy, ClippedLoss, Sampling, TransformersEngine
from lgrpo.callbacks import MismatchGuard, ZeroVarianceMask, mismatch_guard
from lgrpo.callbacks.mismatch_guard import EngineMismatchError
from lgrpo.callbacks.self_mismatch import self_mismatch
from lgrpo.rewards import Reward
from lgrpo.tasks import SortDigits
from tests.helpers import CHARACTERS, MODEL, build, fit, largest_difference, tiny_policy


class OtherTemperature(TransformersEngine):
    """Samples at another temperature than the run's."""

    def sample(self, generation):
        sampling = generation.sampling
        generation.sampling = replace(sampling, temperature=0.5 * sampling.temperature)
        super().sample(generation)


class RawLogprobs(TransformersEngine):
    """Returns log-probabilities at temperature 1, as a vLLM server does by default."""

    def sample(self, generation):
        super().sample(generation)
        for index, group in generation.groups.items():
            for completion in group:
                tokens = torch.tensor([[*generation.prompts[index].token_ids, *completion.token_ids]])
                with torch.no_grad():
                    logprobs = self._model(tokens).logits[0].log_softmax(-1)
                first = len(generation.prompts[index].token_ids)
                completion.logprobs = [
                    float(logprobs[first + t - 1, token]) for t, token in enumerate(completion.token_ids)
                ]


class OtherWeights(TransformersEngine):
    """Loses one matrix after every sync, as an engine with a wrong weight layout does."""

    def receive_weights(self, weights, step, version):
        manifest = super().receive_weights(weights, step, version)
        with torch.no_grad():
            self._model.model.layers[0].mlp.down_proj.weight.zero_()
        return manifest

    def held_checksums(self, manifest):
        return manifest.checksums


class DependsOnNeighbours(CausalPolicy):
    """Computes other log-probabilities for a row that is computed with fewer others."""

    def forward(self, tokens, *arguments, **keywords):
        logprobs, *others = super().forward(tokens, *arguments, **keywords)
        return logprobs + arguments[0] / len(tokens), *others


class AlwaysWrong(Reward):
    is_inline = True

    def score(self, prompt, completion):
        return 0.0


def settings(engine, guard, **data):
    policy = tiny_policy(config=MODEL | {"initializer_range": 0.3})  # not close to a uniform distribution
    return {"policy": policy, "callbacks": [guard], "data": {"engine": engine, **data}}


@pytest.mark.parametrize(
    ("engine", "temperature"), [(OtherTemperature(), 1.0), (RawLogprobs(), 0.5), (OtherWeights(), 1.0)]
)
def test_a_wrong_engine_stops_the_run_before_the_first_step(engine, temperature):
    run = build(**settings(engine, MismatchGuard(), sampling=Sampling(max_tokens=6, temperature=temperature)))
    before = {name: tensor.clone() for name, tensor in run.module.policy_weights()}
    example = rf"For example, token \d \('.'\) .* The engine is {type(engine).__name__}"
    with pytest.raises(EngineMismatchError, match=rf"at step 0, engine and policy disagree .* {example}"):
        run.trainer.fit(run.module, datamodule=run.data)
    assert largest_difference(before, dict(run.module.policy_weights())) == 0


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_wrong_engine_stops_a_run_without_rewards(micro_batches):
    """Every step would be skipped, because the engine samples nonsense."""
    own = settings(
        OtherWeights(), MismatchGuard(), task=SortDigits(num_digits=2, num_held_out=20, reward=AlwaysWrong())
    )
    own["callbacks"].append(ZeroVarianceMask())
    with pytest.raises(EngineMismatchError, match=r"at step 0, engine and policy disagree .* For example, token"):
        fit(**own, trainer={"accumulate_grad_batches": micro_batches})


def test_warn_only():
    """Once, and the run is otherwise the same."""
    with pytest.warns(UserWarning, match=r"differ by .* on average, where at most 0\.01 is expected") as caught:
        run = fit(**settings(OtherTemperature(), MismatchGuard(action="warn")), rollouts=3)
    assert len([w for w in caught if "disagree" in str(w.message)]) == 1
    assert run.trainer.global_step == 3
    silent = fit(**settings(OtherTemperature(), MismatchGuard(tolerance=100.0)), rollouts=3)
    assert largest_difference(run.weights, silent.weights) == 0


@pytest.mark.parametrize("trainer", [{}, {"precision": "bf16-mixed"}, {"accumulate_grad_batches": 4}], ids=str)
def test_a_right_engine(trainer):
    """Also with a lag and large steps, after which engine and policy differ."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*disagree")
        run = fit(**settings(None, MismatchGuard()), v=3, i=2, rollouts=6, learning_rate=0.1, trainer=trainer)
    assert run.trainer.global_step == 12
    assert max(row["train/kl_behaviour"] for row in run.logged) > 1e-3
    fresh = [row for row in run.logged if row["train/lag"] == 0]
    assert len(fresh) == 2
    assert all(row["train/engine_mismatch_mean"] <= row["train/engine_mismatch_max"] for row in fresh)


NAMES = {f"train/self_mismatch_{name}" for name in ("mean", "p95", "p99", "max")} | {"train/self_outside_band_fraction"}


def test_the_policy_is_compared_with_itself(monkeypatch):
    """At step 0 and then every two steps; in float32 on a CPU, rows that are computed together make no difference."""
    steps = []

    def counted(trainer):
        steps.append(trainer.global_step)
        return self_mismatch(trainer)

    monkeypatch.setattr(mismatch_guard, "self_mismatch", counted)
    run = fit(**settings(None, MismatchGuard(period=2), num_prompts=16), rollouts=4)
    assert steps == [0, 2]
    assert run.logged[0].keys() >= NAMES
    assert all(run.logged[0][name] <= 1e-5 for name in NAMES)
    silent = fit(**settings(None, MismatchGuard(period=None), num_prompts=16), rollouts=4)
    assert not NAMES & silent.logged[-1].keys()
    assert largest_difference(run.weights, silent.weights) == 0


@pytest.mark.parametrize("period", [100, None])
def test_the_tolerance_follows_the_difference_of_the_policy_from_itself(period):
    """That is 1/8 - 1/16 for each token of 16 rows, as much as between policy and engine."""
    policy = DependsOnNeighbours(config=MODEL, characters=CHARACTERS)
    own = settings(None, MismatchGuard(action="warn", period=period), num_prompts=4) | {"policy": policy}
    own |= {"loss": ClippedLoss(clip_low=0.01, clip_high=0.01), "rollouts": 1, "learning_rate": 0.0}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = fit(**own).logged[0]
    is_warned = any("disagree" in str(warning.message) for warning in caught)
    assert is_warned == (period is None)
    assert found["train/engine_mismatch_mean"] == pytest.approx(1 / 16, rel=1e-3)
    if period is not None:
        assert found["train/self_mismatch_mean"] == pytest.approx(1 / 16, rel=1e-3)
        assert found["train/self_mismatch_max"] == pytest.approx(1 / 16, rel=1e-3)
        assert found["train/self_outside_band_fraction"] == 1
