"""The folder of verdicts: what is asked once, by several processes, and after mistakes."""

from __future__ import annotations

import json
import multiprocessing
import threading

import pytest

from lgrpo.rewards import JudgeError, JudgeReward, Pairwise, Question, Rubric, read_verdicts, verdict_statistics
from lgrpo.rewards.judge.verdicts import VerdictFolder
from tests.rewards.judge.scripted import QUICK, Script, answer, score


def files(folder):
    return sorted(path for path in folder.glob("**/*") if path.is_file())


class TestAskedOnce:
    def test_what_is_known(self, tmp_path):
        """Questions and answers are kept; other questions, models and temperatures are asked."""
        with Script("Rating: 6", "Rating: 8", "Rating: 2", "Rating: 3") as server:
            for _ in range(2):
                assert score(JudgeReward(server.url, verdicts=str(tmp_path), **QUICK), "four") == [0.6]
            assert len(server.requests) == 1
            assert score(JudgeReward(server.url, verdicts=str(tmp_path), **QUICK), "five") == [0.8]
            other = QUICK | {"model": "another"}
            assert score(JudgeReward(server.url, verdicts=str(tmp_path), **other), "four") == [0.2]
            fields = QUICK | {"request": {"top_p": 0.5}}
            assert score(JudgeReward(server.url, verdicts=str(tmp_path), **fields), "four") == [0.3]
            assert len(server.requests) == 4
        found = {verdict["answers"][0][0]: verdict for verdict in read_verdicts(tmp_path)}
        assert found.keys() == {"Rating: 6", "Rating: 8", "Rating: 2", "Rating: 3"}
        assert "four" in found["Rating: 2"]["questions"][0][0]["content"]
        assert (found["Rating: 2"]["model"], found["Rating: 2"]["scores"]) == ("another", [0.2])

    def test_without_the_server(self, tmp_path):
        """With the name of the model nothing else is needed."""
        with Script("Rating: 6") as server:
            score(JudgeReward(server.url, verdicts=str(tmp_path), **QUICK), "four")
        assert score(JudgeReward(server.url, verdicts=str(tmp_path), **QUICK), "four") == [0.6]

    def test_equal_completions_of_a_group(self):
        """They are asked once, also without a folder, and get the same score."""
        with Script("Rating: 6", "Rating: 1") as server:
            assert score(JudgeReward(server.url, **QUICK), "four", "four", "four") == [0.6, 0.6, 0.6]
        assert len(server.requests) == 1

    def test_another_reading(self, tmp_path):
        """Kept answers are read by the current template."""
        with Script("yes") as server:
            for value in (0.3, 0.4):
                template = Question("{completion}", "(yes)", {"yes": value})
                assert score(JudgeReward(server.url, template, verdicts=str(tmp_path), **QUICK), "a") == [value]
        assert len(server.requests) == 1


class TestUnreadable:
    def test_it_is_kept_and_asked_again(self, tmp_path):
        """A verdict without a score would otherwise stay one in all later runs."""
        with Script("hm", "Rating: 4") as server:
            with pytest.raises(JudgeError, match="no rating"):
                score(JudgeReward(server.url, verdicts=str(tmp_path), **QUICK), "six")
            (kept,) = read_verdicts(tmp_path)
            assert (kept["answers"], kept["scores"]) == ([["hm"]], [None])
            assert "no rating from 0 to 10" in kept["errors"][0]
            for _ in range(2):
                assert score(JudgeReward(server.url, verdicts=str(tmp_path), **QUICK), "six") == [0.4]
            assert len(server.requests) == 2
        assert [verdict["scores"] for verdict in read_verdicts(tmp_path)] == [[0.4]]

    def test_votes_that_can_be_read_count(self, tmp_path):
        with Script("Rating: 6", "hm", "Rating: 8") as server:
            reward = JudgeReward(server.url, votes=3, temperature=1.0, verdicts=str(tmp_path), **QUICK)
            for _ in range(2):
                assert score(reward, "four") == [pytest.approx(0.7)]
            assert len(server.requests) == 3, "a verdict with a score is not asked again"

    def test_an_answer_that_was_cut_off(self):
        """Its last rating may be a thought, or the beginning of a number."""
        with Script((200, answer("Rating: 1", "length"))) as server:
            with pytest.raises(JudgeError, match=r"cut off after 1024 tokens: raise max_tokens"):
                score(JudgeReward(server.url, **QUICK), "a")
            yes_or_no = Question("{completion}", r"Rating: (\d)")
            assert score(JudgeReward(server.url, yes_or_no, max_tokens=1, **QUICK), "a") == [1.0]

    def test_an_empty_answer(self):
        """As a refusal, or the answer of a model that only thinks."""
        with Script((200, answer(None))) as server, pytest.raises(JudgeError, match=r"no rating .*''"):
            score(JudgeReward(server.url, **QUICK), "a")


