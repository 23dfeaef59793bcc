"""Record verl's advantages, losses, rollout corrections and KL penalties.

The files this script writes are the fixtures of the parity tests, which do not run it: verl needs other versions of
some packages than this repository, so the script runs in a separate environment, made once with

    python3.11 -m venv verl-env
    verl-env/bin/pip install torch==2.13.0 numpy
    verl-env/bin/pip install --no-deps verl==0.9.1
    verl-env/bin/pip install omegaconf packaging codetiming orjson ray tensordict==0.10.0 transformers==5.10.4

and then, from the root of the repository,

    OMP_NUM_THREADS=1 verl-env/bin/python tests/parity/make_verl_fixtures.py

which replaces the JSON files in ``tests/parity/verl``. verl is not modified. pip warns about packages that verl
requires and that are left out; nothing used here imports them.

Every number is computed in float32 from a batch drawn with a fixed seed, and is written so that reading it back gives
the same float32. ``batch.json`` holds the batch; a case names the tensors of it that it used.
``tests/parity/verl/README.md`` describes the cases and verl's definitions.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SEED = 260
GROUP_SIZE = 4
LENGTHS = (6, 1, 3, 5, 6, 2, 4, 6)  # full rows, a row of one token, and lengths between
WIDTH = max(LENGTHS)
CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0}

CORE = "verl.trainer.ppo.core_algos"


@dataclass
class Case:
    """Fixture: a function of verl, its settings, inputs and outputs.

    A string among the inputs names an entry of the batch; any other input is a value.
    """

    name: str
    function: str
    settings: dict[str, Any]
    inputs: dict[str, Any]
    outputs: dict[str, Any] = field(default_factory=dict)


# ------------------------------------------------------------------------------------------------------- the batch


def draw_batch(seed: int = SEED) -> dict[str, Tensor]:
    """Draw the batch that all cases share: two groups of four rows, six tokens wide.

    No log-probability is above zero. The positions after a row's end hold ordinary numbers, so that a result that
    depends on them is noticed.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (len(LENGTHS), WIDTH)

    def near(centre: Tensor, std: float) -> Tensor:
        return (centre + std * torch.randn(shape, generator=generator)).clamp(max=-0.01)

    lengths = torch.tensor(LENGTHS)
    old = torch.empty(shape).uniform_(0.02, 0.6, generator=generator).log()
    log_prob = near(old, 0.4)
    groups = torch.arange(len(LENGTHS)) // GROUP_SIZE
    batch = {
        "response_mask": (torch.arange(WIDTH) < lengths[:, None]).long(),
        "groups": groups,
        "old_log_prob": old,
        "log_prob": log_prob,
        "log_prob_wide": near(old, 1.5),
        "rollout_log_prob": near(old, 0.2),
        "rollout_log_prob_wide": near(old, 0.8),
        "ref_log_prob": near(old, 0.5),
        "ref_log_prob_far": log_prob + 12.0 * torch.randn(shape, generator=generator),
        "advantages": torch.randn(len(LENGTHS), generator=generator),
        "rewards_binary": torch.bernoulli(torch.full((len(LENGTHS),), 0.5), generator=generator),
        "rewards_real": torch.randn(len(LENGTHS), generator=generator),
    }
    # probabilities between 1e-8 and 1 under both policies, drawn last so that the numbers above stay as they were
    for name in ("old_log_prob_far", "log_prob_far"):
        batch[name] = -torch.empty(shape).uniform_(0.02, 18.0, generator=generator)
    batch["rewards_constant_group"] = torch.where(groups == 1, torch.ones(()), batch["rewards_binary"])
    check_batch(batch)
    return batch


