"""Servers that are slow, busy, wrong, away or hostile."""

from __future__ import annotations

import json
import socket
import threading
import time

import pytest

from lgrpo.engines.servers.client import free_port
from lgrpo.rewards import FailedScore, Isolated, JudgeError, JudgeReward, Scoring
from tests.rewards.judge.scripted import QUICK, Script, answer, score


def test_a_score(monkeypatch):
    monkeypatch.setenv("LGRPO_JUDGE_API_KEY", "secret")
    with Script("Good. Rating: 7") as server:
        assert score(JudgeReward(server.url, **QUICK), "four", "five") == [0.7, 0.7]
    assert {(one["model"], one["temperature"], one["key"]) for one in server.requests} == {
        ("judge", 0.0, "Bearer secret")
    }


def test_votes():
    with Script("Rating: 10", "Rating: 10", "Rating: 4") as server:
        assert score(JudgeReward(server.url, votes=3, temperature=0.7, **QUICK), "four") == [pytest.approx(0.8)]
    assert sorted(one["seed"] for one in server.requests) == [0, 1, 2]


class TestFailures:
    def test_a_server_that_recovers(self):
        """It is busy, fails, hangs up, hangs, and sends nonsense; then it answers."""
        busy, broken, nonsense = (429, "slow down", ("Retry-After", "0")), (500, "broken"), (200, None)
        with Script(busy, broken, "hang", nonsense, "Rating: 5") as server:
            assert score(JudgeReward(server.url, timeout=3, max_retries=4, **QUICK), "four") == [0.5]
        assert len(server.requests) == 5

    @pytest.mark.parametrize(
        ("response", "message", "num_requests"),
        [
            ((429, "slow down"), r"answered .* with 429: slow down, after 3 attempts", 3),
            ("hang", r"did not answer within 1 s, after 3 attempts", None),
            ("trickle", r"did not answer within 1 s, after 3 attempts", None),
            ((401, "no"), r"with 401: no\. Set LGRPO_JUDGE_API_KEY to its key\.", 1),
            ((404, "no such model"), r"with 404: no such model", 1),
            ((200, None), r"sent no JSON: '', after 3 attempts", 3),
            (
                (200, "this is no gzip", ("Content-Encoding", "gzip")),
                r"cannot be read \(DecodingError.*after 3 attempts",
                3,
            ),
            ((307, "", ("Location", "http://elsewhere/v1")), "redirects to 'http://elsewhere/v1': set url to it", 1),
            ((429, "", ("Retry-After", "3600")), r"asks to wait 3600 s, longer than timeout \(1 s\)", 1),
            (
                (503, "", ("Retry-After", "Fri, 31 Dec 9999 23:59:59 GMT")),
                r"asks to wait \d\S* s, longer than timeout \(1 s\)",
                1,
            ),
            ((503, "", ("Retry-After", "nan")), r"with 503: , after 3 attempts", 3),
            ((200, "[]"), r"sent no answer: \[\]", 1),
            ((200, answer(["a"])), "sent no answer", 1),
        ],
    )
    def test_a_server_that_does_not(self, response, message, num_requests):
        with Script(response) as server:
            with pytest.raises(JudgeError, match=message):
                score(JudgeReward(server.url, timeout=1, max_retries=2, **QUICK), "a")
            assert num_requests in (None, len(server.requests))

    def test_no_server(self):
        with pytest.raises(JudgeError, match=r"cannot be reached .*, after 2 attempts"):
            score(JudgeReward(f"http://127.0.0.1:{free_port()}", max_retries=1, **QUICK), "a")

    @pytest.mark.parametrize("scheme", ["http", "https"])
    def test_a_port_that_accepts_and_says_nothing(self, scheme):
        with socket.create_server(("127.0.0.1", 0)) as listening:
            url = f"{scheme}://127.0.0.1:{listening.getsockname()[1]}"
            with pytest.raises(JudgeError, match=r"did not answer within 0\.5 s"):
                score(JudgeReward(url, timeout=0.5, max_retries=1, **QUICK), "a")

    def test_a_server_without_tls(self):
        with Script("Rating: 1") as server, pytest.raises(JudgeError, match=r"cannot be reached .*SSL"):
            score(JudgeReward(server.url.replace("http:", "https:"), max_retries=0, **QUICK), "a")

    def test_one_failed_question_ends_the_others(self):
        """No request is sent for a completion that has failed already."""
        with Script((400, "no"), "hang") as server:
            start = time.monotonic()
            with pytest.raises(JudgeError, match="with 400"):
                score(JudgeReward(server.url, votes=3, temperature=1.0, timeout=20, **QUICK), "a")
            assert time.monotonic() - start < 15, "the other questions were waited for"

    def test_nothing_is_sent_while_the_server_wants_a_pause(self):
        """The request that was told to wait is not the only one that does."""
        slow = threading.Event()

        def busy(_):
            slow.set()
            return 429, "", ("Retry-After", "2")

        def later(_):
            slow.wait(10)
            time.sleep(0.5)  # until the client has the other response
            return "Rating: 2"

        with Script(lambda body: busy(body) if "first" in str(body) else later(body), "Rating: 3") as server:
            reward = JudgeReward(server.url, **QUICK | {"retry_delay": 0.01})
            reward.concurrency = 2
            server.responses = [lambda body: busy(body) if "first" in str(body) else later(body)] * 2 + ["Rating: 3"]
            assert score(reward, "first", "second", "third") == [0.3, 0.2, 0.3]
        assert min(server.times[2:]) - max(server.times[:2]) >= 1.9

    def test_attempts_of_many_requests_are_not_simultaneous(self, monkeypatch):
        slept = []

        async def sleep(seconds):
            slept.append(seconds)

        with Script((500, "")) as server:
            reward = JudgeReward(server.url, **QUICK | {"retry_delay": 1.0, "max_retries": 2})
            monkeypatch.setattr("asyncio.sleep", sleep)
            for text in "abc":
                with pytest.raises(JudgeError):
                    score(reward, text)
        assert all(1 <= seconds <= 2 for seconds in slept[::2])
        assert all(2 <= seconds <= 4 for seconds in slept[1::2])
        assert len(set(slept)) == 6


