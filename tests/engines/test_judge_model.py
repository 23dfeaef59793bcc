"""A judge in the trainer's process, and a small server of the same model."""

from __future__ import annotations

import threading

import pytest
import torch

from lgrpo.engines import JudgeModel
from lgrpo.engines.recovery import EngineError
from lgrpo.rewards import FailedScore, JudgeReward, Pairwise, Question, Rubric, WeightedSum, read_verdicts
from tests.helpers import LowDigits, tiny_policy
from tests.rewards.judge.scripted import Script, answer, completion, score
from tests.rewards.judge.test_real_server import judge, save_judge

TEXTS = ("12", "34", "567", "8", "90", "11")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_judge(tmp_path_factory.mktemp("judge") / "model"))


@pytest.fixture
def model(folder):
    return JudgeModel(folder, dtype="float32")


def ask(model, *texts, votes=1, temperature=0.0, max_tokens=8):
    questions = [[{"role": "user", "content": text}] for text in texts]
    return model.answers(questions, votes, temperature, max_tokens)


class TestAnswers:
    def test_they_are_those_of_the_model(self, model, folder):
        """Greedy, by a plain loop over the model."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        plain, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        for text, (found,) in zip(TEXTS, ask(model, *TEXTS), strict=True):
            ids = torch.tensor([tokenizer(f"{text}>", add_special_tokens=False).input_ids])
            for _ in range(8):
                token = plain(ids).logits[0, -1].argmax()
                ids = torch.cat([ids, token[None, None]], 1)
                if token == tokenizer.eos_token_id:
                    break
            new = ids[0, len(text) + 1 :]
            assert found.text == tokenizer.decode(new, skip_special_tokens=True)
            assert found.is_complete == (new[-1] == tokenizer.eos_token_id)

    def test_votes_depend_on_the_question_only(self, model):
        alone = [ask(model, text, votes=3, temperature=1.0)[0] for text in TEXTS]
        together = ask(model, *reversed(TEXTS), votes=3, temperature=1.0)[::-1]
        assert alone == together
        assert len({one.text for one in alone[0]}) > 1

    def test_a_question_that_is_too_long(self, model):
        first, second, third = ask(model, "12", "1" * 30, "34")
        assert "a question has 31 tokens" in str(second)
        assert "can read only 32, 8 of them for the answer (max_tokens)" in str(second)
        assert [first, third] == ask(model, "12", "34")

    def test_text_of_special_tokens(self, model):
        """It is text, also if it belongs to a token that the templates do not know."""
        _ = model.name
        tokens = model._token_ids([{"role": "user", "content": "1<eos>2"}], model._policy.tokenizer)
        assert model._policy.tokenizer.eos_token_id not in tokens

    def test_the_name_tells_weights_apart(self, folder, tmp_path):
        """Verdicts are kept by it, and a folder's name says nothing about its weights."""
        torch.manual_seed(1)
        other = save_judge(tmp_path / "model")
        names = {JudgeModel(str(path), dtype="float32").name for path in (folder, folder, other)}
        assert len(names) == 2
        assert all(name.startswith("model@") for name in names), "without the path, which is private"

    def test_closing_interrupts(self, model):
        """A generation in another thread ends; the next call loads the model again."""
        errors = []
        _ = model.name
        model._model.engine.on_step = model.close

        def generate():
            try:
                ask(model, *TEXTS)
            except EngineError as error:
                errors.append(str(error))

        thread = threading.Thread(target=generate)
        thread.start()
        thread.join(60)
        assert errors == ["the engine was closed during a generation"]
        assert len(ask(model, *TEXTS)) == len(TEXTS)

    def test_bfloat16(self, folder):
        model = JudgeModel(folder)
        assert ask(model, "12")
        assert next(model._model.engine._model.parameters()).dtype == torch.bfloat16


class TestMistakes:
    def test_no_folder(self):
        with pytest.raises(FileNotFoundError, match="there is no such folder"):
            JudgeModel("/nowhere/judge")

    def test_no_chat_template(self, tmp_path):
        policy = tiny_policy()
        policy.build()
        policy.model.save_pretrained(tmp_path)
        policy.tokenizer.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="has no chat template: choose an instruction-tuned model"):
            ask(JudgeModel(str(tmp_path)), "12")

    def test_settings_of_a_server(self, model):
        with pytest.raises(ValueError, match="and not both"):
            JudgeReward("http://localhost", engine=model)
        with pytest.raises(ValueError, match="model and request are for a server"):
            JudgeReward(model="judge", engine=model)


class TestReward:
    def test_the_verdicts_of_a_server(self, model, tmp_path):
        """A server of the same model, at temperature 0."""
        served = lambda body: (200, answer(ask(model, body["messages"][0]["content"])[0][0].text))  # noqa: E731
        with Script(served) as server:
            theirs = score(judge(server.url, model="judge"), *TEXTS)
        own = score(judge(engine=model), *TEXTS)
        assert own == theirs
        assert [one.notes["answers"] for one in own] == [one.notes["answers"] for one in theirs]
        assert len(set(own)) > 1

    def test_one_batch_for_a_group(self, model):
        """With all orders and votes; equal completions are asked once."""
        calls = []
        answers = model.answers
        model.answers = lambda questions, *rest: calls.append(len(questions)) or answers(questions, *rest)
        template = Pairwise()
        template._shares, template.reads_incomplete = lambda answers: [0.5, 0.5], True
        reward = JudgeReward(template=template, engine=model, votes=2, temperature=1.0, max_tokens=2)
        template._text = lambda prompt, *pair: "".join(pair)
        assert score(reward, "12", "34", "12") == [0.5] * 3
        assert calls == [4]

    def test_a_verdict_that_cannot_be_read(self, model):
        """It does not stop the run, which an error in the trainer's process would."""
        reward = JudgeReward(template=Question("{completion}", r"(x)"), engine=model, max_tokens=8, failure_score=-1)
        scores = score(reward, "12", "1" * 30)
        assert all(isinstance(one, FailedScore) and one == -1 for one in scores)
        assert scores[0].notes["scores"] == [None]
        assert "a question has 31 tokens" in scores[1].why

    def test_kept_verdicts(self, model, tmp_path):
        reward = judge(engine=model, verdicts=str(tmp_path))
        first = score(reward, "12", "34")
        model.answers = None
        again = score(reward, "34", "12")
        assert again == first[::-1]
        assert all(one.notes["is_cached"] for one in again)
        assert {verdict["model"] for verdict in read_verdicts(tmp_path)} == {model.name}

    def test_it_runs_in_the_trainer(self, model):
        reward = JudgeReward(template=Rubric(), engine=model)
        assert reward.is_inline
        assert reward.can_fail
        both = WeightedSum({"judge": reward, "digits": LowDigits()})
        assert both.is_inline
        assert both.can_fail
        assert not WeightedSum({"digits": LowDigits()}).can_fail
        assert completion().text == "four"
