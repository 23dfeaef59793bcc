"""Input of the parts of a composed loss."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lgrpo.losses.base import PolicyLogprobs
from lgrpo.types import RolloutBatch


@dataclass(kw_only=True, slots=True)
class Terms:
    """Micro-batch, log-probabilities of its tokens, and the ratio of the loss."""

    batch: RolloutBatch
    logprobs: PolicyLogprobs
    log_ratio: Tensor
    """log ρ [B, T], with gradient."""

    @property
    def ratio(self) -> Tensor:
        """ρ [B, T], with gradient."""
        return self.log_ratio.exp()

    @property
    def advantages(self) -> Tensor:
        """Advantages [B, T]."""
        return self.batch.advantages

    @property
    def lag(self) -> Tensor:
        """Optimizer steps since each token was sampled [B, T]; 0 for recorded tokens, which have no lag."""
        return self.batch.token_lag(self.logprobs.step).nan_to_num(0.0)

    @property
    def zero_variance(self) -> Tensor:
        """Completions of groups whose rewards are all equal, [B] bool."""
        if self.batch.zero_variance is None:
            raise ValueError("it is not known which groups have equal rewards: it is set with the advantages")
        return self.batch.zero_variance

    @property
    def proximal_log_ratio(self) -> Tensor:
        """log π_k/π_α [B, T]: distance from the behaviour policy at the start of this rollout's updates."""
        if self.logprobs.proximal is None:
            raise ValueError("π_k/π_α needs proximal log-probabilities, but there are none")
        return self.logprobs.proximal - self.batch.behaviour_logprobs


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise a ``ValueError`` if a value is not one of the choices; Python does not check a ``Literal``."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(choices)}")
