"""Tests of collating completions into a batch."""

from __future__ import annotations

import math

import pytest
import torch

from lgrpo.data.collate import Group, collate_rollout
from lgrpo.engines import Sampling
from lgrpo.types import Completion, Prompt


def collate(prompts, completions):
    given = [Prompt(text="…", token_ids=ids, row={}, position=index) for index, ids in enumerate(prompts)]
    found = [
        Completion(token_ids=ids, logprobs=logprobs, text="…", finish_reason="stop", behaviour_step=3, version=0)
        for ids, logprobs in completions
    ]
    groups = [Group(prompt, [completion], [0.0]) for prompt, completion in zip(given, found, strict=True)]
    return collate_rollout(groups, pad_token_id=9, sampling=Sampling(max_tokens=4), rollout=0)


def test_prompt_completion_padding():
    batch = collate([[1, 2], [3], [4, 5, 6]], [([7], [-0.5]), ([8, 150_000], [-1.25, math.nan]), ([], [])])
    assert batch.tokens.tolist() == [[1, 2, 7], [3, 8, 150_000], [4, 5, 6]]
    assert batch.tokens.dtype == torch.int64
    assert batch.completion_mask.tolist() == [[False, False, True], [False, True, True], [False] * 3]
    assert batch.behaviour_logprobs.dtype == torch.float32
    assert batch.behaviour_logprobs[0].tolist() == [0, 0, -0.5]
    assert batch.behaviour_logprobs[1, 1] == -1.25
    assert batch.behaviour_logprobs[1, 2].isnan(), "not known"
    assert collate([[1]], [([2, 3], [-1, -2])]).behaviour_logprobs.tolist() == [[0, -1, -2]]


@pytest.mark.parametrize(("ids", "logprobs"), [([7, 8], [-0.5, None]), (["7", 8], [-0.5, -0.5]), ([7.5], [-0.5])])
def test_values_that_are_not_numbers_raise_an_error(ids, logprobs):
    """numpy would convert None to NaN, which trains as unknown, and a string to a token."""
    with pytest.raises(TypeError):
        collate([[1]], [(ids, logprobs)])
