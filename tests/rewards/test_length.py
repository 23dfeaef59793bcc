"""Rewards for short completions."""

from __future__ import annotations

import pytest

from lgrpo import Completion, Prompt
from lgrpo.rewards import ExactMatch
from lgrpo.rewards.length import CompletionLength, Shortest


def score(reward, *texts, answer="1"):
    """Score completions with one token per character."""
    prompts = [Prompt(text="", token_ids=[1], row={"answer": answer}, position=0)] * len(texts)
    completions = [
        Completion(
            token_ids=[1] * len(text), logprobs=[0.0] * len(text), text=text, finish_reason="stop", behaviour_step=0
        )
        for text in texts
    ]
    return list(reward(prompts, completions))


def test_reward_falls_linearly_beyond_the_target():
    texts = ["x" * length for length in (0, 3, 4, 5, 7, 8, 50)]
    assert score(CompletionLength(target=4, width=4), *texts) == [1, 1, 1, 0.75, 0.25, 0, 0]


def test_shorter_right_answers_gain():
    """½ - (length - shortest) / (longest - shortest), with lengths 1, 3, 5; all are right."""
    assert score(Shortest(ExactMatch()), "1", " 1 ", "  1  ") == [1.5, 1.0, 0.5]
    assert score(Shortest(ExactMatch(), weight=0.2), "1", " 1 ", "  1  ") == pytest.approx([1.1, 1.0, 0.9])


def test_wrong_answers_can_lose_but_not_gain():
    assert score(Shortest(ExactMatch()), "2", " 1 ", "  2  ") == [0.0, 1.0, -0.5]


def test_equal_lengths_change_nothing():
    assert score(Shortest(ExactMatch()), "1", "2") == [1.0, 0.0]
    assert score(Shortest(ExactMatch()), "1") == [1.0]
    assert score(Shortest(ExactMatch())) == []


def test_shortest_delegates_to_its_reward():
    assert Shortest(ExactMatch("gold")).required_fields() == {"gold"}
    copy = Shortest(ExactMatch(), weight=2.0).map_leaves(lambda reward: ExactMatch("other"))
    assert (copy.weight, copy.required_fields()) == (2.0, {"other"})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CompletionLength(target=-1, width=1), "target is -1"),
        (lambda: CompletionLength(target=1, width=0), "width is 0"),
        (lambda: Shortest(ExactMatch(), weight=0), "weight is 0"),
    ],
)
def test_bad_settings_are_rejected(make, message):
    with pytest.raises(ValueError, match=message):
        make()
