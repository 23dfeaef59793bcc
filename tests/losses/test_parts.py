"""Properties of the parts of losses and advantages, alone and in every named method."""

from __future__ import annotations

import copy
import functools
import math
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lgrpo.advantages import (
    BatchMean,
    BatchStd,
    BernoulliStd,
    ComposedAdvantage,
    DecoupledWhitened,
    DropNegatives,
    ExponentiallyWeighted,
    GroupMeanScale,
    GroupStd,
    LeastVariance,
    LeaveOneOut,
    LengthWeighted,
    LogMeanExp,
    MajorityStd,
    NoBaseline,
    Scores,
    SignedZeroVariance,
    VariedShare,
)
from lgrpo.commands.fit import LGRPOCLI
from lgrpo.functional import kl_divergence
from lgrpo.losses import (
    AsymmetricImportance,
    BehaviourForwardKL,
    BehaviourK2,
    ClippedLoss,
    ComposedLoss,
    ConstantSum,
    CovarianceClip,
    CovariancePenalty,
    DivergenceMask,
    DualClip,
    EntropyBand,
    EntropyBonus,
    GammaWeight,
    GeometricClip,
    Importance,
    InterpolatedRatio,
    LagDecay,
    MaskedImportance,
    MasteredHinge,
    MaxTokenLag,
    MinClip,
    NoGate,
    NoWeight,
    OffPolicySequenceMask,
    OneSide,
    PolicyLogprobs,
    ReferenceKL,
    Rejection,
    Ring,
    SecondMoment,
    SequenceMean,
    SequenceRatio,
    SequenceSum,
    SoftGate,
    SuffixVeto,
    TokenMean,
    TokenRatio,
    TruncatedImportance,
    TrustRegionMask,
    TwoSide,
    WeightClamp,
)
from lgrpo.types import RECORDED, StepTotals
from tests.parity.random_batch import loss_and_gradient, rollout

CONFIGS = Path(__file__).parents[2] / "configs"
METHODS = sorted(path.stem for path in (CONFIGS / "algorithms").glob("*.yaml"))


def numbers(rows=8, width=10, seed=0, dtype=torch.float32, noise=0.5):
    """Return a batch with rows of mixed lengths, and log-probabilities of three policies near the behaviour policy."""
    g = torch.Generator().manual_seed(seed)
    behaviour = -torch.rand(rows, width, generator=g, dtype=dtype) * 2 - 0.05
    near = lambda: behaviour + noise * torch.randn(rows, width, generator=g, dtype=dtype)  # noqa: E731
    lengths = torch.randint(1, width + 1, (rows, 1), generator=g)
    lengths[0] = width
    mask = torch.arange(width) < lengths
    batch = rollout(behaviour, mask, torch.randn(rows, generator=g, dtype=dtype))
    return batch, near(), near(), near()


def scores(rewards, group_size=4, seed=0):
    g = torch.Generator().manual_seed(seed)
    rewards = torch.as_tensor(rewards, dtype=torch.float32)
    lengths = torch.randint(1, 9, rewards.shape, generator=g).double()
    draws = torch.rand(len(rewards), generator=g)
    return Scores(rewards=rewards, lengths=lengths, draws=draws, group_size=group_size, parts=None)


@functools.cache
def build(method):
    """Build a named method as the command line does."""
    files = [f"--config={CONFIGS / 'tiny.yaml'}", f"--config={CONFIGS / 'algorithms' / method}.yaml"]
    return LGRPOCLI([*files, "--trainer.logger=false"], run=False)


