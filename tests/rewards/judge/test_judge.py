"""Scores of a judge: their notes and metrics, in workers and in the trainer's process, and a real server."""

from __future__ import annotations

import asyncio
import copy
import math
import pickle
import threading

import pytest

from lgrpo.rewards import (
    NOT_YET,
    FailedScore,
    Isolated,
    JudgeError,
    JudgeReward,
    NotedScore,
    OverlongPenalty,
    Pairwise,
    Question,
    Scoring,
    Shortest,
    SumScore,
    TagFormat,
    WeightedSum,
    notes_of,
)
from lgrpo.rewards.base import MAX_NOTES
from tests.rewards.judge.scripted import QUICK, Script, score


class TestNotes:
    def test_a_verdict(self, tmp_path):
        with Script("Good. Rating: 7") as server:
            reward = JudgeReward(server.url, verdicts=str(tmp_path), **QUICK)
            (first,), (second,) = score(reward, "four"), score(reward, "four")
        assert first.notes["scores"] == [0.7]
        assert first.notes["answers"] == [["Good. Rating: 7"]]
        assert (first.notes["is_cached"], second.notes["is_cached"]) == (False, True)
        assert {**first.notes, "is_cached": True} == second.notes
        key = first.notes["verdict"]
        assert (tmp_path / key[:2] / f"{key[2:]}.json").is_file()

    def test_in_workers(self, tmp_path):
        """Also the verdict of a completion that could not be scored."""
        with Script("Rating: 9", "I would rather not.") as server:
            judge = JudgeReward(server.url, verdicts=str(tmp_path), **QUICK)
            reward = Isolated(judge, Scoring(num_workers=1, timeout=60, failure_score=-1))
            try:
                (first,) = score(reward, "a")
                (second,) = score(reward, "b")
            finally:
                reward.close()
            assert (first, first.notes["answers"]) == (0.9, [["Rating: 9"]])
            assert isinstance(second, FailedScore)
            assert (second, second.notes["scores"]) == (-1, [None])
            assert second.notes["answers"] == [["I would rather not."]]
            assert reward.report()["judge/unreadable_fraction"] == 0.5
            assert reward.report()["judge/unreadable_fraction"] != 0.5, "the metrics are those since the last report"

    def test_through_other_rewards(self):
        with Script("Rating: 9") as server:
            judge = JudgeReward(server.url, **QUICK)
            for wrapped in (OverlongPenalty(judge, 100, 10), Shortest(judge)):
                assert score(wrapped, "a")[0].notes["scores"] == [0.9]
            (both,) = score(WeightedSum({"style": judge, "form": TagFormat(), "safe": judge}), "a")
        assert both.notes.keys() == {"style", "safe"}
        assert both.notes["safe"]["answers"] == [["Rating: 9"]]

    def test_long_answers_are_shortened(self):
        with Script("x" * 10**5 + " Rating: 9") as server:
            (long,) = score(JudgeReward(server.url, **QUICK), "a")
            (many,) = score(JudgeReward(server.url, votes=40, temperature=1.0, **QUICK), "a")
        ((text,),) = long.notes["answers"]
        assert len(text) == 2001
        assert text.endswith("x Rating: 9")
        assert many.notes.keys() >= {"verdict", "answers"}, "they would be dropped if they were too long together"

    def test_notes_of_any_reward(self):
        assert notes_of(NotedScore(1, {"why": {"a": (1, 2)}})) == {"why": {"a": [1, 2]}}
        assert notes_of(NotedScore(1, {"odds": [math.nan, -math.inf, 2.0]})) == {"odds": [None, None, 2.0]}
        assert notes_of(NotedScore(1, {"x": "y" * MAX_NOTES}))["dropped"].endswith("characters of notes")
        assert notes_of(0.5) is notes_of(NOT_YET) is None

    def test_copies_of_scores(self):
        """Recorded completions, whose rewards they are, are sent to workers."""
        failed = FailedScore(-1, "timeouts", "too slow", {"a": 1})
        failed.parts, failed.is_reported = ((-1.0, 2.0),), True
        for one in (NotedScore(0.5, {"a": 1}), failed, SumScore(3, ((1.0, 3.0),), {"b": {"c": 2}})):
            for other in (pickle.loads(pickle.dumps(one)), copy.deepcopy(one)):
                assert (type(other), float(other), vars(other)) == (type(one), float(one), vars(one))


