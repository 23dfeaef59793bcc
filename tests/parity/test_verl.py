"""Parity with results of verl in ``verl/*.json``; ``verl/README.md`` describes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lgrpo.advantages import Advantage, BatchStd, ComposedAdvantage, GroupStd, LeaveOneOut, Scores
from lgrpo.functional import kl_divergence
from lgrpo.losses import (
    ComposedLoss,
    ConstantSum,
    CovarianceClip,
    CovariancePenalty,
    DivergenceMask,
    DualClip,
    GeometricClip,
    Importance,
    MaskedImportance,
    MinClip,
    NoWeight,
    PolicyLogprobs,
    Rejection,
    SequenceMean,
    SequenceRatio,
    SequenceSum,
    SoftGate,
    Terms,
    TokenRatio,
    TruncatedImportance,
    Weight,
    WeightClamp,
)
from tests.parity.random_batch import loss_and_gradient, rollout

FOLDER = Path(__file__).parent / "verl"
BATCH = json.loads((FOLDER / "batch.json").read_text())
ROWS = 8


def tensor(name: str) -> Tensor:
    return torch.tensor(BATCH[name])


def read(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text())


def scores(rewards: str, lengths: Tensor | None = None) -> Scores:
    own = tensor("response_mask").sum(1).double() if lengths is None else lengths
    return Scores(rewards=tensor(rewards), lengths=own, draws=torch.zeros(ROWS), group_size=4)


ADVANTAGES: dict[str, Advantage] = {
    "grpo": ComposedAdvantage(scale=GroupStd(eps=1e-6, eps_placement="outside", unbiased=True)),
    "grpo_no_std": ComposedAdvantage(),
    "rloo": ComposedAdvantage(LeaveOneOut()),
}


@pytest.mark.parametrize("rewards", ["binary", "real", "constant_group"])
@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_equal_verl(name, rewards):
    expected = torch.tensor(read(f"adv_{name}_{rewards}")["outputs"]["advantages"])
    assert torch.allclose(ADVANTAGES[name](scores(f"rewards_{rewards}")), expected, atol=1e-5)


def test_epsilon_inside_the_root_differs_from_verl():
    """Mroueh et al. use sqrt(σ² + ε), TRL and verl σ + ε with the unbiased σ: 0.5 % apart, and 15 % for G = 4."""
    theirs = torch.tensor(read("adv_grpo_binary")["outputs"]["advantages"])
    unbiased = ComposedAdvantage(scale=GroupStd(unbiased=True))(scores("rewards_binary"))
    paper = ComposedAdvantage(scale=GroupStd())(scores("rewards_binary"))
    is_nonzero = theirs != 0
    assert 1e-4 < float((unbiased / theirs - 1)[is_nonzero].abs().max()) < 1e-2
    assert abs(float((paper / theirs)[is_nonzero].mean()) - (4 / 3) ** 0.5) < 1e-2


def test_reinforce_plus_plus_whitens_completions_and_verl_tokens():
    ours = ComposedAdvantage(scale=BatchStd())(scores("rewards_real"))
    theirs = torch.tensor(read("adv_reinforce_plus_plus_baseline_real")["outputs"]["advantages"])
    assert not torch.allclose(ours, theirs, atol=1e-2)
    centred = ComposedAdvantage()(scores("rewards_real"))
    tokens = centred.repeat_interleave(tensor("response_mask").sum(1))  # each token with its completion's number
    assert torch.allclose((centred - tokens.mean()) / (tokens.var() + 1e-8).sqrt(), theirs, atol=1e-5)
    assert torch.allclose(ours, centred / (centred.std() + 1e-6), atol=1e-6)


# vanilla: verl always applies the dual clip; in these cases no ratio reaches its cap
CLIP = {"low": 0.2, "high": 0.28}
LOSSES: dict[str, ComposedLoss] = {
    "vanilla_token_mean": ComposedLoss(gate=MinClip(**CLIP)),
    "vanilla_seq_mean_token_mean": ComposedLoss(gate=MinClip(**CLIP), aggregation=SequenceMean()),
    "vanilla_seq_mean_token_sum": ComposedLoss(gate=MinClip(**CLIP), aggregation=ConstantSum(ROWS)),
    "vanilla_seq_mean_token_sum_norm": ComposedLoss(gate=MinClip(**CLIP), aggregation=ConstantSum()),
    "vanilla_dual_clip_token_mean": ComposedLoss(gate=DualClip(**CLIP, cap=3.0)),
    "vanilla_dual_clip_seq_mean_token_mean": ComposedLoss(gate=DualClip(**CLIP, cap=3.0), aggregation=SequenceMean()),
    "gspo": ComposedLoss(SequenceRatio(), MinClip(low=0.08, high=0.1), aggregation=SequenceMean()),
    "geo_mean": ComposedLoss(gate=GeometricClip(**CLIP), aggregation=SequenceMean()),
    "cispo": ComposedLoss(gate=WeightClamp(**CLIP)),
    "cispo_upper_only": ComposedLoss(gate=WeightClamp(low=1.0, high=0.28)),
    "gpg": ComposedLoss(),  # REINFORCE
    "decoupled_token_tis": ComposedLoss(TokenRatio("proximal"), MinClip(**CLIP), TruncatedImportance(2.0)),
    "decoupled_sequence_tis": ComposedLoss(
        TokenRatio("proximal"), MinClip(**CLIP), TruncatedImportance(2.0, level="sequence")
    ),
    "decoupled_token_icepop": ComposedLoss(TokenRatio("proximal"), MinClip(**CLIP), MaskedImportance(0.5, 2.0)),
    "bypass_ppo_clip": ComposedLoss(gate=MinClip(**CLIP)),
    "dppo_tv": ComposedLoss(gate=DivergenceMask(0.05, 0.1), weight=Importance()),
    "dppo_tv_wide": ComposedLoss(gate=DivergenceMask(0.05, 0.1), weight=Importance()),
    "dppo_kl": ComposedLoss(gate=DivergenceMask(0.01, 0.02, "kl"), weight=Importance()),
    "dppo_kl_wide": ComposedLoss(gate=DivergenceMask(0.01, 0.02, "kl"), weight=Importance()),
    "clip_cov": ComposedLoss(gate=CovarianceClip(MinClip(**CLIP), fraction=1.0, low=0.2, high=1.0)),
    "kl_cov": ComposedLoss(gate=CovariancePenalty(fraction=0.2, coef=0.5)),
    "sapo": ComposedLoss(gate=SoftGate(), aggregation=SequenceMean()),
    "sapo_wide": ComposedLoss(gate=SoftGate(), aggregation=SequenceMean()),
}
FAR = {
    "vanilla": "vanilla_dual_clip_token_mean",
    "gspo": "gspo",
    "geo_mean": "geo_mean",
    "cispo": "cispo",
    "dppo_tv": "dppo_tv",
    "dppo_kl": "dppo_kl",
    "sapo": "sapo",
    "decoupled_token_tis": "decoupled_token_tis",
    "decoupled_sequence_tis": "decoupled_sequence_tis",
}
"""Cases with probabilities between 1e-8 and 1, and the entries of ``LOSSES`` that they share."""
LOSSES |= {f"{name}_far": LOSSES[key] for name, key in FAR.items()}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients_equal_verl(name):
    case = read(f"loss_{name}")
    inputs = case["inputs"]
    old = tensor(inputs["old_log_prob"])
    behaviour = tensor(inputs["rollout_log_prob"]) if "rollout_log_prob" in inputs else old
    batch = rollout(behaviour, tensor("response_mask"), tensor("advantages"))
    value, gradient = loss_and_gradient(LOSSES[name], batch, tensor(inputs["log_prob"]), proximal=old)
    assert abs(value - case["outputs"]["loss"]) <= 1e-5 * (max(1, abs(value)) if name.endswith("_far") else 1)
    assert torch.allclose(gradient, torch.tensor(case["outputs"]["grad_log_prob"]), atol=1e-5)
    assert gradient.abs().max() > 1e-3


def test_sum_over_sequences_equals_verl():
    case = read("loss_vanilla_seq_mean_token_sum")
    batch = rollout(tensor("old_log_prob"), tensor("response_mask"), tensor("advantages"))
    loss = ComposedLoss(gate=MinClip(**CLIP), aggregation=SequenceSum())
    value, gradient = loss_and_gradient(loss, batch, tensor("log_prob"))
    assert abs(value - case["outputs"]["loss"]) <= 1e-5
    assert torch.allclose(gradient, torch.tensor(case["outputs"]["grad_log_prob"]), atol=1e-5)


REJECTIONS: dict[str, Weight] = {
    "token_k2": Rejection(NoWeight(), "k2", "token", 0.3),
    "token_k3": Rejection(NoWeight(), "k3", "token", 0.3),
    "seq_sum_k1": Rejection(NoWeight(), "ratio", "sequence", 2.0),
    "seq_sum_k3": Rejection(NoWeight(), "k3", "sequence", 0.8),
    "seq_mean_k1": Rejection(NoWeight(), "ratio", "geometric", 1.25, 0.8),
    "seq_mean_k3": Rejection(NoWeight(), "k3", "geometric", 0.25),
    "seq_max_k2": Rejection(NoWeight(), "k2", "max", 1.0),
    "seq_max_k3": Rejection(NoWeight(), "k3", "max", 1.0),
    "seq_is_rs": Rejection(TruncatedImportance(2.0, "sequence"), "ratio", "sequence", 4.0),
    "geo_rs_token_tis": Rejection(TruncatedImportance(2.0), "ratio", "geometric", 1.25),
}


@pytest.mark.parametrize("name", REJECTIONS)
def test_rejections_equal_verl(name):
    expected = torch.tensor(read(f"rejection_{name}")["outputs"]["weights"])
    mask, old = tensor("response_mask").bool(), tensor("old_log_prob")
    batch = rollout(tensor("rollout_log_prob_wide"), mask, tensor("advantages"))
    proximal = torch.where(mask, old, 0.0)
    logprobs = PolicyLogprobs(policy=proximal, entropy=old, proximal=proximal)
    weights = REJECTIONS[name](Terms(batch=batch, logprobs=logprobs, log_ratio=torch.zeros_like(old)))
    assert torch.allclose(weights * mask, expected, atol=1e-5)
    assert 0 < int((expected > 0).sum()) < int(mask.sum())


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_equals_verl(estimator):
    case = read(f"kl_{estimator}")
    policy = tensor("log_prob").requires_grad_()
    values = kl_divergence(policy, tensor("ref_log_prob"), estimator)
    values.sum().backward()
    assert torch.allclose(values, torch.tensor(case["outputs"]["kl"]), atol=1e-5)
    assert torch.allclose(policy.grad, torch.tensor(case["outputs"]["grad_log_prob"]), atol=1e-5)


def test_verl_limits_k3_to_10_and_lgrpo_does_not():
    theirs = torch.tensor(read("kl_k3_far")["outputs"]["kl"])
    ours = kl_divergence(tensor("log_prob"), tensor("ref_log_prob_far"), "k3")
    assert float(theirs.max()) == 10.0 < float(ours.max())