class TestEquivalences:
    def test_one_side_with_importance_equals_the_min_clip(self):
        batch, policy, _, _ = numbers(rows=1000, width=10)
        batch.completion_mask[:] = batch.loss_mask[:] = True
        batch.advantages[:] = torch.randn(1000, 10, generator=torch.Generator().manual_seed(1))
        batch.behaviour_logprobs[:] = policy - 0.5 * torch.randn(1000, 10, generator=torch.Generator().manual_seed(2))
        _, clip = loss_and_gradient(ComposedLoss(gate=MinClip(0.2, 0.3)), batch, policy)
        _, gate = loss_and_gradient(ComposedLoss(gate=OneSide(0.2, 0.3), weight=Importance()), batch, policy)
        assert int((clip == 0).sum()) > 1000  # the clip is active
        assert torch.allclose(clip, gate, atol=1e-7)

    def test_first_pass_never_clips_around_the_proximal_policy(self):
        batch, policy, _, _ = numbers()
        for centre in ("proximal", "proximal_multiplicative"):
            loss = ComposedLoss(gate=MinClip(0.2, 0.2, centre))
            logprobs = PolicyLogprobs(policy=policy, entropy=policy, proximal=policy)
            output = loss(batch, logprobs)
            assert not output.clipped_low.any()
            assert not output.clipped_high.any()
            _, gradient = loss_and_gradient(loss, batch, policy, proximal=policy)
            _, plain = loss_and_gradient(ComposedLoss(weight=Importance()), batch, policy)
            assert torch.allclose(gradient, plain, atol=1e-7)
        around_one = ComposedLoss(gate=MinClip())(batch, PolicyLogprobs(policy=policy, entropy=policy))
        assert around_one.clipped_low.any()

    def test_asymre_equals_a_shift_of_the_advantage(self):
        batch, policy, _, _ = numbers()
        by_loss = loss_and_gradient(ComposedLoss(regularisers=[BehaviourForwardKL(0.1)]), batch, policy)
        rewards = scores(torch.randint(0, 2, (8,)).float())
        shift = ComposedAdvantage(shift=0.1)(rewards) - ComposedAdvantage()(rewards)
        batch.advantages = torch.where(batch.completion_mask, batch.advantages + shift[:, None], 0.0)
        by_advantage = loss_and_gradient(ComposedLoss(), batch, policy)
        assert abs(by_loss[0] - by_advantage[0]) < 1e-5
        assert torch.allclose(by_loss[1], by_advantage[1], atol=1e-6)

    def test_decoupled_ppo_equals_a_weighted_clip_of_the_proximal_ratio(self):
        batch, policy, proximal, _ = numbers()
        band = ComposedLoss(gate=MinClip(0.2, 0.3, "proximal_multiplicative"))
        weight = ComposedLoss(TokenRatio("proximal"), MinClip(0.2, 0.3), TruncatedImportance(math.inf))
        one, other = (loss_and_gradient(loss, batch, policy, proximal=proximal) for loss in (band, weight))
        assert abs(one[0] - other[0]) < 1e-5
        assert torch.allclose(one[1], other[1], atol=1e-6)

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.floats(-3, 3, width=32), min_size=2, max_size=8), st.integers(0, 10**6))
    def test_pairs_of_a_group_equal_its_centred_rewards(self, rewards, seed):
        """Σ_{i<j} (r_i - r_j)(g_i - g_j) = K Σ (r_i - r̄) g_i."""
        r, size = torch.tensor(rewards, dtype=torch.float64), len(rewards)
        g = torch.randn(size, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        pairs = sum((r[i] - r[j]) * (g[i] - g[j]) for i in range(size) for j in range(i + 1, size))
        own = Scores(rewards=r, lengths=torch.ones(size), draws=torch.zeros(size), group_size=size)
        centred = ComposedAdvantage()(own) @ g
        assert torch.allclose(torch.as_tensor(pairs), size * centred, atol=1e-8)

    def test_divisors_of_the_aggregations(self):
        """With half of the sequences masked, ``all`` divides by what was sampled, ``live`` by what is trained on."""
        batch, _, _, _ = numbers()
        batch.max_tokens = 10
        batch.loss_mask[:4] = False
        batch.loss_mask[4, 0] = False
        lengths, live = batch.completion_mask.sum(1).tolist(), batch.loss_mask.sum(1).tolist()
        batch.totals = StepTotals(
            all_tokens=sum(lengths), live_tokens=sum(live), all_sequences=8, live_sequences=sum(n > 0 for n in live)
        )
        found = {
            "token all": TokenMean("all"),
            "token live": TokenMean("live"),
            "sequence all": SequenceMean("all"),
            "sequence live": SequenceMean("live"),
            "sum all": SequenceSum("all"),
            "sum live": SequenceSum("live"),
            "constant": ConstantSum(),
            "given constant": ConstantSum(7),
        }
        per_sequence = {"all": sum(k / n for k, n in zip(live, lengths, strict=True)) / 8}
        per_sequence["live"] = sum(k > 0 for k in live) / batch.totals.live_sequences
        expected = {
            "token all": sum(live) / sum(lengths),
            "token live": 1.0,
            "sequence all": per_sequence["all"],
            "sequence live": per_sequence["live"],
            "sum all": sum(live) / 8,
            "sum live": sum(live) / batch.totals.live_sequences,
            "constant": sum(live) / (8 * 10),
            "given constant": sum(live) / 7,
        }
        ones = torch.ones(batch.tokens.shape)
        assert {name: float(part(ones, batch)) for name, part in found.items()} == pytest.approx(expected)

    def test_masked_group_equals_a_deleted_group(self):
        batch, policy, _, reference = numbers()
        for aggregation in (TokenMean("live"), SequenceMean("live"), ConstantSum(40)):
            loss = ComposedLoss(gate=MinClip(), regularisers=[ReferenceKL(0.1)], aggregation=aggregation)
            masked = copy.deepcopy(batch)
            masked.loss_mask[:4] = False
            masked.totals.live_tokens, masked.totals.live_sequences = float(masked.loss_mask.sum()), 4.0
            deleted = batch.select(torch.arange(4, 8))
            width = deleted.tokens.shape[1]
            deleted.totals = masked.totals
            whole = loss_and_gradient(loss, masked, policy, reference=reference)
            rest = loss_and_gradient(loss, deleted, policy[4:, :width], reference=reference[4:, :width])
            assert abs(whole[0] - rest[0]) < 1e-6
            assert torch.allclose(whole[1][4:, :width], rest[1], atol=1e-7)
            assert not whole[1][:4].any()


ADVANTAGES = {
    "whitened": ComposedAdvantage(scale=GroupStd()),
    "bernoulli": ComposedAdvantage(scale=BernoulliStd()),
    "leave one out": ComposedAdvantage(LeaveOneOut()),
    "log-mean-exp": ComposedAdvantage(LogMeanExp(0.5)),
    "batch": ComposedAdvantage(BatchMean(), BatchStd()),
    "reward": ComposedAdvantage(NoBaseline()),
    "maxrl": ComposedAdvantage(scale=GroupMeanScale()),
    "drop": DropNegatives(),
    "weight": ExponentiallyWeighted(),
    "length": LengthWeighted(),
    "majority": ComposedAdvantage(scale=MajorityStd()),
    "varied": ComposedAdvantage(scale=VariedShare()),
    "adaptive": ExponentiallyWeighted(temperature="adaptive"),
}


class TestAdvantages:
    @pytest.mark.parametrize("name", ADVANTAGES)
    @settings(max_examples=30, deadline=None)
    @given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=8, max_size=8), st.permutations(range(4)))
    def test_order_of_siblings_does_not_matter(self, name, rewards, order):
        own = scores(rewards)
        rows = torch.tensor([*order, *(4 + index for index in order)])
        other = Scores(rewards=own.rewards[rows], lengths=own.lengths[rows], draws=own.draws[rows], group_size=4)
        advantage = ADVANTAGES[name]
        assert torch.allclose(advantage(own)[rows], advantage(other), atol=1e-5)
        assert advantage(own).isfinite().all()

    @settings(max_examples=50, deadline=None)
    @given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=12, max_size=12))
    def test_gpg_makes_up_for_groups_without_variance(self, rewards):
        """The formula as a loop over groups of two."""
        pairs = [rewards[first : first + 2] for first in range(0, 12, 2)]
        valid = [pair for pair in pairs if pair[0] != pair[1]]
        expected = [len(pairs) / max(len(valid), 1) * (r - sum(pair) / 2) for pair in pairs for r in pair]
        found = ComposedAdvantage(scale=VariedShare())(scores(rewards, group_size=2))
        assert found.tolist() == pytest.approx(expected, abs=1e-6)

    @settings(max_examples=100, deadline=None)
    @given(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=6, max_size=6), st.integers(0, 10**6))
    def test_red_drop_leaves_no_more_negatives_than_positives(self, rewards, seed):
        own = scores(rewards, group_size=6, seed=seed)
        advantages = DropNegatives()(own)
        r = own.rewards
        negative = r < r.mean() - 1e-6
        positive = ~negative  # as the authors count: also completions at the mean
        kept_negative = negative & (advantages != 0)
        if int(negative.sum()) > int(positive.sum()):
            assert int(kept_negative.sum()) == int(positive.sum())
            expected = torch.where(positive | kept_negative, r - r[positive | kept_negative].mean(), 0.0)
        else:
            expected = r - r.mean()
        assert torch.allclose(advantages, expected, atol=1e-6)
        assert abs(float(advantages.sum())) < 1e-5  # centred by the mean over the kept ones

    def test_red_drop_counts_completions_at_the_mean_as_positive(self):
        own = scores([1.0, 0.5, 0.25, 0.25], group_size=4)
        assert DropNegatives()(own).tolist() == [0.5, 0.0, -0.25, -0.25]

    def test_red_drop_is_random_and_reproducible(self):
        rewards = [1.0, 0.0, 0.0, 0.0, 0.0]
        chosen = [DropNegatives()(scores(rewards, 5, seed)).nonzero().flatten().tolist() for seed in range(30)]
        assert len({tuple(indices) for indices in chosen}) == 4
        assert all(len(indices) == 2 for indices in chosen)
        assert chosen[3] == DropNegatives()(scores(rewards, 5, 3)).nonzero().flatten().tolist()

    def test_adaptive_temperature_balances_tokens(self):
        own = scores([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0])
        own.lengths[:] = torch.tensor([2, 9, 4, 5, 3, 2, 9, 3])
        weighted = ExponentiallyWeighted(temperature="adaptive", least_temperature=0.1)(own)
        assert abs(float((own.lengths * weighted).sum())) < 1e-3
        assert float((own.lengths * ComposedAdvantage()(own)).sum()) < -1
        own.lengths[:] = 5  # nothing to balance: the advantages are unchanged
        assert torch.equal(ExponentiallyWeighted(temperature="adaptive")(own), ComposedAdvantage()(own))

    def test_maxrl_is_0_for_a_group_without_success(self):
        assert not ComposedAdvantage(scale=GroupMeanScale())(scores([0.0] * 4 + [1.0, 0, 0, 0]))[:4].any()


def inside(value, low, high):
    return low <= value <= high


def one_side(t, ratio="r", low=0.8, high=1.2):
    return float(t[ratio] <= high if t["a"] > 0 else t[ratio] >= low)