class TestMetrics:
    def test_votes(self, tmp_path):
        ratings = {"a": [10, 10], "b": [4, None], "c": [5, 8]}

        def rate(body):
            question = body["messages"][0]["content"]
            return f"Rating: {ratings[question][body['seed']]}"

        with Script(rate) as server:
            template = Question("{completion}", r"Rating: (\d+)")
            reward = JudgeReward(server.url, template, votes=2, temperature=1.0, verdicts=str(tmp_path), **QUICK)
            for text in "abca":
                score(reward, text)
        found = reward.report()
        assert found.pop("judge/seconds") > 0
        assert found == {
            "judge/unreadable_fraction": 1 / 8,
            "judge/unanimous_fraction": pytest.approx(2 / 3),  # a, asked once, counts twice; b has a single vote
            "judge/vote_std": pytest.approx((0 + 0 + 1.5) / 3),
            "judge/cached_fraction": 1 / 4,
        }

    def test_orders(self):
        with Script("Better: A") as server:
            reward = JudgeReward(server.url, Pairwise(), **QUICK)
            assert score(reward, "a", "b") == [0.5, 0.5]
        found = reward.report()
        assert found.keys() == {"judge/unreadable_fraction", "judge/order_change_fraction", "judge/seconds"}
        assert found["judge/order_change_fraction"] == 1

    def test_several_judges(self):
        """Their metrics have the same names: the mean is reported."""
        with Script("Rating: 9", "hm") as server:
            judges = {name: JudgeReward(server.url, **QUICK) for name in ("one", "two")}
            score(judges["one"], "a")
            with pytest.raises(JudgeError) as error:
                score(judges["two"], "b")
            judges["two"].observe([FailedScore(0, "errors", "", error.value.notes)])
        assert WeightedSum(judges).report()["judge/unreadable_fraction"] == 0.5

    def test_a_pickled_reward_has_none(self):
        with Script("Rating: 9") as server:
            reward = JudgeReward(server.url, **QUICK)
            score(reward, "a")
        pickled = pickle.loads(pickle.dumps(reward))
        assert reward.report()["judge/unreadable_fraction"] == 0
        assert pickled.report()["judge/unreadable_fraction"] != 0


def test_closing_ends_the_wait():
    """As after Ctrl-C with ``data.scoring: null``: the process would live until the last timeout."""
    arrived = threading.Event()
    ended = []

    def ask():
        try:
            score(reward, "a", "b")
        except BaseException as error:
            ended.append(error)

    with Script(lambda _: arrived.set() or "hang") as server:
        reward = JudgeReward(server.url, timeout=50, **QUICK)
        thread = threading.Thread(target=ask)
        thread.start()
        assert arrived.wait(20)
        reward.close()
        thread.join(20)
        assert not thread.is_alive()
    assert isinstance(ended[0], asyncio.CancelledError)


def test_a_late_completion_ends_alone():
    """Its worker reports it, and goes on with others; its requests are not repeated any longer."""
    with Script(lambda body: "hang" if "late" in str(body) else "Rating: 9") as server:
        judge = JudgeReward(server.url, timeout=1, **QUICK | {"retry_delay": 0.1})
        reward = Isolated(judge, Scoring(num_workers=1, timeout=2.5))
        try:
            late, other = score(reward, "late", "other")
            num_requests = len(server.requests)
            assert score(reward, "more", "still more") == [0.9, 0.9]
        finally:
            reward.close()
    assert (late.kind, other) == ("timeouts", 0.9)
    assert 3 <= num_requests <= 4
    assert sum("late" in text for text in server.texts) == num_requests - 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"votes": 2}, "votes is 2, but at temperature 0 all answers are equal"),
        ({"votes": 0}, "votes is 0"),
        ({"timeout": 0.0}, "timeout is 0"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temperature": -1.0}, "temperature is -1"),
        ({"request": {"max_tokens": "None"}}, "write null in a config file"),  # as jsonargparse reads an option
        ({"url": None}, "needs a url, the address of a server, or an engine"),
    ],
)
def test_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        JudgeReward(**{"url": "http://localhost"} | settings)