class TestTheModel:
    def test_it_is_looked_up_once(self):
        models = json.dumps({"data": [{"id": "first"}, {"id": "second"}]})
        with Script("Rating: 5", models=models) as server:
            score(JudgeReward(server.url, retry_delay=0.0), *"abcdefgh")
        assert server.num_lookups == 1
        assert {request["model"] for request in server.requests} == {"first"}

    @pytest.mark.parametrize("models", ["[]", "{}", '{"data": []}'])
    def test_there_is_none(self, models):
        with Script("Rating: 5", models=models) as server:
            with pytest.raises(JudgeError, match=r"names no model: .*Set model"):
                score(JudgeReward(server.url), "a")
            assert server.requests == []


class TestAddresses:
    @pytest.mark.parametrize(
        ("end", "path"),
        [
            ("", "/v1/chat/completions"),
            ("/", "/v1/chat/completions"),
            ("/v1", "/v1/chat/completions"),
            ("/v1/chat/completions", "/v1/chat/completions"),
            ("/v1beta/openai/", "/v1beta/openai/chat/completions"),
        ],
    )
    def test_routes(self, end, path):
        with Script("Rating: 5") as server:
            score(JudgeReward(server.url + end, **QUICK), "a")
        assert server.requests[0]["path"] == path

    @pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://", "host"])
    def test_mistakes(self, url):
        with pytest.raises(ValueError, match="must be an address such as http://localhost:8000"):
            JudgeReward(url)

    @pytest.mark.parametrize("url", ["http://me:hidden@host", "http://host/v1?key=hidden"])
    def test_a_key_in_the_address(self, url):
        """It would be in configs, logs and checkpoints."""
        with pytest.raises(ValueError, match=r"variable \(api_key_env\)") as caught:
            JudgeReward(url)
        assert "hidden" not in str(caught.value)


class TestRequests:
    def test_further_fields(self):
        fields = {"max_tokens": None, "max_completion_tokens": 9, "chat_template_kwargs": {"enable_thinking": False}}
        with Script("Rating: 5") as server:
            score(JudgeReward(server.url, request=fields, **QUICK), "a")
        (request,) = server.requests
        assert "max_tokens" not in request
        assert request["max_completion_tokens"] == 9
        assert request["chat_template_kwargs"] == {"enable_thinking": False}

    def test_half_a_character(self):
        """A lone surrogate cannot be encoded as UTF-8."""
        with Script(lambda _: (200, '{"choices": [{"message": {"content": "\\ud83d Rating: 5"}}]}')) as server:
            assert score(JudgeReward(server.url, **QUICK), "\ud83d") == [0.5]


class TestTheKey:
    """The key is sent, and never shown."""

    def test_a_server_that_repeats_it(self, monkeypatch):
        monkeypatch.setenv("LGRPO_JUDGE_API_KEY", "sk-hidden")
        for status in (400, 401, 500, 307, 200):
            with Script((status, "no: sk-hidden", ("Location", "http://x/sk-hidden"))) as server:
                with pytest.raises(JudgeError) as caught:
                    score(JudgeReward(server.url, max_retries=0, **QUICK), "a")
                assert server.requests[0]["key"] == "Bearer sk-hidden"
            assert "hidden" not in str(caught.value)

    def test_white_space_around_it(self, monkeypatch):
        monkeypatch.setenv("LGRPO_JUDGE_API_KEY", "sk-hidden\n")
        with Script("Rating: 5") as server:
            score(JudgeReward(server.url, **QUICK), "a")
        assert server.requests[0]["key"] == "Bearer sk-hidden"

    @pytest.mark.parametrize("key", ["sk-hid\nden", "sk-hiddén"])
    def test_a_key_that_no_header_can_have(self, key, monkeypatch):
        monkeypatch.setenv("LGRPO_JUDGE_API_KEY", key)
        with Script("Rating: 5") as server, pytest.raises(JudgeError, match="LGRPO_JUDGE_API_KEY has a") as caught:
            score(JudgeReward(server.url, **QUICK), "a")
        assert "hid" not in str(caught.value)


class TestWorkers:
    def test_a_verdict_that_cannot_be_read(self):
        """It costs its completion."""
        with Script("Rating: 9", "I would rather not.") as server:
            reward = Isolated(JudgeReward(server.url, **QUICK), Scoring(num_workers=1, timeout=60))
            try:
                first = score(reward, "a")
                second = score(reward, "b")
            finally:
                reward.close()
        assert first == [0.9]
        assert isinstance(second[0], FailedScore)
        assert "no rating from 0 to 10 in the judge's answer 'I would rather not.'" in second[0].why
