"""Parity with TRL's losses, called in this process on the same random log-probabilities."""

from __future__ import annotations

import ast
import inspect
import textwrap
from argparse import Namespace
from typing import Any

import datasets
import pytest
import torch
import trl
from torch import Tensor
from trl.trainer import grpo_trainer

from lgrpo.advantages import DecoupledWhitened, Scores
from lgrpo.losses import (
    ComposedLoss,
    ConstantSum,
    DualClip,
    GammaWeight,
    MaskedImportance,
    MinClip,
    NoGate,
    OffPolicySequenceMask,
    ReferenceKL,
    SequenceMean,
    SequenceRatio,
    SequenceSum,
    SoftGate,
    TokenRatio,
    TruncatedImportance,
    WeightClamp,
)
from tests.helpers import tiny_policy
from tests.parity.random_batch import loss_and_gradient, rollout

B, T = 8, 12


@pytest.fixture(scope="module")
def numbers() -> dict[str, Tensor]:
    """Return log-probabilities of four policies, far enough apart that every clip is active."""
    g = torch.Generator().manual_seed(7)
    lengths = torch.tensor([12, 1, 5, 9, 12, 3, 7, 10])
    behaviour = -torch.rand(B, T, generator=g) * 3 - 0.05

    def near(centre: Tensor, noise: float) -> Tensor:
        return centre + noise * torch.randn(B, T, generator=g)

    return {
        "mask": (torch.arange(T) < lengths[:, None]).long(),
        "behaviour": behaviour,
        "proximal": near(behaviour, 0.3),
        "policy": near(behaviour, 0.6),
        "reference": near(behaviour, 0.5),
        "advantages": torch.randn(B, generator=g),
    }


@pytest.fixture(scope="module")
def make_trainer(tmp_path_factory):
    """Return a function that makes TRL's trainers, with a tiny model that is never called."""
    policy = tiny_policy()
    policy.build()
    folder = tmp_path_factory.mktemp("model")
    policy.model.save_pretrained(folder)
    rows = datasets.Dataset.from_list([{"prompt": "12>"}] * 8)

    def make(kind: str = "GRPO", **settings: Any) -> Any:
        defaults = {
            "output_dir": str(tmp_path_factory.mktemp("trl")),
            "per_device_train_batch_size": B,
            "num_generations": 4,
            "max_completion_length": T,
            "report_to": [],
            "use_cpu": True,
            "beta": 0.0,
            "bf16": False,
        }
        return getattr(trl, f"{kind}Trainer")(
            model=str(folder),  # TRL loads its reference from there
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=getattr(trl, f"{kind}Config")(**defaults | settings),
            train_dataset=rows,
            processing_class=policy.tokenizer,
        )

    return make


def trl_loss(trainer: Any, numbers: dict[str, Tensor], **inputs: Tensor) -> tuple[float, Tensor]:
    """Return TRL's loss and its gradient with respect to the policy's log-probabilities."""
    leaf = numbers["policy"].clone().requires_grad_()
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (leaf, torch.zeros(B, T), None)
    trainer.current_gradient_accumulation_steps = 1
    mask = numbers["mask"]
    defaults = {
        "prompt_ids": torch.ones(B, 2, dtype=torch.int64),
        "prompt_mask": torch.ones(B, 2, dtype=torch.int64),
        "completion_ids": torch.ones(B, T, dtype=torch.int64),
        "completion_mask": mask,
        "advantages": numbers["advantages"],
        "num_items_in_batch": mask.sum(),
        "ref_per_token_logps": numbers["reference"],
    }
    trainer.model.train()
    loss = trainer._compute_loss(trainer.model, defaults | inputs)
    loss.backward()
    assert leaf.grad is not None
    return float(loss.detach()), leaf.grad