def check_batch(batch: dict[str, Tensor]) -> None:
    """Raise a ``ValueError`` unless the batch reaches every branch that the cases record."""
    mask = batch["response_mask"].bool()
    positive = (batch["advantages"] > 0)[:, None] & mask
    negative = (batch["advantages"] < 0)[:, None] & mask
    ratio = (batch["log_prob"] - batch["old_log_prob"]).exp()
    wide = (batch["log_prob_wide"] - batch["old_log_prob"]).exp()
    weight = (batch["old_log_prob"] - batch["rollout_log_prob_wide"]).exp()
    far = batch["ref_log_prob_far"] - batch["log_prob"]
    extreme = batch["log_prob_far"] - batch["old_log_prob_far"]
    reached = {
        "above the band, positive advantage": ((ratio > 1.28) & positive).any(),
        "above the band, negative advantage": ((ratio > 1.28) & negative).any(),
        "below the band, positive advantage": ((ratio < 0.8) & positive).any(),
        "below the band, negative advantage": ((ratio < 0.8) & negative).any(),
        "the second clip is idle with little noise": ~((ratio > 3) & negative).any(),
        "the second clip binds with much noise": ((wide > 3) & negative).any(),
        "a rollout weight is truncated": ((weight > 2) & mask).any(),
        "a rollout weight is below a half": ((weight < 0.5) & mask).any(),
        "k3 is cut at ten, its log-ratio is not": ((far > 3) & (far < 20) & mask).any(),
        "a log-ratio is above 20": ((far > 20) & mask).any(),
        "a log-ratio is below -20": ((far < -20) & mask).any(),
        "an extreme ratio, positive advantage": ((extreme > 6) & positive).any(),
        "an extreme ratio, negative advantage": ((extreme > 6) & negative).any(),
        "an extreme inverse ratio, positive advantage": ((extreme < -6) & positive).any(),
        "an extreme inverse ratio, negative advantage": ((extreme < -6) & negative).any(),
        "groups of mixed rewards": (batch["rewards_binary"].view(-1, GROUP_SIZE).std(dim=1) > 0).all(),
    }
    missing = [name for name, is_reached in reached.items() if not bool(is_reached)]
    if missing:
        raise ValueError(f"the batch does not reach: {'; '.join(missing)}")


# ---------------------------------------------------------------------------------------------------- advantages


def token_rewards(batch: dict[str, Tensor], rewards: Tensor) -> Tensor:
    """Return the rewards as verl stores them: on the last token of each row, zero elsewhere."""
    mask = batch["response_mask"]
    placed = torch.zeros(mask.shape)
    placed[torch.arange(len(mask)), mask.sum(dim=1) - 1] = rewards
    return placed


def per_row(values: Tensor, mask: Tensor) -> Tensor:
    """Return the advantage of each row; raise if a row's tokens differ or a position after its end is not zero."""
    rows = values[:, 0]
    if not torch.equal(values, rows[:, None] * mask):
        raise ValueError("the advantages differ within a row")
    return rows


def advantage_cases(batch: dict[str, Tensor]) -> Iterator[Case]:
    """Yield a case for each estimator and set of rewards."""
    from verl.trainer.ppo import core_algos

    estimators: dict[str, tuple[str, dict[str, Any]]] = {
        "grpo": ("grpo", {"norm_adv_by_std_in_grpo": True, "epsilon": 1e-6}),
        "grpo_no_std": ("grpo", {"norm_adv_by_std_in_grpo": False}),
        "rloo": ("rloo", {}),
        "reinforce_plus_plus_baseline": ("reinforce_plus_plus_baseline", {}),
    }
    mask = batch["response_mask"]
    for name, (registered, settings) in estimators.items():
        function = core_algos.get_adv_estimator_fn(registered)
        for kind in ("binary", "real", "constant_group"):
            rewards = f"rewards_{kind}"
            advantages, _ = function(
                token_level_rewards=token_rewards(batch, batch[rewards]),
                response_mask=mask,
                index=batch["groups"].numpy(),
                **settings,
            )
            yield Case(
                f"adv_{name}_{kind}",
                f"{CORE}.{function.__name__}",
                settings,
                {"rewards": rewards, "response_mask": "response_mask", "groups": "groups"},
                {"advantages": per_row(advantages, mask)},
            )


# -------------------------------------------------------------------------------------------------------- losses


def actor_config(settings: dict[str, Any]) -> Any:
    """Return an actor configuration of verl with these settings."""
    from verl.trainer.config import RolloutCorrectionConfig
    from verl.workers.config import ActorConfig, PolicyLossConfig

    settings = dict(settings)
    policy_loss = dict(settings.pop("policy_loss", {}))
    if "rollout_correction" in policy_loss:
        policy_loss["rollout_correction"] = RolloutCorrectionConfig(**policy_loss["rollout_correction"])
    return ActorConfig(
        strategy="fsdp",
        rollout_n=GROUP_SIZE,
        use_dynamic_bsz=True,
        policy_loss=PolicyLossConfig(**policy_loss),
        **settings,
    )


