"""Who is handed which prompt, and what happens to it when a server fails: with servers that are just names."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest

from lgrpo.engines.base import EngineError, EngineFailure
from lgrpo.engines.dispatch import Dispatch


def run(num_prompts, servers, ask, *, check=lambda server: None, replace=None, at_a_time=64, period=0.01, timeout=20.0):
    told = []
    dispatch = Dispatch(
        num_prompts, ask=ask, check=check, replace=replace, at_a_time=at_a_time, period=period, timeout=timeout
    )
    dispatch.run(servers, lambda place, answer: told.append((place, answer)))
    return told


def test_every_prompt_once_and_both_servers_asked():
    told = run(40, ["a", "b"], lambda server, place: (time.sleep(0.005), (server, place))[1])
    assert sorted(place for place, _ in told) == list(range(40))
    assert all(answer[1] == place for place, answer in told)
    assert {server for _, (server, _) in told} == {"a", "b"}


def test_few_prompts_are_shared_evenly():
    together = threading.Barrier(4)
    told = run(4, ["a", "b"], lambda server, _: (together.wait(10), server)[1])
    assert Counter(server for _, server in told) == Counter(a=2, b=2)


def test_whoever_is_free_takes_the_next():
    told = run(30, ["slow", "quick"], lambda server, _: (time.sleep(0.2 if server == "slow" else 0.001), server)[1])
    assert Counter(server for _, server in told)["quick"] >= 15


def test_no_more_at_a_time_than_asked_for():
    busy, most, lock = Counter(), Counter(), threading.Lock()

    def ask(server, place):
        with lock:
            busy[server] += 1
            most[server] = max(most[server], busy[server])
        time.sleep(0.005)
        with lock:
            busy[server] -= 1

    run(40, ["a", "b"], ask, at_a_time=3)
    assert most == Counter(a=3, b=3)


def test_prompts_of_a_failed_server_go_to_the_others_and_late_answers_are_dropped():
    """The replacement of ``a`` comes when all is over; an answer of ``a`` itself comes after it was given up."""
    has_failed, is_late, is_over = threading.Event(), threading.Event(), threading.Event()

    def check(server):
        if server == "b":
            has_failed.wait(30)  # by then a has prompt 0

    def ask(server, place):
        if server == "a" and place == 0:
            is_late.wait(30)
            return "late"
        if server == "a":
            has_failed.set()
            raise EngineFailure("gone")
        if place != 0:
            return "b"
        is_late.set()
        time.sleep(0.05)  # the late answer is there first
        return "b"

    def replace(server, failure):
        assert (server, str(failure)) == ("a", "gone")
        is_over.wait(30)

    told = run(8, ["a", "b"], ask, check=check, replace=replace)
    is_over.set()
    assert sorted(told) == [(place, "b") for place in range(8)]


def test_a_replacement_works_on():
    def ask(server, place):
        if server == "a":
            raise EngineFailure("gone")
        return server

    assert sorted(run(5, ["a"], ask, replace=lambda server, failure: "a again")) == [(i, "a again") for i in range(5)]


def test_a_server_that_hangs_is_found_by_its_keeper():
    hung = threading.Event()

    def check(server):
        if server == "a" and hung.is_set():
            raise EngineFailure("no answer")

    def ask(server, place):
        if server == "a":
            hung.set()
            time.sleep(60)
        return server

    assert sorted(run(3, ["a"], ask, check=check, replace=lambda *_: "b")) == [(i, "b") for i in range(3)]


def test_what_is_wrong_with_a_request_is_not_the_servers_fault():
    def ask(server, place):
        raise EngineError("answered with 400")

    with pytest.raises(EngineError, match="answered with 400"):
        run(3, ["a", "b"], ask, replace=lambda *_: pytest.fail("replaced"))


def test_what_the_replacement_meets_ends_it():
    def ask(server, place):
        raise EngineFailure("gone")

    def replace(server, failure):
        raise EngineError("too often")

    with pytest.raises(EngineError, match="too often"):
        run(3, ["a"], ask, replace=replace)


def test_a_deadline():
    with pytest.raises(EngineError, match=r"2 of 3 prompts were unanswered after 0\.3 s"):
        run(3, ["a"], lambda _, place: place and time.sleep(60), timeout=0.3)


def test_an_error_of_the_one_who_is_told():
    dispatch = Dispatch(
        2, ask=lambda *_: 0, check=lambda _: None, replace=lambda *_: None, at_a_time=2, period=1.0, timeout=9.0
    )

    def tell(place, answer):
        raise KeyError("a bug in a reward")

    with pytest.raises(KeyError, match="a bug in a reward"):
        dispatch.run(["a"], tell)