CASES: dict[str, tuple[dict[str, Any], ComposedLoss]] = {
    # TRL's settings, and ours
    "grpo": (
        {"loss_type": "grpo", "epsilon": 0.2, "beta": 0.04, "use_bias_correction_kl": False},
        ComposedLoss(gate=MinClip(), regularisers=[ReferenceKL(0.04)], aggregation=SequenceMean()),
    ),
    "corrected k3": (
        {"loss_type": "dapo", "epsilon": 0.2, "beta": 0.04, "use_bias_correction_kl": True},
        ComposedLoss(gate=MinClip(), regularisers=[ReferenceKL(0.04, "k3_corrected")]),
    ),
    "bnpo": ({"loss_type": "bnpo"}, ComposedLoss(gate=MinClip())),
    "dr_grpo": ({"loss_type": "dr_grpo"}, ComposedLoss(gate=MinClip(), aggregation=ConstantSum())),
    "dapo": ({"loss_type": "dapo", "epsilon_high": 0.28}, ComposedLoss(gate=MinClip(0.2, 0.28))),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.08, "epsilon_high": 0.1},
        ComposedLoss(SequenceRatio(), MinClip(0.08, 0.1), aggregation=SequenceMean()),
    ),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.3}, ComposedLoss(gate=WeightClamp(1.0, 0.3))),
    "two-sided clip": ({"loss_type": "dapo", "delta": 2.0}, ComposedLoss(gate=DualClip(cap=2.0))),
    "off-policy sequence mask": (
        {"loss_type": "dapo", "off_policy_mask_threshold": 0.05},
        ComposedLoss(gate=OffPolicySequenceMask(MinClip(), 0.05)),
    ),
    "luspo": (
        {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 0.08, "epsilon_high": 0.1},
        ComposedLoss(SequenceRatio(), MinClip(0.08, 0.1), aggregation=SequenceSum()),
    ),
    "sapo": ({"loss_type": "sapo"}, ComposedLoss(gate=SoftGate(), aggregation=SequenceMean())),
    "sapo, other temperatures": (
        {"loss_type": "sapo", "sapo_temperature_pos": 0.5, "sapo_temperature_neg": 3.0},
        ComposedLoss(gate=SoftGate(0.5, 3.0), aggregation=SequenceMean()),
    ),
    "vespo": ({"loss_type": "vespo"}, ComposedLoss(SequenceRatio(mean="product"), weight=GammaWeight())),
    "vespo, other shapes": (
        {
            "vespo_k_pos": 0.5,
            "vespo_lambda_pos": 1.5,
            "vespo_k_neg": 1.0,
            "vespo_lambda_neg": 0.7,
            "loss_type": "vespo",
        },
        ComposedLoss(SequenceRatio(mean="product"), weight=GammaWeight(0.5, 1.5, 1.0, 0.7)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_equal_trl(name, numbers, make_trainer):
    settings, ours = CASES[name]
    expected, gradient = trl_loss(make_trainer(**settings), numbers, old_per_token_logps=numbers["behaviour"])
    batch = rollout(numbers["behaviour"], numbers["mask"], numbers["advantages"])
    value, own = loss_and_gradient(ours, batch, numbers["policy"], reference=numbers["reference"])
    assert abs(value - expected) <= 1e-5
    assert torch.allclose(own, gradient * numbers["mask"], atol=1e-5)
    assert own.abs().max() > 1e-3


@pytest.mark.parametrize("name", ["grpo", "gspo", "luspo", "sapo", "vespo"])
def test_extreme_ratios_and_groups_without_variance_equal_trl(name, numbers, make_trainer):
    """Tokens with log-ratios of up to ±15, a completion that is far away as a whole, and a group without advantages."""
    settings, ours = CASES[name]
    settings = settings | {"beta": 0.0}
    far = numbers["policy"].clone()
    far[0, :2] += torch.tensor([9.0, -9.0])
    far[3, 4] -= 15
    far[5, 1] += 15
    far[2] = numbers["behaviour"][2] - 8
    inputs = numbers | {"policy": far, "advantages": torch.tensor([1.2, -0.4, -0.4, -0.4, 0.0, 0.0, 0.0, 0.0])}
    expected, gradient = trl_loss(make_trainer(**settings), inputs, old_per_token_logps=inputs["behaviour"])
    batch = rollout(inputs["behaviour"], inputs["mask"], inputs["advantages"])
    ours = ComposedLoss(ours.ratio, ours.gate, ours.weight, aggregation=ours.aggregation)
    value, own = loss_and_gradient(ours, batch, far)
    size = max(1.0, float(gradient.abs().max()))
    assert abs(value - expected) <= 1e-5 * max(1.0, abs(expected))
    assert torch.allclose(own, gradient * inputs["mask"], atol=1e-5 * size)
    assert not own[4:].any()


def run_branch(condition: str, result: str, **names: Any) -> Any:
    """Run a branch of ``GRPOTrainer._generate_and_score_completions``, and return a variable that it sets.

    The method samples first, so that it cannot be called as a whole.
    """
    method = trl.GRPOTrainer._generate_and_score_completions
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(method))))
    branches = [
        node.body for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == condition
    ]
    (body,) = [body for body in branches if any(f"{result} =" in ast.unparse(line) for line in body)]
    names = vars(grpo_trainer) | names
    exec(compile(ast.Module(body, []), "TRL", "exec"), names)
    return names[result]


WEIGHTS = {
    "token_truncate": TruncatedImportance(1.5),
    "token_mask": MaskedImportance(0.6, 1.5),
    "sequence_truncate": TruncatedImportance(1.5, level="sequence"),
    "sequence_mask": MaskedImportance(0.6, 1.5, level="sequence"),
}