def loss_case(
    batch: dict[str, Tensor],
    name: str,
    registered: str,
    settings: dict[str, Any],
    *,
    log_prob: str = "log_prob",
    old_log_prob: str = "old_log_prob",
    weights: Tensor | None = None,
) -> Case:
    """Call one registered loss as verl's actor does, with a boolean mask, and take its gradient."""
    from verl.trainer.ppo import core_algos

    function = core_algos.get_policy_loss_fn(registered)
    policy = batch[log_prob].clone().requires_grad_()
    loss, _ = function(
        old_log_prob=batch[old_log_prob],
        log_prob=policy,
        advantages=batch["advantages"][:, None] * batch["response_mask"],
        response_mask=batch["response_mask"].bool(),
        loss_agg_mode=settings["loss_agg_mode"],
        config=actor_config(settings),
        rollout_is_weights=weights,
    )
    loss.backward()
    inputs = {
        "old_log_prob": old_log_prob,
        "log_prob": log_prob,
        "advantages": "advantages",
        "response_mask": "response_mask",
    }
    outputs = {"loss": loss.detach(), "grad_log_prob": policy.grad}
    return Case(f"loss_{name}", f"{CORE}.{function.__name__}", settings, inputs, outputs)


def loss_cases(batch: dict[str, Tensor]) -> Iterator[Case]:
    """Yield the registered losses, each with settings at which its clip or its mask is active."""
    mean = {"loss_agg_mode": "token-mean"}
    rows = {"loss_agg_mode": "seq-mean-token-mean"}
    for mode in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"):
        yield loss_case(batch, f"vanilla_{mode.replace('-', '_')}", "vanilla", {"loss_agg_mode": mode, **CLIP})
    for mode in ("token-mean", "seq-mean-token-mean"):
        settings = {"loss_agg_mode": mode, **CLIP}
        name = f"vanilla_dual_clip_{mode.replace('-', '_')}"
        yield loss_case(batch, name, "vanilla", settings, log_prob="log_prob_wide")

    yield loss_case(batch, "gspo", "gspo", {**rows, "clip_ratio_low": 0.08, "clip_ratio_high": 0.1})
    yield loss_case(batch, "geo_mean", "geo_mean", {**rows, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28})
    yield loss_case(batch, "cispo", "cispo", {**mean, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28})
    yield loss_case(batch, "cispo_upper_only", "cispo", {**mean, "clip_ratio_low": 1.0, "clip_ratio_high": 0.28})
    yield loss_case(batch, "gpg", "gpg", mean)

    divergence = {**mean, "clip_ratio_c": 1e4}  # the limit of the ratio, as in the script of DPPO's authors
    for name, low, high in (("dppo_tv", 0.05, 0.1), ("dppo_kl", 0.01, 0.02)):
        settings = {**divergence, "clip_ratio_low": low, "clip_ratio_high": high}
        yield loss_case(batch, name, name, settings)
        yield loss_case(batch, f"{name}_wide", name, settings, log_prob="log_prob_wide")
    # all tokens inside the band of covariances are clipped, so that verl's random choice does not matter
    clip_cov = {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.2, "clip_cov_ub": 1.0}
    yield loss_case(batch, "clip_cov", "clip_cov", {**mean, **CLIP, "policy_loss": clip_cov})
    yield loss_case(batch, "kl_cov", "kl_cov", {**mean, "policy_loss": {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.5}})
    for log_prob, suffix in (("log_prob", ""), ("log_prob_wide", "_wide")):
        settings = {**rows, "tau_pos": 1.0, "tau_neg": 1.05}
        yield loss_case(batch, f"sapo{suffix}", "sapo", settings, log_prob=log_prob)

    far = {"log_prob": "log_prob_far", "old_log_prob": "old_log_prob_far"}
    yield loss_case(batch, "vanilla_far", "vanilla", {**mean, **CLIP}, **far)
    yield loss_case(batch, "gspo_far", "gspo", {**rows, "clip_ratio_low": 0.08, "clip_ratio_high": 0.1}, **far)
    yield loss_case(batch, "geo_mean_far", "geo_mean", {**rows, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28}, **far)
    yield loss_case(batch, "cispo_far", "cispo", {**mean, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28}, **far)
    for name, low, high in (("dppo_tv", 0.05, 0.1), ("dppo_kl", 0.01, 0.02)):
        settings = {**mean, "clip_ratio_c": 1e9, "clip_ratio_low": low, "clip_ratio_high": high}
        yield loss_case(batch, f"{name}_far", name, settings, **far)
    yield loss_case(batch, "sapo_far", "sapo", {**rows, "tau_pos": 1.0, "tau_neg": 1.05}, **far)


