"""Distribution of prompts and retries after failures, with servers that are only names."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest

from lgrpo.engines.recovery import EngineError, EngineFailure
from lgrpo.engines.servers.balancer import LoadBalancer


def run(
    num_prompts, servers, ask, *, check=lambda server: None, replace=None, max_in_flight=64, period=0.01, timeout=20.0
):
    delivered = []
    balancer = LoadBalancer(
        num_prompts, ask=ask, check=check, replace=replace, max_in_flight=max_in_flight, period=period, timeout=timeout
    )
    balancer.run(servers, lambda index, answer: delivered.append((index, answer)))
    return delivered


def test_every_prompt_is_answered_once_and_both_servers_are_used():
    delivered = run(40, ["a", "b"], lambda server, index: (time.sleep(0.005), (server, index))[1])
    assert sorted(index for index, _ in delivered) == list(range(40))
    assert all(answer[1] == index for index, answer in delivered)
    assert {server for _, (server, _) in delivered} == {"a", "b"}


def test_few_prompts_are_shared_evenly():
    barrier = threading.Barrier(4)
    delivered = run(4, ["a", "b"], lambda server, _: (barrier.wait(10), server)[1])
    assert Counter(server for _, server in delivered) == Counter(a=2, b=2)


def test_a_faster_server_answers_more_prompts():
    def ask(server, _):
        time.sleep(0.2 if server == "slow" else 0.001)
        return server

    assert Counter(server for _, server in run(30, ["slow", "fast"], ask))["fast"] >= 15


def test_limit_of_prompts_in_flight():
    busy, most, lock = Counter(), Counter(), threading.Lock()

    def ask(server, index):
        with lock:
            busy[server] += 1
            most[server] = max(most[server], busy[server])
        time.sleep(0.005)
        with lock:
            busy[server] -= 1

    run(40, ["a", "b"], ask, max_in_flight=3)
    assert most == Counter(a=3, b=3)


def test_prompts_of_a_failed_server_go_to_the_others_and_late_answers_are_dropped():
    """``a`` is replaced only after the end, and one of its answers arrives after its failure."""
    has_failed, is_late, is_over = threading.Event(), threading.Event(), threading.Event()

    def check(server):
        if server == "b":
            has_failed.wait(30)  # by then a has prompt 0

    def ask(server, index):
        if server == "a" and index == 0:
            is_late.wait(30)
            return "late"
        if server == "a":
            has_failed.set()
            raise EngineFailure("gone")
        if index != 0:
            return "b"
        is_late.set()
        time.sleep(0.05)  # the late answer arrives first
        return "b"

    def replace(server, failure):
        assert (server, str(failure)) == ("a", "gone")
        is_over.wait(30)

    delivered = run(8, ["a", "b"], ask, check=check, replace=replace)
    is_over.set()
    assert sorted(delivered) == [(index, "b") for index in range(8)]


def test_a_replacement_answers_the_remaining_prompts():
    def ask(server, index):
        if server == "a":
            raise EngineFailure("gone")
        return server

    assert sorted(run(5, ["a"], ask, replace=lambda server, failure: "new")) == [(i, "new") for i in range(5)]


def test_the_supervisor_detects_a_server_that_hangs():
    hung = threading.Event()

    def check(server):
        if server == "a" and hung.is_set():
            raise EngineFailure("no answer")

    def ask(server, index):
        if server == "a":
            hung.set()
            time.sleep(60)
        return server

    assert sorted(run(3, ["a"], ask, check=check, replace=lambda *_: "b")) == [(i, "b") for i in range(3)]


def test_a_wrong_request_is_not_a_failure_of_the_server():
    def ask(server, index):
        raise EngineError("answered with 400")

    with pytest.raises(EngineError, match="answered with 400"):
        run(3, ["a", "b"], ask, replace=lambda *_: pytest.fail("replaced"))


def test_an_error_during_the_replacement_ends_the_generation():
    def ask(server, index):
        raise EngineFailure("gone")

    def replace(server, failure):
        raise EngineError("too often")

    with pytest.raises(EngineError, match="too often"):
        run(3, ["a"], ask, replace=replace)


def test_timeout():
    with pytest.raises(EngineError, match=r"2 of 3 prompts were unanswered after 0\.3 s"):
        run(3, ["a"], lambda _, index: index and time.sleep(60), timeout=0.3)


def test_an_error_of_the_callback_is_raised():
    balancer = LoadBalancer(
        2, ask=lambda *_: 0, check=lambda _: None, replace=lambda *_: None, max_in_flight=2, period=1.0, timeout=9.0
    )

    def deliver(index, answer):
        raise KeyError("a bug in a reward")

    with pytest.raises(KeyError, match="a bug in a reward"):
        balancer.run(["a"], deliver)