@pytest.mark.parametrize("size", [1.0, 20.0])
@pytest.mark.parametrize("mode", WEIGHTS)
def test_mismatch_weights_equal_trl(mode, size, numbers, make_trainer):
    """TRL multiplies by a ratio from sampling; its old log-probabilities are our proximal ones. Half of the completions
    are near α, tokens of the others up to 13 nats away."""
    trainer = make_trainer(loss_type="dapo", vllm_importance_sampling_mode=mode)
    trainer.use_vllm, trainer.vllm_importance_sampling_correction = True, True
    trainer.vllm_importance_sampling_clip_max = 1.5
    trainer.vllm_importance_sampling_clip_min = 0.6 if mode.endswith("mask") else None
    scale = torch.tensor([0.1, size] * (B // 2))[:, None]
    proximal = numbers["behaviour"] + scale * (numbers["proximal"] - numbers["behaviour"])
    ratio = run_branch(
        "self.use_vllm and self.vllm_importance_sampling_correction",
        "vllm_importance_sampling_ratio",
        self=trainer,
        completion_mask=numbers["mask"],
        tool_mask=None,
        old_per_token_logps=proximal,
        sampling_per_token_logps=numbers["behaviour"],
    )
    assert ratio.shape == ((B, 1) if mode.startswith("sequence") else (B, T))
    assert len(set(ratio.flatten().tolist())) > 2
    inputs = numbers | {"policy": proximal + numbers["policy"] - numbers["behaviour"]}
    expected, gradient = trl_loss(trainer, inputs, old_per_token_logps=proximal, importance_sampling_ratio=ratio)
    ours = ComposedLoss(TokenRatio("proximal"), MinClip(), WEIGHTS[mode])
    batch = rollout(numbers["behaviour"], numbers["mask"], numbers["advantages"])
    value, own = loss_and_gradient(ours, batch, inputs["policy"], proximal=proximal)
    assert abs(value - expected) <= 1e-5
    assert torch.allclose(own, gradient * numbers["mask"], atol=1e-5)
    assert own.abs().max() > 1e-3


@pytest.mark.parametrize("seed", range(3))
def test_advantages_of_several_rewards_equal_trl(seed):
    """GDPO, with rewards of very different ranges, of which one is equal in a whole group."""
    g = torch.Generator().manual_seed(seed)
    rewards = torch.rand(24, 3, generator=g, dtype=torch.float64) * torch.tensor([1.0, 100.0, 1e-3])
    rewards[:6, 1] = 7.0
    weights = torch.tensor([1.0, 0.5, -2.0], dtype=torch.float64)
    expected = run_branch(
        "self.multi_objective_aggregation == 'normalize_then_sum'",
        "advantages",
        self=Namespace(reward_funcs=[None] * 3, reward_weights=weights),
        rewards_per_func=rewards,
        unscorable_mask=torch.zeros(24, dtype=torch.bool),
        num_generations=6,
        device="cpu",
    )
    parts = torch.stack([rewards, weights.expand(24, 3)], 1)
    own = Scores(rewards=rewards.sum(1), lengths=torch.ones(24), draws=torch.zeros(24), group_size=6, parts=parts)
    assert torch.allclose(DecoupledWhitened()(own), expected, atol=1e-5)
    assert expected.abs().max() > 1


def test_without_old_logprobs_trl_is_our_ratio_over_none(numbers, make_trainer):
    expected, gradient = trl_loss(make_trainer(loss_type="dapo"), numbers)
    batch = rollout(numbers["behaviour"], numbers["mask"], numbers["advantages"])
    value, own = loss_and_gradient(ComposedLoss(TokenRatio("none"), MinClip()), batch, numbers["policy"])
    assert abs(value - expected) <= 1e-5
    assert torch.allclose(own, gradient * numbers["mask"], atol=1e-5)
    _, plain = loss_and_gradient(ComposedLoss(gate=NoGate()), batch, numbers["policy"])
    assert torch.allclose(own, plain, atol=1e-7)  # REINFORCE


def test_rloo_of_trl_clips_whole_completions(numbers, make_trainer):
    """TRL's RLOO uses the ratio of a whole completion; our ``rloo.yaml`` has its advantage and clips tokens."""
    mask, behaviour = numbers["mask"], numbers["behaviour"]
    policy = behaviour + (numbers["policy"] - behaviour) * 0.2
    trainer = make_trainer(kind="RLOO")
    old = (behaviour * mask).sum(1)
    expected, gradient = trl_loss(trainer, numbers | {"policy": policy}, old_logps=old)
    ours = ComposedLoss(SequenceRatio(mean="product"), MinClip(), aggregation=SequenceMean())
    batch = rollout(behaviour, mask, numbers["advantages"])
    value, own = loss_and_gradient(ours, batch, policy)
    assert abs(value - expected) <= 1e-5
    assert torch.allclose(own, gradient * mask, atol=1e-5)
    assert own.abs().max() > 1e-3


def test_cispo_cap_is_absolute_in_trl_and_relative_here(numbers, make_trainer):
    batch = rollout(numbers["behaviour"], numbers["mask"], numbers["advantages"])
    theirs, _ = trl_loss(
        make_trainer(loss_type="cispo", epsilon_high=1.3), numbers, old_per_token_logps=numbers["behaviour"]
    )
    same_number, _ = loss_and_gradient(ComposedLoss(gate=WeightClamp(1.0, 1.3)), batch, numbers["policy"])
    same_cap, _ = loss_and_gradient(ComposedLoss(gate=WeightClamp(1.0, 0.3)), batch, numbers["policy"])
    assert abs(same_cap - theirs) <= 1e-5 < abs(same_number - theirs)
