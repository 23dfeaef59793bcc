"""What recorded completions ask of the rest of a run, checked before it starts."""

from __future__ import annotations

from typing import Literal, Protocol

from lgrpo.data.prompts import Prompts
from lgrpo.engines import RolloutEngine, Sampling
from lgrpo.hooks import PolicyOwner


class Settings(Protocol):
    """Those of the data module that decide."""

    num_prompts: int
    group_size: int
    sampling: Sampling
    behaviour_logprobs: Literal["engine", "policy"]


def prepare_engine(
    engine: RolloutEngine, settings: Settings, prompts: Prompts, num_rollouts: int, module: PolicyOwner
) -> None:
    """Has the engine look at what it will be asked for, and refuses a loss that cannot use what it has."""
    num_positions = 0 if prompts.is_streamed else min(num_rollouts * settings.num_prompts, len(prompts))
    first_pass = (prompts.at(position) for position in range(num_positions))
    engine.prepare(module.tokenizer, first_pass, settings.group_size, settings.sampling)
    if engine.replays and settings.behaviour_logprobs == "policy":
        raise ValueError(
            "data.behaviour_logprobs is 'policy', but recorded completions were not sampled by this policy: only who "
            "sampled knows log π_α. Use 'engine', which takes it from the recording"
        )
    if engine.num_without_logprobs and (loss := module.needs_behaviour):
        raise ValueError(
            f"{engine.num_without_logprobs} recorded completions have no log-probabilities, and model.loss ({loss}) "
            "compares the policy with the one that sampled (π_θ/π_α). Record them (lgrpo.callbacks.RolloutRecorder "
            "does), or choose a loss that needs none: configs/algorithms/reinforce.yaml, red_drop.yaml, "
            "red_weight.yaml, opmd.yaml, asymre.yaml, or any whose ratio is over 'proximal' instead of 'behaviour', "
            "such as rec_oneside_nois.yaml with model.loss.init_args.ratio.init_args.over=proximal"
        )