# (loss, weight of A ∇log π at a token, from the token's ratio r, its completion's geometric mean s and product p,
#  the advantage a, the token's proximal ratio b = π_k/π_α and u = π_θ/π_k)
FORMULAS = {
    "reinforce": (ComposedLoss(), lambda t: 1.0),
    "importance": (ComposedLoss(weight=Importance()), lambda t: t["r"]),
    "one-side": (
        ComposedLoss(gate=OneSide(0.2, 0.3)),
        lambda t: float(t["r"] <= 1.3 if t["a"] > 0 else t["r"] >= 0.8),
    ),
    "two-side": (
        ComposedLoss(gate=TwoSide(0.2, 0.3), weight=Importance()),
        lambda t: t["r"] if 0.8 <= t["r"] <= 1.3 else 0.0,
    ),
    "ring": (
        ComposedLoss(gate=Ring(0.1, 0.1, 0.3, 0.5)),
        lambda t: float(0.9 <= t["r"] <= 1.1 or (t["r"] <= 0.7 if t["a"] > 0 else t["r"] >= 1.5)),
    ),
    "sequence one-side": (
        ComposedLoss(SequenceRatio(), OneSide(0.05, 0.05), Importance(), aggregation=TokenMean()),
        lambda t: t["s"] if (t["s"] <= 1.05 if t["a"] > 0 else t["s"] >= 0.95) else 0.0,
    ),
    "sequence product": (ComposedLoss(SequenceRatio(mean="product"), weight=Importance()), lambda t: t["p"]),
    "cispo": (ComposedLoss(gate=WeightClamp(0.4, 0.3)), lambda t: min(max(t["r"], 0.6), 1.3)),
    "topr": (ComposedLoss(weight=AsymmetricImportance()), lambda t: 1.0 if t["a"] > 0 else min(t["r"], 1.0)),
    "tis": (ComposedLoss(TokenRatio("none"), weight=TruncatedImportance(1.2)), lambda t: min(t["b"], 1.2)),
    "mis": (
        ComposedLoss(TokenRatio("none"), weight=MaskedImportance(0.8, 1.3)),
        lambda t: t["b"] if 0.8 <= t["b"] <= 1.3 else 0.0,
    ),
    "min-clip": (
        ComposedLoss(gate=MinClip(0.2, 0.3)),
        lambda t: t["r"] if (t["r"] <= 1.3 if t["a"] > 0 else t["r"] >= 0.8) else 0.0,
    ),
    "additive band": (
        ComposedLoss(gate=MinClip(0.2, 0.3, "proximal")),
        lambda t: t["r"] if (t["r"] <= t["b"] + 0.3 if t["a"] > 0 else t["r"] >= max(t["b"] - 0.2, 0)) else 0.0,
    ),
    "proximal ratio": (
        ComposedLoss(TokenRatio("proximal"), MinClip(0.2, 0.3)),
        lambda t: t["u"] if (t["u"] <= 1.3 if t["a"] > 0 else t["u"] >= 0.8) else 0.0,
    ),
    "dual clip": (
        ComposedLoss(gate=DualClip(0.2, 0.3, cap=1.5)),
        lambda t: t["r"] if (t["r"] <= 1.3 if t["a"] > 0 else 0.8 <= t["r"] <= 1.5) else 0.0,
    ),
    "off-policy mask": (
        ComposedLoss(gate=OffPolicySequenceMask(NoGate(), 0.05)),
        lambda t: 0.0 if t["a"] < 0 and -math.log(t["s"]) > 0.05 else 1.0,
    ),
    "divergence tv": (
        ComposedLoss(gate=DivergenceMask(0.05, 0.1)),
        lambda t: float(t["pi"] - t["al"] <= 0.1 if t["a"] > 0 else t["al"] - t["pi"] <= 0.05),
    ),
    "divergence kl": (
        ComposedLoss(gate=DivergenceMask(0.02, 0.01, "kl")),
        lambda t: float(t["kl"] <= 0.01 or t["pi"] <= t["al"] if t["a"] > 0 else t["kl"] <= 0.02 or t["pi"] >= t["al"]),
    ),
    "suffix veto": (
        ComposedLoss(gate=SuffixVeto(MinClip(0.9, 0.3), 0.7)),
        lambda t: (
            t["r"]
            * one_side(t, low=0.1, high=1.3)
            * (t["a"] > 0 or all(math.exp(x) >= 0.7 for x in t["logs"][: t["t"]]))
        ),
    ),
    "entropy band": (
        ComposedLoss(gate=EntropyBand(0.1, 0.5), weight=Importance()),
        lambda t: t["r"] * (abs(math.log(t["r"])) <= 0.1 + 0.5 * t["h"]),
    ),
    "interpolated ratio": (
        ComposedLoss(InterpolatedRatio(), MinClip(0.1, 0.2), TruncatedImportance(1.3)),
        lambda t: (
            min(t["r"] ** (2 / 3), 1.3)
            * t["r"] ** (1 / 3)
            * one_side({"a": t["a"], "r": t["r"] ** (1 / 3)}, low=0.9, high=1.2)
        ),
    ),
    "trust region mask, k2": (
        ComposedLoss(gate=TrustRegionMask(OneSide(0.2, 0.3), 0.3)),
        lambda t: float(max(x * x / 2 for x in t["logs"]) <= 0.3 and one_side(t, high=1.3)),
    ),
    "trust region mask, k3": (
        ComposedLoss(gate=TrustRegionMask(MinClip(0.2, 0.3), 0.5, "k3")),
        lambda t: float(max(math.exp(x) - 1 - x for x in t["logs"]) <= 0.5) * t["r"] * one_side(t, high=1.3),
    ),
    "trust region mask, kl": (
        ComposedLoss(gate=TrustRegionMask(threshold=0.2, statistic="kl")),
        lambda t: float(max(t["kls"]) <= 0.2),
    ),
    "rejection by the ratio": (
        ComposedLoss(weight=Rejection(statistic="ratio", level="geometric", high=1.1)),
        lambda t: float(inside(math.exp(sum(t["bs"]) / len(t["bs"])), 1 / 1.1, 1.1)),
    ),
    "rejection by k3": (
        ComposedLoss(gate=MinClip(0.2, 0.3), weight=Rejection(statistic="k3", level="geometric", high=0.1)),
        lambda t: t["r"] * one_side(t, high=1.3) * (sum(math.exp(x) - 1 - x for x in t["bs"]) / len(t["bs"]) <= 0.1),
    ),
    "soft gate": (
        ComposedLoss(gate=SoftGate(1.0, 3.0)),
        lambda t: t["r"] / math.cosh((1.0 if t["a"] > 0 else 3.0) * (t["r"] - 1) / 2) ** 2,
    ),
    "gamma": (
        ComposedLoss(SequenceRatio(mean="product"), weight=GammaWeight(1.0, 0.5, 0.3, 2.0)),
        lambda t: t["p"] * math.exp(0.5 * (1 - t["p"])) if t["a"] >= 0 else t["p"] ** 0.3 * math.exp(2 * (1 - t["p"])),
    ),
    "scaled": (ComposedLoss(scale=0.5), lambda t: 0.5),
}


def token_facts(policy, behaviour):
    """Return π and α of a token, and the KL of "this token or another one", by their definitions."""
    pi, al = math.exp(policy), math.exp(behaviour)
    rest, rest_al = max(1 - pi, 1e-8), max(1 - al, 1e-8)
    return {"pi": pi, "al": al, "kl": al * math.log(al / pi) + rest_al * math.log(rest_al / rest)}


def test_parts_that_read_the_lag_of_a_token():
    batch, policy, proximal, _ = numbers(seed=3)
    steps = (torch.arange(len(batch))[:, None] + torch.arange(batch.tokens.shape[1])) % 5
    steps[0] = RECORDED
    batch.behaviour_step = steps
    _, plain = loss_and_gradient(ComposedLoss(), batch, policy, proximal=proximal)
    lag = torch.where(steps == RECORDED, 0, 4 - steps)
    for loss, factor in (
        (ComposedLoss(gate=MaxTokenLag(NoGate(), limit=2)), (lag <= 2).float()),
        (ComposedLoss(weight=LagDecay(half_life=2)), 0.5 ** (lag / 2)),
        (ComposedLoss(weight=LagDecay(half_life=1, weight=LagDecay(half_life=1))), 0.25**lag),
    ):
        _, gradient = loss_and_gradient(loss, batch, policy, proximal=proximal, step=4)
        assert torch.allclose(gradient, plain * factor, atol=1e-7)
        assert not torch.allclose(gradient, plain, atol=1e-3)