class TestFiles:
    @pytest.mark.parametrize("content", ["", '{"answers": [["Rat', "[]", "{}"])
    def test_a_broken_file(self, tmp_path, content):
        """As after a power failure: it is asked again."""
        with Script("Rating: 6") as server:
            score(JudgeReward(server.url, verdicts=str(tmp_path), **QUICK), "four")
            (path,) = files(tmp_path)
            path.write_text(content)
            assert list(read_verdicts(tmp_path)) == []
            assert score(JudgeReward(server.url, verdicts=str(tmp_path), **QUICK), "four") == [0.6]
        assert len(list(read_verdicts(tmp_path))) == 1
        assert len(server.requests) == 2

    def test_nothing_is_left_of_a_failed_write(self, tmp_path, monkeypatch):
        def full(*_):
            raise OSError("no space left on device")

        with Script("Rating: 6") as server, monkeypatch.context() as patch:
            patch.setattr("os.replace", full)
            patch.setattr("os.link", full)
            with pytest.raises(OSError, match="no space"):
                score(JudgeReward(server.url, verdicts=str(tmp_path), **QUICK), "four")
        assert files(tmp_path) == []

    def test_nothing_secret(self, tmp_path, monkeypatch):
        monkeypatch.setenv("LGRPO_JUDGE_API_KEY", "sk-hidden")
        with Script("Rating: 6") as server:
            scores = score(JudgeReward(server.url, verdicts=str(tmp_path), **QUICK), "four")
        assert "sk-hidden" not in files(tmp_path)[0].read_text() + json.dumps(scores[0].notes)

    def test_others_may_read_them(self, tmp_path):
        with Script("Rating: 6") as server:
            score(JudgeReward(server.url, verdicts=str(tmp_path), **QUICK), "four")
        assert files(tmp_path)[0].stat().st_mode & 0o044


class TestSeveralProcesses:
    def test_the_first_verdict_stays(self, tmp_path):
        """Two processes that ask at the same time use one verdict, the one in the folder."""
        both = threading.Barrier(2)

        def reply(body):
            both.wait(20)  # neither has found a verdict
            return f"Rating: {body['from']}"

        scores = {}

        def one(number):
            reward = JudgeReward(server.url, verdicts=str(tmp_path), **QUICK)
            reward._body = lambda *arguments, body=reward._body: body(*arguments) | {"from": number}
            scores[number] = score(reward, "four")[0]

        with Script(reply) as server:
            threads = [threading.Thread(target=one, args=(number,)) for number in (2, 7)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        (kept,) = read_verdicts(tmp_path)
        assert scores[2] == scores[7] == kept["scores"][0]

    def test_many_writers(self, tmp_path):
        """All end with the same verdict, and readers never see half of one."""
        context = multiprocessing.get_context("fork")
        results = context.SimpleQueue()
        start = context.Barrier(6)

        def write(number):
            folder = VerdictFolder(tmp_path)
            start.wait()
            for key in range(50):
                kept = folder.keep({"key": f"{key:064}", "answers": [["x" * 10**4]], "writer": number}, replace=False)
                results.put((key, kept["writer"]))

        workers = [context.Process(target=write, args=(number,)) for number in range(6)]
        for worker in workers:
            worker.start()
        found = {results.get() for _ in range(300)}
        for worker in workers:
            worker.join()
        assert len(found) == 50, "every writer has got the verdict of the first one"
        assert found == {(int(verdict["key"]), verdict["writer"]) for verdict in read_verdicts(tmp_path)}
        assert len(files(tmp_path)) == 50


class TestStatistics:
    def test_votes(self, tmp_path):
        with Script("Rating: 6", "Rating: 6", "Rating: 1", "Rating: 2") as server:
            reward = JudgeReward(server.url, votes=3, temperature=1.0, verdicts=str(tmp_path), **QUICK)
            score(reward, "four")
            score(reward, "five")
        found = verdict_statistics(tmp_path)
        assert (found["verdicts"], found["unreadable"], found["unanimous"]) == (2, 0, 0.5)
        assert found["agreement"] == pytest.approx((2 / 3 + 1) / 2)
        assert found["score"] == pytest.approx((1.3 / 3 + 0.2) / 2)

    def test_orders(self, tmp_path):
        def first_or_four(body):
            text = body["messages"][0]["content"]
            is_first = text.index("four") < text.index("\n4\n") if "four" in text else True
            return "Better: A" if is_first else "Better: B"

        with Script(first_or_four) as server:
            reward = JudgeReward(server.url, Pairwise(), verdicts=str(tmp_path), **QUICK)
            assert score(reward, "four", "five") == [1.0, 0.5]
        assert verdict_statistics(tmp_path)["order_changes"] == 0.5

    def test_labels(self, tmp_path):
        ratings = {"a": "0.9", "b": "0.7", "c": "0.7", "d": "0.2", "e": "hm"}
        with Script(lambda body: ratings[body["messages"][0]["content"]]) as server:
            reward = JudgeReward(server.url, Question("{completion}", r"(0\.\d)"), verdicts=str(tmp_path), **QUICK)
            keys = {text: score(reward, text)[0].notes["verdict"] for text in "abcd"}
            with pytest.raises(JudgeError) as unreadable:
                score(reward, "e")
        labels = {
            keys["a"]: 1.0,
            keys["b"]: 0.0,
            keys["c"]: 1.0,
            unreadable.value.notes["verdict"]: 1.0,
            "unknown": 0.0,
        }
        found = verdict_statistics(tmp_path, labels)
        assert found["labelled"] == 3, "one has no label, one no score, and one no verdict"
        assert found["accuracy"] == pytest.approx(2 / 3)
        assert found["auc"] == pytest.approx((1 + 0.5) / 2)

    def test_none(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="there are no verdicts in"):
            verdict_statistics(tmp_path)

    def test_nothing_to_count(self, tmp_path):
        with Script("hm") as server, pytest.raises(JudgeError):
            score(JudgeReward(server.url, Rubric(), verdicts=str(tmp_path), **QUICK), "a")
        found = verdict_statistics(tmp_path, labels={})
        assert found["unreadable"] == 1
        assert {name for name, value in found.items() if value != value} == {
            *("score", "unanimous", "agreement", "order_changes", "accuracy", "auc")
        }
