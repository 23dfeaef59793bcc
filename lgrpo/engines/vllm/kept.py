"""The tokens that vLLM could have drawn, from the log-probabilities of its likeliest tokens.

With ``logprobs_mode: processed_logprobs`` a dropped token has the log-probability -inf (a server sends -9999). Of the
likeliest tokens, the others are those that could have been drawn. Together they have probability 1 if none is missing.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from transformers import PretrainedConfig

from lgrpo.engines.completions import Sampling
from lgrpo.kept import Kept

MAX_LOGPROBS = 4096
"""Upper limit of the likeliest tokens that vLLM returns; costs nothing unless they are asked for."""
_DROPPED = -9000.0
_ROUNDING = 1e-3


def num_likeliest(sampling: Sampling, config: PretrainedConfig) -> int:
    """Return the number of likeliest tokens to ask for, besides the drawn one; 0 if the kept tokens are not needed.

    vLLM keeps all tokens that are as likely as the last of ``top_k``. In bfloat16 several often are.
    """
    if not sampling.returns_kept:
        return 0
    margin = max(16, sampling.top_k // 4)
    return min(sampling.top_k + margin, config.get_text_config().vocab_size, MAX_LOGPROBS)


def split_kept(
    token_ids: Sequence[int], logprobs: Sequence[float], likeliest: np.ndarray, their_logprobs: np.ndarray
) -> tuple[list[float], Kept]:
    """Return log π_α of a completion's tokens, and the tokens that could have been drawn at each position.

    Where there are more of them than vLLM returned, log π_α is renormalised over those. A drawn token that is not among
    them is a set of its own: it has probability 1 under every policy, so it does not train. Drawing a token and
    learning to draw it from its set instead of from all sets together keeps every ratio exact.

    Args:
        token_ids: Drawn tokens.
        logprobs: Their log-probabilities.
        likeliest: [T, N] int: likeliest tokens at each position.
        their_logprobs: [T, N] float.

    >>> ids, logprobs = np.array([[4, 5, 6]] * 2), np.log(np.array([[0.5, 0.25, 1e-99], [0.6, 0.4, 1e-99]]))
    >>> logprobs[:, 2] = -np.inf
    >>> found, kept = split_kept([5, 7], [np.log(0.25), np.log(0.1)], ids, logprobs)
    >>> np.exp(found).round(3).tolist(), kept.token_ids.tolist(), kept.counts.tolist(), kept.incomplete
    ([0.333, 1.0], [4, 5, 7], [2, 1], (0, 1))
    """
    drawn = np.asarray(token_ids, dtype=np.int64)[:, None]
    is_kept = their_logprobs > _DROPPED
    mass = np.where(is_kept, np.exp(np.where(is_kept, their_logprobs, 0.0)), 0.0).sum(1)
    is_alone = ~((likeliest == drawn) & is_kept).any(1)
    sets = np.where(is_alone[:, None], drawn, likeliest)
    is_kept = np.where(is_alone[:, None], np.arange(is_kept.shape[1]) == 0, is_kept)
    own = np.asarray(logprobs, dtype=np.float64) - np.log(np.where(is_alone, 1.0, mass))
    found = np.where(is_alone, 0.0, np.minimum(own, 0.0))  # the mass may round to less than 1
    incomplete = np.flatnonzero(is_alone | (np.abs(mass - 1) > _ROUNDING))
    return found.tolist(), Kept(
        token_ids=array("i", sets[is_kept].astype(np.int32).tobytes()),
        counts=array("i", is_kept.sum(1).astype(np.int32).tobytes()),
        incomplete=tuple(incomplete.tolist()),
    )


def from_flat(token_ids: Sequence[int], flat: Any, num_asked: int) -> tuple[list[float], Kept | None]:
    """Return log π_α and the sets from vLLM's ``FlatLogprobs``: at each position the drawn token, then the likeliest.

    Without likeliest tokens there are no sets.
    """
    if not num_asked:
        return list(flat.logprobs), None
    shape = len(flat.start_indices), 1 + num_asked
    ids, logprobs = (np.array(values).reshape(shape) for values in (flat.token_ids, flat.logprobs))
    return split_kept(token_ids, logprobs[:, 0].tolist(), ids[:, 1:], logprobs[:, 1:])


def from_answer(token_ids: Sequence[int], answer: Mapping[str, Any], num_asked: int) -> tuple[list[float], Kept | None]:
    """Return log π_α and the sets from a server's answer, in which tokens are called ``token_id:5``."""
    logprobs = answer["token_logprobs"]
    if not num_asked:
        return logprobs, None
    ids = np.zeros((len(token_ids), num_asked), dtype=np.int64)
    values = np.full(ids.shape, -np.inf)
    for position, (drawn, likeliest) in enumerate(zip(token_ids, answer["top_logprobs"], strict=True)):
        named = {int(name.removeprefix("token_id:")): value for name, value in likeliest.items()}
        if len(named) > num_asked:  # the drawn token is not one of the likeliest
            del named[drawn]
        ids[position, : len(named)], values[position, : len(named)] = list(named), list(named.values())
    return split_kept(token_ids, logprobs, ids, values)