def test_the_interpolated_proximal_policy_depends_on_the_lag_of_a_token():
    """A-3PO with tokens of lags 0 to 4, and recorded ones, which have none."""
    batch, policy, _, _ = numbers(seed=3)
    steps = (torch.arange(len(batch))[:, None] + torch.arange(batch.tokens.shape[1])) % 5
    steps[0] = RECORDED
    batch.behaviour_step = steps
    lag = torch.where(steps == RECORDED, 1, (4 - steps).clamp(min=1))
    ratio = (policy - batch.behaviour_logprobs).exp()
    inner = ratio ** (1 / lag)
    kept = torch.where(batch.advantages > 0, inner <= 1.2, inner >= 0.8)
    expected = -batch.advantages * ratio * kept / batch.completion_mask.sum()
    loss = ComposedLoss(InterpolatedRatio(), MinClip(), TruncatedImportance(math.inf))
    for own in (loss, ComposedLoss(InterpolatedRatio(), MinClip())):
        assert (own.needs_proximal, own.needs_behaviour) == (False, True)
    _, gradient = loss_and_gradient(loss, batch, policy, step=4)
    assert torch.allclose(gradient, expected * batch.completion_mask, atol=1e-6)
    _, around_alpha = loss_and_gradient(ComposedLoss(gate=MinClip()), batch, policy, step=4)
    assert not torch.allclose(gradient, around_alpha, atol=1e-3)


def test_the_suffix_veto_stops_what_follows_a_very_unlikely_token():
    batch, policy, _, _ = numbers(seed=3)
    policy = batch.behaviour_logprobs + 0.1
    policy[:, 2] -= 12  # a ratio of 7e-6
    batch.advantages = torch.where(batch.completion_mask, torch.tensor([[1.0], [-1.0]]).repeat(4, 1), 0.0)
    _, plain = loss_and_gradient(ComposedLoss(gate=MinClip(1.0, 4.0)), batch, policy)
    _, gradient = loss_and_gradient(ComposedLoss(gate=SuffixVeto()), batch, policy)
    assert torch.equal(gradient[::2], plain[::2])  # positive advantages
    assert torch.equal(gradient[1::2, :3], plain[1::2, :3])
    assert not gradient[1::2, 3:].any()
    assert plain[1::2, 3:].any()


@pytest.mark.parametrize("name", FORMULAS)
def test_gradients_equal_the_formula(name):
    loss, weight = FORMULAS[name]
    batch, policy, proximal, _ = numbers(seed=3)
    entropy = torch.rand(policy.shape, generator=torch.Generator().manual_seed(6)) * 2
    _, gradient = loss_and_gradient(loss, batch, policy, proximal=proximal, step=3, entropy=entropy)
    total, seen = float(batch.completion_mask.sum()), set()
    for i in range(len(batch)):
        length = int(batch.completion_mask[i].sum())
        logs = [float(policy[i, t] - batch.behaviour_logprobs[i, t]) for t in range(length)]
        for t in range(batch.tokens.shape[1]):
            if t >= length:
                assert gradient[i, t] == 0
                continue
            facts = {
                "r": math.exp(logs[t]),
                "s": math.exp(sum(logs) / length),
                "p": math.exp(sum(logs)),
                "a": float(batch.advantages[i, 0]),
                "b": math.exp(float(proximal[i, t] - batch.behaviour_logprobs[i, t])),
                "u": math.exp(float(policy[i, t] - proximal[i, t])),
                "logs": logs,
                "t": t,
                "h": float(entropy[i, t]),
                "bs": (proximal[i] - batch.behaviour_logprobs[i])[:length].tolist(),
                "kls": [
                    token_facts(float(policy[i, n]), float(batch.behaviour_logprobs[i, n]))["kl"] for n in range(length)
                ],
                **token_facts(float(policy[i, t]), float(batch.behaviour_logprobs[i, t])),
            }
            expected = -facts["a"] * weight(facts) / total
            seen.add(weight(facts))
            assert abs(float(gradient[i, t]) - expected) < 1e-5
    assert len(seen) > 1 or name in ("reinforce", "scaled")  # both sides of every condition occur


DIFFERENTIABLE = {
    "min-clip": ComposedLoss(gate=MinClip()),
    "sequence ratio": ComposedLoss(SequenceRatio(), MinClip(), aggregation=SequenceMean()),
    "product": ComposedLoss(SequenceRatio(mean="product"), MinClip()),
    "dual clip": ComposedLoss(gate=DualClip(cap=1.5)),
    "geometric clip": ComposedLoss(gate=GeometricClip(), aggregation=SequenceMean()),
    "additive band": ComposedLoss(gate=MinClip(centre="proximal")),
    "soft gate": ComposedLoss(gate=SoftGate(), aggregation=SequenceMean()),
    "k1": ComposedLoss(regularisers=[ReferenceKL(0.3, "k1")]),
    "k2": ComposedLoss(regularisers=[ReferenceKL(0.3, "k2")]),
    "k3": ComposedLoss(regularisers=[ReferenceKL(0.3, "k3")]),
    "corrected k3": ComposedLoss(regularisers=[ReferenceKL(0.3, "k3_corrected")]),
    "behaviour k2": ComposedLoss(regularisers=[BehaviourK2()]),
    "forward kl": ComposedLoss(regularisers=[BehaviourForwardKL()]),
    "constant sum": ComposedLoss(gate=MinClip(), aggregation=ConstantSum(10)),
}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_equal_finite_differences(name):
    loss = DIFFERENTIABLE[name]
    batch, policy, proximal, reference = numbers(seed=5, dtype=torch.float64)
    _, gradient = loss_and_gradient(loss, batch, policy, proximal, reference)
    step = 1e-6
    for i, t in batch.completion_mask.nonzero().tolist():
        ends = []
        for sign in (1, -1):
            moved = policy.clone()
            moved[i, t] += sign * step
            value = loss(
                batch,
                PolicyLogprobs(policy=moved, entropy=moved, proximal=proximal, reference=reference),
            ).loss
            ends.append(float(value))
        assert abs((ends[0] - ends[1]) / (2 * step) - float(gradient[i, t])) < 1e-6


def test_second_moment_stays_within_its_limit():
    batch, policy, _, _ = numbers(rows=64)
    loss = ComposedLoss(gate=SecondMoment(0.04), weight=Importance())
    output = loss(batch, PolicyLogprobs(policy=policy, entropy=policy))
    log_ratio = policy - batch.behaviour_logprobs
    harmful = batch.loss_mask & (log_ratio * batch.advantages > 0)
    kept = harmful & ~output.clipped_low & ~output.clipped_high
    assert float(log_ratio[harmful].square().mean()) > 0.04 >= float(log_ratio[kept].square().mean())
    assert not (output.clipped_low | output.clipped_high)[batch.loss_mask & ~harmful].any()
    worst_kept, best_dropped = log_ratio[kept].abs().max(), log_ratio[harmful & ~kept].abs().min()
    assert worst_kept <= best_dropped