# --------------------------------------------------------------------------------------------- rollout correction


def rollout_weights(batch: dict[str, Tensor], settings: dict[str, Any], rollout: str) -> Tensor:
    """Return verl's weights of the old policy over a rollout policy."""
    from verl.trainer.ppo import rollout_corr_helper

    weights, _, _ = rollout_corr_helper.compute_rollout_correction_and_rejection_mask(
        old_log_prob=batch["old_log_prob"],
        rollout_log_prob=batch[rollout],
        response_mask=batch["response_mask"],
        **settings,
    )
    return weights.batch["rollout_is_weights"]


def corrected_loss_cases(batch: dict[str, Tensor]) -> Iterator[Case]:
    """Yield losses with a correction: decoupled (three policies) and bypass (the rollout policy is the old one)."""
    corrections: dict[str, dict[str, Any]] = {
        "token_tis": {"rollout_is": "token", "rollout_is_threshold": 2.0},
        "sequence_tis": {"rollout_is": "sequence", "rollout_is_threshold": 2.0},
        "token_icepop": {"rollout_is": "token", "rollout_is_threshold": "0.5_2.0"},
    }
    settings = {"loss_agg_mode": "token-mean", **CLIP}
    distant = [(name, "", "rollout_log_prob_wide") for name in corrections]
    distant += [(name, "_far", "old_log_prob_far") for name in ("token_tis", "sequence_tis")]  # IcePop keeps no token
    for name, suffix, rollout in distant:
        weights = rollout_weights(batch, corrections[name], rollout)
        case = loss_case(batch, f"decoupled_{name}{suffix}", "vanilla", settings, weights=weights)
        case.settings = {**settings, "rollout_correction": corrections[name]}
        case.inputs["rollout_log_prob"] = rollout
        yield case
    bypass = {**settings, "policy_loss": {"rollout_correction": {"rollout_is": None, "loss_type": "ppo_clip"}}}
    yield loss_case(batch, "bypass_ppo_clip", "bypass_mode", bypass, old_log_prob="rollout_log_prob")


