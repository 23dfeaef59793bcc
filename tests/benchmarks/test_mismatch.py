"""The benchmark of the differences between engine and policy."""

from __future__ import annotations

import torch

from lgrpo import Completion
from tests.benchmarks import mismatch


def completion(token_ids, logprobs):
    return Completion(token_ids=token_ids, logprobs=logprobs, text="", finish_reason="stop", behaviour_step=0)


def test_two_samples_are_compared_while_their_tokens_are_equal():
    one = [[completion([1, 2, 3], [-1.0, -1.0, -1.0]), completion([4, 5], [-2.0, -2.0])]]
    other = [[completion([1, 2, 4], [-1.0, -1.5, -9.0]), completion([4, 5], [-2.0, -2.0])]]
    found = mismatch.between_calls(one, other)
    assert (found["tokens"], found["equal_completions"]) == (4, 0.5)
    assert (found["mean"], found["max"]) == (0.125, 0.5)


def test_shares_outside_of_bands_are_those_of_the_ratio():
    found = mismatch.statistics_of(torch.tensor([1.15, 0.85, 1.25, 1.05]).log())
    assert (found["outside_0.1"], found["outside_0.2"]) == (0.75, 0.25)


def test_the_page_is_up_to_date():
    assert mismatch.page(mismatch.read(mismatch.ROWS)) == mismatch.PAGE.read_text(encoding="utf-8")