def test_entropy_bonus_has_a_gradient():
    from tests.helpers import a_batch, tiny_policy

    policy, batch = tiny_policy(), a_batch()
    policy.build()
    batch.totals.all_tokens = float(batch.completion_mask.sum())

    def entropy(gradient):
        return policy(batch.tokens, batch.completion_mask, 1.0, entropy_gradient=gradient)

    logprobs, values = entropy(True)
    loss = ComposedLoss(regularisers=[EntropyBonus(1.0)])
    assert loss.needs_entropy_gradient
    batch.advantages[:] = 0
    loss(batch, PolicyLogprobs(policy=logprobs, entropy=values)).loss.backward()
    weight = policy.model.get_input_embeddings().weight
    own = float(weight.grad[3, 5])
    ends = []
    for step in (1e-2, -1e-2):
        with torch.no_grad():
            weight[3, 5] += step
            ends.append(-float(entropy(False)[1].sum()) / batch.totals.all_tokens)
            weight[3, 5] -= step
    assert own != 0
    assert abs((ends[0] - ends[1]) / 2e-2 - own) < 1e-4
    assert not entropy(False)[1].requires_grad


# Every named method: the factor of A ∇log π at a token, the gradient of its regularisers, its aggregation, and the
# advantages of rewards 1, 0, 0, 0 | 1, 1, 1, 0. Names as above, and d = log π/π_ref, l = log π/π_α.
def k3(t, coef):
    return coef * (1 - math.exp(-t["d"]))


def far_ring(t):
    return float(inside(t["r"], 0.8, 1.2) or (t["r"] <= 0.4 if t["a"] > 0 else t["r"] >= 3.0))


CENTRED = [0.75, -0.25, -0.25, -0.25, 0.25, 0.25, 0.25, -0.75]
WHITENED = [3**0.5, *[-(3**-0.5)] * 3, *[3**-0.5] * 3, -(3**0.5)]
LOO = [a * 4 / 3 for a in CENTRED]
MAXRL = [3.0, -1.0, -1.0, -1.0, 1 / 3, 1 / 3, 1 / 3, -1.0]
BATCH = [a / torch.tensor(CENTRED).std().item() for a in CENTRED]
WEIGHTED = [a * math.exp(a) for a in CENTRED]
SOFT = [math.log((math.e + 3) / 4), math.log((3 * math.e + 1) / 4)]
OPMD = [1 - SOFT[0], *[-SOFT[0]] * 3, *[1 - SOFT[1]] * 3, -SOFT[1]]
GDPO = [a / 0.5001 / (torch.tensor(CENTRED).std().item() / 0.5001 + 1e-4) for a in CENTRED]
MCPO = [a / (1 if i < 4 else 2 * 0.1875**0.5) for i, a in enumerate(WHITENED)]
CLIP = lambda t: t["r"] * one_side(t)  # noqa: E731
NAMED = {
    "grpo": (CLIP, lambda t: k3(t, 0.04), "sequence", WHITENED),
    "off_policy_grpo": (CLIP, lambda t: k3(t, 0.01), "token", [a * (0.1875 / 0.1876) ** 0.5 for a in WHITENED]),
    "off_policy_grpo_eq6": (
        lambda t: t["r"] * (t["r"] <= t["b"] + 0.2 if t["a"] > 0 else t["r"] >= max(t["b"] - 0.2, 0)),
        lambda t: k3(t, 0.01),
        "token",
        [a * (0.1875 / 0.1876) ** 0.5 for a in WHITENED],
    ),
    "reinforce": (lambda t: 1.0, None, "token", CENTRED),
    "rec_oneside_is": (CLIP, None, "token", CENTRED),
    "rec_oneside_nois": (one_side, None, "token", CENTRED),
    "rec_oneside_wide": (lambda t: one_side(t, "r", 0.4, 3.0), None, "token", CENTRED),
    "rec_twoside_is": (lambda t: t["r"] * inside(t["r"], 0.8, 1.2), None, "token", CENTRED),
    "rec_twoside_nois": (lambda t: float(inside(t["r"], 0.8, 1.2)), None, "token", CENTRED),
    "rec_ring_is": (lambda t: t["r"] * far_ring(t), None, "token", CENTRED),
    "rec_ring_nois": (far_ring, None, "token", CENTRED),
    "rec_gspo_is": (lambda t: t["s"] * one_side(t, "s", 0.9997, 1.0004), None, "sequence", CENTRED),
    "rec_gspo_nois": (lambda t: one_side(t, "s", 0.9997, 1.0004), None, "sequence", CENTRED),
    "red_drop": (lambda t: 1.0, None, "token", None),
    "red_weight": (lambda t: 1.0, None, "token", WEIGHTED),
    "red_weight_adaptive": (lambda t: 1.0, None, "token", None),
    "opmd": (lambda t: 0.5, None, "token", CENTRED),
    "opmd_log_mean_exp": (lambda t: 0.5, None, "token", OPMD),
    "opmd_kimi": (lambda t: 1.0, lambda t: 0.2 * t["l"], "token", CENTRED),
    "asymre": (lambda t: 1.0, lambda t: -0.1, "token", CENTRED),
    "dr_grpo": (CLIP, None, "constant", CENTRED),
    "dapo": (lambda t: t["r"] * one_side(t, "r", 0.8, 1.28), None, "token", WHITENED),
    "gspo": (lambda t: t["s"] * one_side(t, "s", 0.9997, 1.0004), None, "sequence", WHITENED),
    "gmpo": (
        lambda t: t["g"] * (t["l"] <= 0.4 if t["a"] > 0 else t["l"] >= -0.4),
        None,
        "sequence",
        WHITENED,
    ),
    "cispo": (lambda t: min(t["r"], 5.0), None, "token", WHITENED),
    "rloo": (CLIP, None, "token", LOO),
    "reinforce_plus_plus": (CLIP, None, "token", BATCH),
    "maxrl": (CLIP, None, "token", MAXRL),
    "topr": (lambda t: 1.0 if t["a"] > 0 else min(t["r"], 1.0), None, "token", CENTRED),
    "decoupled_ppo": (
        lambda t: t["r"] * (t["r"] <= 1.2 * t["b"] if t["a"] > 0 else t["r"] >= 0.8 * t["b"]),
        None,
        "token",
        WHITENED,
    ),
    "tis_grpo": (lambda t: min(t["b"], 2.0) * t["u"] * one_side(t, "u"), None, "token", WHITENED),
    "mis_grpo": (
        lambda t: t["b"] * inside(t["b"], 0.5, 2.0) * t["u"] * one_side(t, "u"),
        None,
        "token",
        WHITENED,
    ),
    "m2po": (lambda t: t["r"] * t["m"], None, "token", WHITENED),
    "a3po": (
        lambda t: t["r"] * one_side({"a": t["a"], "r": t["r"] ** (1 / 3)}),
        None,
        "token",
        WHITENED,
    ),
    "clip_cov": (CLIP, None, "token", WHITENED),
    "kl_cov": (lambda t: t["r"], lambda t: 0.1 * math.copysign(1.0, t["l"]) * t["top"], "token", WHITENED),
    "estr": (lambda t: t["r"] * (abs(t["l"]) <= 0.05 + 0.3 * t["h"]), None, "token", WHITENED),
    "mu_grpo": (lambda t: t["r"] * (t["a"] < 0 or t["r"] <= 5.0), None, "token", WHITENED),
    "trm": (lambda t: t["r"] * (max(x * x / 2 for x in t["logs"]) <= 2.5), None, "token", WHITENED),
    "icepop": (
        lambda t: t["b"] * inside(t["b"], 0.5, 5.0) * t["u"] * one_side(t, "u"),
        None,
        "token",
        WHITENED,
    ),
    "tis_grpo_sequence": (
        lambda t: min(math.exp(sum(t["bs"])), 2.0) * t["u"] * one_side(t, "u"),
        None,
        "token",
        WHITENED,
    ),
    "tis_grpo_geometric": (
        lambda t: min(math.exp(sum(t["bs"]) / len(t["bs"])), 2.0) * t["u"] * one_side(t, "u"),
        None,
        "token",
        WHITENED,
    ),
    "geo_rs_grpo": (
        lambda t: inside(math.exp(sum(t["bs"]) / len(t["bs"])), 0.999, 1.001) * t["u"] * one_side(t, "u"),
        None,
        "token",
        WHITENED,
    ),
    "k3_rs_grpo": (
        lambda t: (sum(math.exp(x) - 1 - x for x in t["bs"]) / len(t["bs"]) <= 0.01) * t["u"] * one_side(t, "u"),
        None,
        "token",
        WHITENED,
    ),
    "luspo": (lambda t: t["s"] * one_side(t, "s", 0.998, 1.0025), None, "sum", WHITENED),
    "gdpo": (CLIP, None, "token", GDPO),
    "gac": (CLIP, None, "token", WHITENED),
    "rl_zvp": (CLIP, None, "token", WHITENED),
    "mcpo": (lambda t: t["r"] * one_side(t, "r", 0.8, 1.28), None, "sequence", MCPO),
    "opo": (lambda t: 1.0, None, "token", None),
    "gpg": (lambda t: 1.0, None, "token", CENTRED),
    "vcpo": (lambda t: min(t["p"], 8.0), None, "sequence", None),
    "sapo": (
        lambda t: t["r"] / math.cosh((1.0 if t["a"] > 0 else 1.05) * (t["r"] - 1) / 2) ** 2,
        None,
        "sequence",
        WHITENED,
    ),
    "vespo": (
        lambda t: t["p"] ** 2 * math.exp(3 * (1 - t["p"])) if t["a"] >= 0 else t["p"] ** 3 * math.exp(2 * (1 - t["p"])),
        None,
        "token",
        WHITENED,
    ),
    "dppo_tv": (
        lambda t: t["r"] * (t["pi"] - t["al"] <= 0.15 if t["a"] > 0 else t["al"] - t["pi"] <= 0.15),
        None,
        "constant",
        CENTRED,
    ),
    "dppo_kl": (
        lambda t: t["r"] * (t["kl"] <= 0.05 or (t["pi"] <= t["al"] if t["a"] > 0 else t["pi"] >= t["al"])),
        None,
        "constant",
        CENTRED,
    ),
}


