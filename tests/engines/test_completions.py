"""Stop strings and the end of sampled completions."""

from __future__ import annotations

import pytest
from transformers import AddedToken

from lgrpo.engines import Generation, Sampling
from lgrpo.types import Span
from tests.helpers import tiny_policy


@pytest.fixture(scope="module")
def tokenizer():
    found = tiny_policy().tokenizer
    found.add_special_tokens({"additional_special_tokens": [AddedToken("<|turn|>", special=True)]})
    return found


def make_generation(tokenizer, *stop, version=0, is_partial=False):
    return Generation(
        prompts=[],
        num_samples=1,
        sampling=Sampling(stop=list(stop)),
        seed=0,
        tokenizer=tokenizer,
        on_group=None,
        step=version,
        version=version,
        is_partial=is_partial,
    )


def completion(tokenizer, text, *stop):
    generation = make_generation(tokenizer, *stop)
    token_ids = tokenizer(text, add_special_tokens=False).input_ids
    return generation, generation.completion(token_ids, [-1.0] * len(token_ids), "length")


def test_a_special_token_as_a_stop_string(tokenizer):
    """The tokens after it are neither scored nor trained on."""
    generation, found = completion(tokenizer, "12<|turn|>34", "<|turn|>")
    assert (found.text, len(found.token_ids), found.finish_reason) == ("12", 3, "stop")
    assert len(found.logprobs) == 3
    config = tiny_policy().config
    turn = tokenizer.convert_tokens_to_ids("<|turn|>")
    assert generation.stop_ids(config) == sorted({turn, *generation.eos_ids(config)})


def test_a_stop_string_split_by_a_special_token(tokenizer):
    """It is no stop string, as in the embedded engine, and raises no error."""
    _, found = completion(tokenizer, "123<|turn|>45", "34")
    assert (found.text, len(found.token_ids), found.finish_reason) == ("12345", 6, "length")
    _, found = completion(tokenizer, "123<|turn|>4534", "34")
    assert (len(found.token_ids), found.finish_reason) == (8, "stop")


@pytest.mark.parametrize(("text", "kept", "length"), [("12345", "12", 4), ("1234", "12", 4), ("125", "125", 3)])
def test_a_plain_stop_string(tokenizer, text, kept, length):
    _, found = completion(tokenizer, text, "34", "9")
    assert (found.text, len(found.token_ids)) == (kept, length)


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_continued_completion_that_ends_without_another_token(tokenizer, reason):
    """It is finished, and its tokens keep the weights that sampled them."""
    first, second = (make_generation(tokenizer, version=version, is_partial=True) for version in (0, 1))
    token_ids = tokenizer("12", add_special_tokens=False).input_ids
    begun = first.completion(token_ids, [-1.0, -2.0], None)
    assert (begun.finish_reason, begun.text) == (None, "")
    assert second.completion([], [], None, begun) == begun
    found = second.completion([], [], reason, begun)
    assert (found.finish_reason, found.text, found.logprobs) == (reason, "12", [-1.0, -2.0])
    assert found.spans == (Span(2, 0, 0),)
