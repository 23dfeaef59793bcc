"""Kept tokens from the log-probabilities that vLLM returns; vLLM itself is not needed."""

from __future__ import annotations

import math
import types

import numpy as np
import pytest

from lgrpo.engines import Sampling
from lgrpo.engines.vllm.kept import MAX_LOGPROBS, from_answer, from_flat, num_likeliest
from tests.helpers import tiny_policy

LOW = -math.inf


def flat(*positions):
    """Return what vLLM returns in process: at each position the drawn token, then the likeliest ones."""
    pairs = [pair for position in positions for pair in position]
    starts = list(range(0, len(pairs), len(positions[0]) if positions else 1))
    return types.SimpleNamespace(
        start_indices=starts, token_ids=[token for token, _ in pairs], logprobs=[value for _, value in pairs]
    )


def answer(*positions):
    """Return the same as a server sends it, where dropped tokens have -9999 and a name is there once."""
    return {
        "token_logprobs": [position[0][1] for position in positions],
        "top_logprobs": [{f"token_id:{token}": max(v, -9999.0) for token, v in position} for position in positions],
    }


A, B = math.log(0.75), math.log(0.25)
C = math.log(0.2)
WHOLE = [(5, B), (4, A), (5, B), (7, LOW)]
ALONE = [(4, 0.0), (4, 0.0), (2, LOW), (3, LOW)]
PART = [(4, C), (4, C), (5, C), (6, C)]
"""Three tokens of five that are equally likely; the drawn one is among them."""
OUTSIDE = [(8, C), (4, C), (5, C), (6, C)]


@pytest.mark.parametrize(
    "from_vllm", [lambda ids, p: from_flat(ids, flat(*p), 3), lambda ids, p: from_answer(ids, answer(*p), 3)]
)
def test_sets(from_vllm):
    positions = [WHOLE, PART, ALONE, OUTSIDE]
    logprobs, kept = from_vllm([position[0][0] for position in positions], positions)
    assert logprobs == pytest.approx([B, math.log(1 / 3), 0.0, 0.0])
    assert kept.counts.tolist() == [2, 3, 1, 1]
    ids = kept.token_ids.tolist()
    assert [sorted(ids[:2]), sorted(ids[2:5]), ids[5:]] == [[4, 5], [4, 5, 6], [4, 8]]
    assert kept.incomplete == (1, 3)
    assert from_vllm([], [])[0] == []
    assert len(from_vllm([], [])[1]) == 0


def test_nothing_is_asked_for():
    assert from_flat([5], flat([(5, B)]), 0) == ([B], None)
    assert from_answer([5], {"token_logprobs": [B], "top_logprobs": None}, 0) == ([B], None)


def test_every_ratio_to_a_part_is_exact():
    """The mean ratio of any policy is 1 if log π_α is renormalised over the part and the others are alone."""
    generator = np.random.default_rng(0)
    behaviour, policy = generator.dirichlet(np.ones(6)), generator.dirichlet(np.ones(6))
    likeliest = np.argsort(-behaviour)[:3]
    mean = 0.0
    for token in range(6):
        position = [(token, math.log(behaviour[token])), *((k, math.log(behaviour[k])) for k in likeliest.tolist())]
        (logprob,), kept = from_flat([token], flat(position), 3)
        mean += behaviour[token] * policy[token] / policy[kept.token_ids.tolist()].sum() / math.exp(logprob)
    assert mean == pytest.approx(1)


@pytest.mark.parametrize(
    ("sampling", "number"),
    [
        (Sampling(top_k=5), 0),
        (Sampling(temperature=0.5).with_kept(), 0),
        (Sampling(top_k=5).with_kept(), 21),
        (Sampling(top_k=64, top_p=0.9).with_kept(), 80),
        (Sampling(top_k=400).with_kept(), 500),
        (Sampling(top_k=4000).with_kept(), MAX_LOGPROBS),
    ],
)
def test_number_of_likeliest_tokens(sampling, number):
    config = tiny_policy(config={"model_type": "qwen2", "vocab_size": 10**4, "hidden_size": 8}).config
    assert num_likeliest(sampling, config) == number
    assert num_likeliest(sampling, tiny_policy().config) == min(number, 13)