def token_covariances(batch, policy):
    """Return the covariance of advantage and log π of each token, by its row and index."""
    mask = batch.loss_mask
    mean_advantage, mean_logprob = float(batch.advantages[mask].mean()), float(policy[mask].mean())
    return {
        (i, t): (float(batch.advantages[i, t]) - mean_advantage) * (float(policy[i, t]) - mean_logprob)
        for i, t in mask.nonzero().tolist()
    }


@pytest.mark.parametrize("method", METHODS)
def test_every_named_method_equals_its_formula(method):
    """Compares the config file, built as by the command line, with one line of Python."""
    weight, regulariser, mean, advantages = NAMED[method]
    cli = build(method)
    batch, policy, proximal, reference = numbers(seed=4)
    entropy = torch.rand(policy.shape, generator=torch.Generator().manual_seed(6)) * 2
    _, gradient = loss_and_gradient(cli.model.loss, batch, policy, proximal, reference, step=3, entropy=entropy)
    size, logs = len(batch), policy - batch.behaviour_logprobs
    harmful = sorted(
        float(logs[i, t]) ** 2
        for i, t in batch.loss_mask.nonzero().tolist()
        if float(logs[i, t] * batch.advantages[i, t]) > 0
    )
    limit = max((h for n, h in enumerate(harmful, 1) if sum(harmful[:n]) / n <= 0.04), default=0.0)
    covariances = token_covariances(batch, policy)
    assert max(covariances.values()) < 1  # below the band of Clip-Cov, which a test below reaches
    for i in range(size):
        length = int(batch.completion_mask[i].sum())
        own, a = logs[i, :length].tolist(), float(batch.advantages[i, 0])
        share = {
            "token": float(batch.completion_mask.sum()),
            "sequence": length * size,
            "constant": size * 10,
            "sum": size,
        }[mean]
        for t in range(length):
            facts = {
                "r": math.exp(own[t]),
                "s": math.exp(sum(own) / length),
                "p": math.exp(sum(own)),
                "g": math.exp(sum(min(x, 0.4) if a > 0 else max(x, -0.4) for x in own) / length),
                "a": a,
                "b": math.exp(float(proximal[i, t] - batch.behaviour_logprobs[i, t])),
                "u": math.exp(float(policy[i, t] - proximal[i, t])),
                "d": float(policy[i, t] - reference[i, t]),
                "l": own[t],
                "m": not (own[t] * a > 0 and own[t] ** 2 > limit + 1e-9),
                "logs": own,
                "h": float(entropy[i, t]),
                "top": covariances[i, t] == max(covariances.values()),
                "bs": (proximal[i] - batch.behaviour_logprobs[i])[:length].tolist(),
                **token_facts(float(policy[i, t]), float(batch.behaviour_logprobs[i, t])),
            }
            expected = (-a * weight(facts) + (regulariser(facts) if regulariser else 0.0)) / share
            assert abs(float(gradient[i, t]) - expected) < 1e-5, facts
    if advantages is not None:
        own = scores([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0])
        own.parts = torch.stack([own.rewards, torch.ones(8)], 1)[:, :, None]
        found = cli.datamodule.advantage(own)
        assert torch.allclose(found, torch.tensor(advantages), atol=1e-4)
    else:
        kinds = {
            "red_drop": DropNegatives,
            "red_weight_adaptive": ExponentiallyWeighted,
            "opo": LengthWeighted,
            "vcpo": LeastVariance,
        }
        kind = kinds[method]
        assert type(cli.datamodule.advantage) is kind


class TestExtremes:
    @pytest.mark.parametrize("method", METHODS)
    def test_extreme_ratios_give_finite_gradients(self, method):
        """Log-ratios of ±100, with and without advantage, and masked."""
        batch, policy, proximal, reference = numbers(rows=8)
        policy = torch.where(torch.arange(8)[:, None] % 2 == 0, batch.behaviour_logprobs + 100, policy - 100)
        batch.advantages[2:4] = 0.0
        batch.loss_mask[4:6] = False
        value, gradient = loss_and_gradient(build(method).model.loss, batch, policy, proximal, reference)
        assert math.isfinite(value)
        assert gradient.isfinite().all()
        assert not gradient[4:6].any()

    @pytest.mark.parametrize("method", METHODS)
    def test_an_extreme_proximal_policy_gives_finite_gradients(self, method):
        """π_k/π_α of e^±100, with the policy at π_k and at π_α."""
        batch, policy, _, reference = numbers(rows=8)
        far = torch.where(torch.arange(8)[:, None] % 2 == 0, batch.behaviour_logprobs + 100, policy - 100)
        for own in (far, policy):
            value, gradient = loss_and_gradient(build(method).model.loss, batch, own, far, reference)
            assert math.isfinite(value)
            assert gradient.isfinite().all()

    def test_k3_never_pulls_away_from_the_reference(self):
        d = torch.linspace(-60, 60, 2401, dtype=torch.float64, requires_grad=True)
        kl_divergence(d, torch.zeros_like(d), "k3").sum().backward()
        assert (d.grad[d < 0] <= 0).all()
        assert (d.grad[d > 0] >= 0).all()
        assert (d.grad[(d < 0) & (d > -20)] < 0).all()

    def test_product_over_a_long_completion_is_finite(self):
        batch, policy, _, _ = numbers(rows=4, width=2000)
        batch.loss_mask[1] = False
        policy = batch.behaviour_logprobs + 0.05
        loss = ComposedLoss(SequenceRatio(mean="product"), MinClip())
        value, gradient = loss_and_gradient(loss, batch, policy)
        assert math.isfinite(value)
        assert gradient.isfinite().all()

    @pytest.mark.parametrize("name", ADVANTAGES)
    @pytest.mark.parametrize("reward", [0.9, 10.1, 1000.1])
    def test_equal_rewards_have_no_advantage(self, name, reward):
        if name in ("bernoulli", "majority", "reward") and (reward > 1 or name == "reward"):
            pytest.skip("takes rewards from 0 to 1, or has no baseline")
        own = scores(torch.full((14,), reward), group_size=7)
        own.rewards = own.rewards.double()  # as in the data module
        assert ADVANTAGES[name](own).abs().max() < 1e-9

    def test_second_moment_keeps_all_tokens_at_ratio_1(self):
        batch, _, _, _ = numbers()
        loss = ComposedLoss(gate=SecondMoment(), weight=Importance())
        _, gradient = loss_and_gradient(loss, batch, batch.behaviour_logprobs.clone())
        assert gradient[batch.loss_mask].all()


