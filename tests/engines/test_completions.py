"""Stop strings and the end of sampled completions."""

from __future__ import annotations

import pickle
from array import array
from dataclasses import replace

import pytest
from transformers import AddedToken

from lgrpo.engines import Generation, Sampling
from lgrpo.engines.recovery import EngineFailure
from lgrpo.kept import Kept
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


def truncated_generation(tokenizer, *stop, version=0):
    generation = make_generation(tokenizer, *stop, version=version, is_partial=True)
    generation.sampling = Sampling(stop=list(stop), top_p=0.9).with_kept()
    return generation


def sets(*sizes):
    """Return sets of the given sizes, numbered one after another."""
    return Kept(token_ids=array("i", range(sum(sizes))), counts=array("i", sizes), incomplete=(len(sizes) - 1,))


def test_kept_tokens_are_required(tokenizer):
    generation = truncated_generation(tokenizer)
    for kept in (None, sets(2)):
        with pytest.raises(EngineFailure, match=rf"2 tokens came with {len(kept or ())} sets"):
            generation.completion([5, 6], [-1.0, -1.0], "stop", None, kept)
    assert generation.completion([], [], None).kept is None


def test_kept_tokens_are_joined_and_cut(tokenizer):
    first, second = truncated_generation(tokenizer), truncated_generation(tokenizer, "45", version=1)
    ids = [tokenizer(text, add_special_tokens=False).input_ids for text in ("123", "4567")]
    begun = first.completion(ids[0], [-1.0] * 3, None, None, sets(1, 2, 3))
    found = second.completion(ids[1], [-1.0] * 4, "length", begun, sets(4, 5, 6, 7))
    assert (found.text, len(found.token_ids)) == ("123", 5)
    assert found.kept.counts.tolist() == [1, 2, 3, 4, 5]
    assert found.kept.token_ids.tolist() == [*range(6), *range(9)]
    assert found.kept.incomplete == (2,)
    begun.kept = None
    assert second.completion(ids[1], [-1.0] * 4, "length", begun, sets(4, 5, 6, 7)).kept.counts.tolist() == [
        0,
        0,
        0,
        4,
        5,
    ]


def test_settings_for_training_survive_changes_and_pipes():
    sampling = Sampling(top_k=5, temperature=0.7, max_tokens=9)
    own = sampling.with_kept()
    for one in (own, replace(own, max_tokens=3), pickle.loads(pickle.dumps(own))):
        assert one.returns_kept
        assert (one.top_k, one.temperature) == (5, 0.7)
    assert not sampling.returns_kept
    plain = Sampling(temperature=0.7)
    assert plain.with_kept() is plain
