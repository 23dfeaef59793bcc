"""Mathematics only: tensors in, tensors out, independent of models, engines and Lightning."""

from lgrpo.functional.advantage import (
    adaptive_temperature,
    bernoulli_std,
    drop_negatives,
    group_std,
    grouped,
    has_reward_variance,
    leave_one_out_mean,
    log_mean_exp,
)
from lgrpo.functional.aggregation import constant_sum, sequence_mean, token_mean
from lgrpo.functional.checksum import as_numbers, combined_checksum, named_checksums, tensor_checksum, tensor_checksums
from lgrpo.functional.chunks import CHUNK_BYTES, chunks, joined
from lgrpo.functional.improvement import expected_gain, improvement_bound, improvement_terms
from lgrpo.functional.kl import KLEstimator, kl_divergence
from lgrpo.functional.logprobs import chunked_token_logprobs, token_logprobs
from lgrpo.functional.off_policy import (
    chi_squared,
    completion_log_ratio,
    effective_sample_size,
    k3_of_ratio,
    pinsker,
    total_variation,
)
from lgrpo.functional.packed_attention import packed_attention
from lgrpo.functional.pass_at_k import majority_at_k, pass_at_k, standard_error
from lgrpo.functional.random import stream_seed, stream_uniform
from lgrpo.functional.surrogate import (
    MAX_LOG_RATIO,
    ClipCentre,
    RatioDenominator,
    clip_band,
    clip_centre,
    clipped_surrogate,
    log_ratio,
    one_side,
    outside_band,
    ring,
    sequence_log_ratio,
    two_side,
    within_second_moment,
)

__all__ = [
    "CHUNK_BYTES",
    "MAX_LOG_RATIO",
    "ClipCentre",
    "KLEstimator",
    "RatioDenominator",
    "adaptive_temperature",
    "as_numbers",
    "bernoulli_std",
    "chi_squared",
    "chunked_token_logprobs",
    "chunks",
    "clip_band",
    "clip_centre",
    "clipped_surrogate",
    "combined_checksum",
    "completion_log_ratio",
    "constant_sum",
    "drop_negatives",
    "effective_sample_size",
    "expected_gain",
    "group_std",
    "grouped",
    "has_reward_variance",
    "improvement_bound",
    "improvement_terms",
    "joined",
    "k3_of_ratio",
    "kl_divergence",
    "leave_one_out_mean",
    "log_mean_exp",
    "log_ratio",
    "majority_at_k",
    "named_checksums",
    "one_side",
    "outside_band",
    "packed_attention",
    "pass_at_k",
    "pinsker",
    "ring",
    "sequence_log_ratio",
    "sequence_mean",
    "standard_error",
    "stream_seed",
    "stream_uniform",
    "tensor_checksum",
    "tensor_checksums",
    "token_logprobs",
    "token_mean",
    "total_variation",
    "two_side",
    "within_second_moment",
]
