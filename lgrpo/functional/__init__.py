"""The mathematics: tensors in, tensors out. Nothing here knows of models, engines or Lightning."""

from lgrpo.functional.advantage import (
    group_centred,
    group_whitened,
    grouped,
    has_reward_variance,
    leave_one_out,
)
from lgrpo.functional.aggregation import constant_sum, sequence_mean, token_mean
from lgrpo.functional.checksum import combined_checksum, tensor_checksum
from lgrpo.functional.kl import KLEstimator, kl_divergence
from lgrpo.functional.logprobs import chunked_token_logprobs, token_logprobs
from lgrpo.functional.pass_at_k import pass_at_k
from lgrpo.functional.random import stream_seed, stream_uniform
from lgrpo.functional.surrogate import (
    ClipCentre,
    RatioDenominator,
    clip_band,
    clip_centre,
    clipped_surrogate,
    log_ratio,
    outside_band,
)

__all__ = [
    "ClipCentre",
    "KLEstimator",
    "RatioDenominator",
    "chunked_token_logprobs",
    "clip_band",
    "clip_centre",
    "clipped_surrogate",
    "combined_checksum",
    "constant_sum",
    "group_centred",
    "group_whitened",
    "grouped",
    "has_reward_variance",
    "kl_divergence",
    "leave_one_out",
    "log_ratio",
    "outside_band",
    "pass_at_k",
    "sequence_mean",
    "stream_seed",
    "stream_uniform",
    "tensor_checksum",
    "token_logprobs",
    "token_mean",
]