def rejection_cases(batch: dict[str, Tensor]) -> Iterator[Case]:
    """Yield the weights with rejection: those of the importance sampling, if any, times the mask of kept tokens."""
    from verl.trainer.ppo import rollout_corr_helper

    cases: dict[str, dict[str, Any]] = {
        "token_k2": {"rollout_rs": "token_k2", "rollout_rs_threshold": 0.3},
        "token_k3": {"rollout_rs": "token_k3", "rollout_rs_threshold": 0.3},
        "seq_sum_k1": {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"},
        "seq_sum_k3": {"rollout_rs": "seq_sum_k3", "rollout_rs_threshold": 0.8},
        "seq_mean_k1": {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.8_1.25"},
        "seq_mean_k3": {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.25},
        "seq_max_k2": {"rollout_rs": "seq_max_k2", "rollout_rs_threshold": 1.0},
        "seq_max_k3": {"rollout_rs": "seq_max_k3", "rollout_rs_threshold": 1.0},
        "seq_is_rs": {
            "rollout_is": "sequence",
            "rollout_is_threshold": 2.0,
            "rollout_rs": "seq_sum_k1",
            "rollout_rs_threshold": "0.25_4.0",
        },
        "geo_rs_token_tis": {
            "rollout_is": "token",
            "rollout_is_threshold": 2.0,
            "rollout_rs": "seq_mean_k1",
            "rollout_rs_threshold": "0.8_1.25",
        },
    }
    mask = batch["response_mask"]
    for name, settings in cases.items():
        weights, kept, _ = rollout_corr_helper.compute_rollout_correction_and_rejection_mask(
            old_log_prob=batch["old_log_prob"],
            rollout_log_prob=batch["rollout_log_prob_wide"],
            response_mask=mask,
            **settings,
        )
        if not 0 < int(kept.sum()) < int(mask.sum()):
            raise ValueError(f"{name} rejects all or none")
        values = kept.float() if weights is None else weights.batch["rollout_is_weights"] * kept
        yield Case(
            f"rejection_{name}",
            "verl.trainer.ppo.rollout_corr_helper.compute_rollout_correction_and_rejection_mask",
            settings,
            {
                "old_log_prob": "old_log_prob",
                "rollout_log_prob": "rollout_log_prob_wide",
                "response_mask": "response_mask",
            },
            {"weights": values},
        )


# ------------------------------------------------------------------------------------------------------------ KL


def kl_cases(batch: dict[str, Tensor]) -> Iterator[Case]:
    """Yield the KL penalties of every token, with their derivatives with respect to its log-probability."""
    from verl.trainer.ppo import core_algos

    cases = {"k1": "kl", "k2": "mse", "k3": "low_var_kl", "k3_far": "low_var_kl"}
    for name, penalty in cases.items():
        reference = "ref_log_prob_far" if name.endswith("_far") else "ref_log_prob"
        policy = batch["log_prob"].clone().requires_grad_()
        value = core_algos.kl_penalty(policy, batch[reference], penalty)
        value.sum().backward()
        yield Case(
            f"kl_{name}",
            f"{CORE}.kl_penalty",
            {"kl_penalty": penalty},
            {"logprob": "log_prob", "ref_logprob": reference},
            {"kl": value.detach(), "grad_log_prob": policy.grad},
        )


# --------------------------------------------------------------------------------------------------------- files


def plain(value: Any) -> Any:
    """Convert a value for JSON; a zero loses its sign."""
    if isinstance(value, Tensor):
        return plain(value.tolist())
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value + 0.0 if isinstance(value, float) else value


def as_text(value: Any, indent: int = 0) -> str:
    """Return JSON with a line for each key and for each row of a matrix."""
    pad = " " * (indent + 2)
    if isinstance(value, dict) and value:
        lines = [f"{pad}{json.dumps(key)}: {as_text(item, indent + 2)}" for key, item in value.items()]
        return "{\n" + ",\n".join(lines) + "\n" + " " * indent + "}"
    if isinstance(value, list) and value and isinstance(value[0], list):
        return "[\n" + ",\n".join(pad + json.dumps(row, allow_nan=False) for row in value) + "\n" + " " * indent + "]"
    return json.dumps(value, allow_nan=False)


def main() -> None:
    """Write the batch and every case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "verl", help="folder of the fixtures")
    out: Path = parser.parse_args().out
    import verl

    torch.set_num_threads(1)
    batch = draw_batch()
    before = {key: value.clone() for key, value in batch.items()}
    makers = (advantage_cases, loss_cases, corrected_loss_cases, rejection_cases, kl_cases)
    cases = [case for maker in makers for case in maker(batch)]
    if any(not torch.equal(value, before[key]) for key, value in batch.items()):
        raise RuntimeError("a case changed the batch")
    if len({case.name for case in cases}) != len(cases):
        raise RuntimeError("two cases have one name")

    out.mkdir(parents=True, exist_ok=True)
    for path in out.glob("*.json"):
        path.unlink()
    about = {"seed": SEED, "torch": torch.__version__.split("+")[0], "dtype": "float32", "group_size": GROUP_SIZE}
    (out / "batch.json").write_text(as_text(plain(about | batch)) + "\n")
    for case in cases:
        record = {
            "verl": verl.__version__,
            "function": case.function,
            "settings": case.settings,
            "inputs": case.inputs,
            "outputs": case.outputs,
        }
        (out / f"{case.name}.json").write_text(as_text(plain(record)) + "\n")
    print(f"{len(cases)} cases of verl {verl.__version__}")


if __name__ == "__main__":
    main()