def test_kl_cov_does_not_penalise_rounding():
    """On-policy the sign of log ρ is that of a rounding error."""
    batch, policy, _, _ = numbers()
    policy = batch.behaviour_logprobs + 1e-6 * torch.randn(policy.shape, generator=torch.Generator().manual_seed(1))
    _, plain = loss_and_gradient(ComposedLoss(gate=MinClip(1.0, math.inf)), batch, policy)
    _, gradient = loss_and_gradient(ComposedLoss(gate=CovariancePenalty(fraction=0.5)), batch, policy)
    assert torch.equal(gradient, plain)


def test_clip_cov_draws_tokens_of_its_band():
    """A share of all tokens is stopped; the draw depends on the optimizer step, not on micro-batches."""
    batch, policy, _, _ = numbers(rows=32)
    gate = CovarianceClip(OneSide(0.5, 0.5), fraction=0.1, low=0.2, high=1.0)
    plain = loss_and_gradient(ComposedLoss(gate=OneSide(0.5, 0.5)), batch, policy)[1]
    covariances, count = token_covariances(batch, policy), int(0.1 * int(batch.loss_mask.sum()))
    stopped = []
    for step in range(3):
        gradient = loss_and_gradient(ComposedLoss(gate=gate), batch, policy, step=step)[1]
        drawn = {(i, t) for i, t in ((plain != 0) & (gradient == 0)).nonzero().tolist()}
        assert len(drawn) == count
        assert all(0.2 < covariances[token] < 1.0 for token in drawn)
        assert torch.equal(gradient[gradient != 0], plain[gradient != 0])
        stopped.append(drawn)
    assert stopped[0] != stopped[1] != stopped[2]
    for loss in (ComposedLoss(gate=gate), ComposedLoss(gate=CovariancePenalty(fraction=0.1))):
        whole = loss_and_gradient(loss, batch, policy)[1]
        pieces = torch.zeros_like(whole)

        def of(piece):
            return policy[piece.rows, : piece.tokens.shape[1]]

        parts = [(piece, PolicyLogprobs(policy=of(piece), entropy=of(piece))) for piece in batch.split(3)]
        loss.survey(parts, lambda values: values)
        for piece in batch.split(3):
            pieces[piece.rows, : piece.tokens.shape[1]] += loss_and_gradient(loss, piece, of(piece))[1]
        assert torch.allclose(whole, pieces, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_losses_of_micro_batches_add_up(method):
    batch, policy, proximal, reference = numbers(rows=32)
    loss = build(method).model.loss
    whole, gradient = loss_and_gradient(loss, batch, policy, proximal, reference)
    total, pieces = 0.0, torch.zeros_like(gradient)

    def of(piece):
        return [values[piece.rows, : piece.tokens.shape[1]] for values in (policy, proximal, reference)]

    if loss.surveys_step:
        parts = [(piece, PolicyLogprobs(policy=of(piece)[0], entropy=of(piece)[0])) for piece in batch.split(3)]
        loss.survey(parts, lambda values: values)
    for piece in batch.split(3):
        width = piece.tokens.shape[1]
        value, own = loss_and_gradient(loss, piece, *of(piece))
        total += value
        pieces[piece.rows, :width] += own
    assert abs(total - whole) < 1e-5
    assert torch.allclose(gradient, pieces, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ComposedLoss(gate=MinClip(), weight=Importance()), "so it would be squared"),
        (lambda: ComposedLoss(gate=WeightClamp(), weight=AsymmetricImportance()), "so it would be squared"),
        (lambda: ComposedLoss(gate=WeightClamp(), weight=TruncatedImportance()), "already contains that factor"),
        (lambda: ComposedLoss(gate=MinClip(), weight=MaskedImportance()), "already contains that factor"),
        (lambda: ComposedLoss(TokenRatio("proximal"), MinClip(centre="proximal")), "use centre 'one'"),
        (lambda: ComposedLoss(SequenceRatio(), MinClip(centre="proximal")), "use centre 'one'"),
        (
            lambda: ComposedLoss(TokenRatio("none"), OffPolicySequenceMask(MinClip(centre="proximal"))),
            "use centre 'one'",
        ),
        (lambda: ComposedLoss(TokenRatio("none"), OneSide()), "always 1"),
        (lambda: ComposedLoss(TokenRatio("none"), weight=Importance()), "always 1"),
        (lambda: ComposedLoss(TokenRatio("none"), DualClip()), "always 1"),
        (
            lambda: ComposedLoss(
                TokenRatio("none"), OffPolicySequenceMask(OffPolicySequenceMask(MinClip(centre="proximal")))
            ),
            "use centre 'one'",
        ),
        (lambda: TruncatedImportance(2.0, "word"), "level is 'word'"),
        (lambda: SequenceRatio(mean="arithmetic"), "one of geometric, product"),
        (lambda: TokenRatio("alpha"), "over is 'alpha'"),
        (lambda: TokenMean("liv"), "one of all, live"),
        (lambda: ReferenceKL(0.1, "k9"), "estimator is 'k9'"),
        (lambda: ReferenceKL(math.inf), "above 0 and below inf"),
        (lambda: MinClip(centre="two"), "centre is 'two'"),
        (lambda: ComposedLoss(SequenceRatio(), GeometricClip()), "use TokenRatio"),
        (lambda: ComposedLoss(scale=0), "scale is 0"),
        (lambda: OneSide(low=1.5), "low is 1.5; it must be at least 0 and at most 1"),
        (lambda: TwoSide(high=-0.1), "high is -0.1"),
        (lambda: Ring(outer_low=0.1), "outer_low is 0.1; it must be at least 0.2"),
        (lambda: Ring(outer_low=1.5), "^outer_low is 1.5; it must be at least 0 and at most 1"),
        (lambda: Ring(outer_high=-1), "^outer_high is -1"),
        (lambda: DualClip(cap=1.1), "cap is 1.1; it must be above 1.2"),
        (lambda: GeometricClip(low=-1), "low is -1"),
        (lambda: SecondMoment(0), "limit is 0"),
        (lambda: OffPolicySequenceMask(threshold=0), "threshold is 0"),
        (lambda: SoftGate(positive=0), "^positive is 0; it must be above 0"),
        (lambda: SoftGate(negative=-1), "^negative is -1; it must be above 0"),
        (lambda: ComposedLoss(gate=SoftGate(), weight=Importance()), "so it would be squared"),
        (lambda: ComposedLoss(TokenRatio("none"), SoftGate()), "always 1"),
        (lambda: CovarianceClip(fraction=0), "^fraction is 0; it must be above 0 and at most 1"),
        (lambda: CovarianceClip(low=2, high=1), "^high is 1; it must be above 2: the lower edge of the band"),
        (lambda: CovarianceClip(EntropyBand()), "entropies are not known when tokens are drawn"),
        (lambda: CovarianceClip(MaxTokenLag(EntropyBand(), 8)), "entropies are not known when tokens are drawn"),
        (lambda: CovariancePenalty(fraction=1.5), "^fraction is 1.5; it must be above 0 and at most 1"),
        (lambda: CovariancePenalty(coef=0), "^coef is 0; it must be above 0"),
        (lambda: ComposedLoss(gate=CovarianceClip(), weight=Importance()), "so it would be squared"),
        (lambda: SuffixVeto(threshold=0), "^threshold is 0; it must be above 0 and below 1"),
        (lambda: SuffixVeto(threshold=1.0), "^threshold is 1.0; it must be above 0 and below 1"),
        (lambda: ComposedLoss(gate=SuffixVeto(), weight=Importance()), "so it would be squared"),
        (lambda: EntropyBand(base=0), "^base is 0; it must be above 0"),
        (lambda: EntropyBand(slope=-1), "^slope is -1; it must be at least 0"),
        (lambda: ComposedLoss(TokenRatio("none"), EntropyBand()), "always 1"),
        (lambda: ComposedLoss(InterpolatedRatio(), MinClip(centre="proximal")), "use centre 'one'"),
        (lambda: TrustRegionMask(threshold=0), "^threshold is 0; it must be above 0"),
        (lambda: TrustRegionMask(statistic="k1"), "statistic is 'k1'; it must be one of kl, k2, k3"),
        (lambda: ComposedLoss(TokenRatio("none"), TrustRegionMask(OneSide())), "always 1"),
        (lambda: Rejection(statistic="k1"), "statistic is 'k1'; it must be one of ratio, k2, k3"),
        (lambda: Rejection(level="word"), "level is 'word'"),
        (lambda: Rejection(level="max"), "level is 'max', which is for k2 and k3"),
        (lambda: Rejection(high=1.0), "^high is 1.0; it must be above 1: a ratio of 1 must be kept"),
        (lambda: Rejection(low=1.2), "^low is 1.2; it must be at least 0 and below 1"),
        (lambda: Rejection(statistic="k3", high=0), "^high is 0; it must be above 0"),
        (lambda: Rejection(statistic="k3", low=0.5), "^low is 0.5, but k3 has an upper limit only: remove low"),
        (lambda: ComposedLoss(gate=MinClip(), weight=Rejection(Importance())), "so it would be squared"),
        (lambda: ComposedLoss(gate=MinClip(), weight=Rejection(TruncatedImportance())), "already contains that factor"),
        (lambda: SequenceSum("liv"), "one of all, live"),
        (lambda: GammaWeight(positive_shape=0), "^positive_shape is 0; it must be above 0"),
        (lambda: GammaWeight(negative_rate=-2.0), "^negative_rate is -2.0; it must be above 0"),
        (lambda: ComposedLoss(gate=MinClip(), weight=GammaWeight()), "so it would be squared"),
        (lambda: DivergenceMask(low=0), "^DivergenceMask's low is 0; it must be above 0 and at most 1: no total"),
        (lambda: DivergenceMask(high=1.5), "^DivergenceMask's high is 1.5; it must be above 0 and at most 1"),
        (lambda: DivergenceMask(high=-0.1, divergence="kl"), "^DivergenceMask's high is -0.1; it must be above 0$"),
        (lambda: DivergenceMask(divergence="js"), "divergence is 'js'; it must be one of tv, kl"),
        (lambda: MaxTokenLag(limit=-1), "limit is -1"),
        (lambda: ComposedLoss(TokenRatio("none"), MaxTokenLag(MinClip(centre="proximal"))), "use centre 'one'"),
        (lambda: LagDecay(half_life=0), "half_life is 0"),
        (lambda: ComposedLoss(gate=MinClip(), weight=LagDecay(weight=Importance())), "so it would be squared"),
        (lambda: TruncatedImportance(0), "cap is 0"),
        (lambda: MaskedImportance(2.0, 5.0), "low is 2.0; it must be at least 0 and below 1: a ratio of 1"),
        (lambda: MaskedImportance(0.1, 0.5), "high is 0.5; it must be above 1: a ratio of 1 must be kept"),
        (lambda: ReferenceKL(0), "remove the part instead"),
        (lambda: MasteredHinge(0), "remove the part instead"),
        (lambda: MasteredHinge(width=-1), "width is -1"),
        (lambda: SignedZeroVariance(scale=0), "scale is 0"),
        (lambda: SignedZeroVariance(scale=math.inf), "scale is inf"),
        (lambda: MajorityStd(0), "eps is 0"),
        (lambda: DecoupledWhitened(0), "eps is 0"),
        (lambda: LeastVariance()(scores([1.0, 0, 0, 0])), "there are no ratios"),
        (lambda: DecoupledWhitened()(scores([1.0, 0, 0, 0])), "there is only the sum"),
        (lambda: ComposedAdvantage(scale=MajorityStd())(scores([2.0, 0, 0, 0])), "MajorityStd requires rewards from 0"),
        (lambda: EntropyBonus(-1), "coef is -1"),
        (lambda: LogMeanExp(0), "temperature is 0"),
        (lambda: ExponentiallyWeighted(temperature=0), "is 0; it must be above 0"),
        (lambda: ExponentiallyWeighted(temperature="adaptive", least_temperature=0), "is 0; it must be above 0"),
        (lambda: BernoulliStd(0), "smoothing is 0"),
        (lambda: ComposedAdvantage(scale=BernoulliStd())(scores([2.0, 0, 0, 0])), "use GroupStd"),
        (lambda: ComposedAdvantage(scale=GroupMeanScale())(scores([-1.0, 0, 0, 0])), "a reward is negative"),
    ],
)
def test_contradictory_settings_are_rejected(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_k1_as_a_loss_is_warned_about():
    with pytest.warns(UserWarning, match="the expectation of its gradient, of ∇log π_θ, is 0. Use k2 or k3"):
        ReferenceKL(0.1, "k1")
    with pytest.warns(UserWarning, match="k1 as a loss"):
        ClippedLoss(kl_coef=0.1, kl="k1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ReferenceKL(0.1, "k3")


def test_missing_policies_raise_an_error():
    batch, policy, _, _ = numbers()
    alone = PolicyLogprobs(policy=policy, entropy=policy)
    for loss, message in (
        (ComposedLoss(regularisers=[ReferenceKL()]), "ReferenceKL needs a reference"),
        (ComposedLoss(gate=MinClip(centre="proximal")), "needs proximal_logprobs"),
        (ComposedLoss(TokenRatio("proximal"), MinClip()), "needs proximal_logprobs"),
        (ComposedLoss(TokenRatio("none"), weight=TruncatedImportance()), "needs proximal log-probabilities"),
        (ComposedLoss(weight=Rejection()), "needs proximal log-probabilities"),
    ):
        with pytest.raises(ValueError, match=message):
            loss(batch, alone)


@pytest.mark.parametrize("centre", ["one", "proximal", "proximal_multiplicative"])
def test_only_a_proximal_centre_needs_the_proximal_policy(centre):
    gate, is_proximal = MinClip(centre=centre), centre != "one"
    assert (gate.needs_proximal, gate.needs_behaviour) == (is_proximal, is_proximal)
    assert ComposedLoss(gate=gate).needs_proximal == is_proximal
    assert ClippedLoss(centre=centre).needs_proximal == is_proximal


def test_default_parts_have_no_effect():
    batch, policy, _, _ = numbers()
    _, plain = loss_and_gradient(ComposedLoss(), batch, policy)
    _, explicit = loss_and_gradient(ComposedLoss(TokenRatio(), NoGate(), NoWeight(), []), batch, policy)
    assert torch.equal(plain, explicit)
