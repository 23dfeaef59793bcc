"""Episodes of several turns: which tokens are sampled, observed and trained on, and when an episode ends."""

from __future__ import annotations

import hashlib
import itertools
import json
import warnings
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from transformers import AutoTokenizer

from lgrpo import TransformersEngine
from lgrpo.callbacks import ExactResume
from lgrpo.cli import main
from lgrpo.data.collate import completions_of
from lgrpo.data.evaluation import Benchmark
from lgrpo.engines import EngineError, EnvironmentEngine, Sampling, completion_text, episode_sampler
from lgrpo.engines.observations import ObservationEncoder
from lgrpo.environments import Calculator, Environment, EpisodeLimits, ToolEnvironment, Turn
from lgrpo.losses.base import PolicyLogprobs
from lgrpo.recordings import ReplayEngine, RolloutRecorder
from lgrpo.recordings.recording import Recording
from lgrpo.report import read_series
from lgrpo.rewards import EnvironmentReward, WeightedSum
from lgrpo.tasks import EnvironmentTask, SortDigits, Template
from lgrpo.types import Prompt
from tests.engines.episodes import context_of, mismatch_of
from tests.environments.diaries import Talkative
from tests.helpers import MODEL, LowDigits, build, fit, largest_difference, tiny_policy

PROMPTS = [Prompt(token_ids=[3, 5, 11], text="24>", row={"question": "24"}, position=position) for position in range(3)]


STOP = list("56789")  # so that most turns are short


class OneTurn(Environment):
    """Ends at the first answer."""

    def reset(self, row):
        return None

    def step(self, text):
        return Turn(reward=1.0, done=True)


class Echo(Environment):
    """Answers each turn with the number of the turn and the first digits of the text, until the last one."""

    def __init__(self, num_turns=3):
        self.num_turns = num_turns

    def reset(self, row):
        self.turn = 0

    def step(self, text):
        self.turn += 1
        reward = sum(c in "01234" for c in text) / 6
        return Turn(f"{self.turn}{text[:1]}>", reward, done=self.turn == self.num_turns)

    def truncate(self):
        return -2.0


class Failing(Echo):
    """Fails in the second turn if the first text begins with a low digit."""

    def step(self, text):
        if self.turn == 1 and self.is_low:
            raise ZeroDivisionError("second turn")
        self.is_low = text[:1] in tuple("01234")
        return super().step(text)


def engine_of(environment, **settings):
    return EnvironmentEngine(environment, **{"limits": None} | settings)


def episodes(environment=None, max_tokens=30, seed=0, prompts=PROMPTS, num_samples=4, stop=STOP, **settings):
    """Sample episodes from a fresh policy; return them and the policy."""
    torch.manual_seed(0)
    policy = tiny_policy()
    policy.build()
    engine = engine_of(environment or Echo(), **{"max_tokens_per_turn": 6} | settings)
    engine.load_weights(policy.weights(), step=0)
    try:
        sampling = Sampling(max_tokens=max_tokens, stop=list(stop) or None)
        return engine.generate(prompts, num_samples, sampling, seed, policy.tokenizer), policy
    finally:
        engine.close()


def data_of(environment=None, reward=None, **settings):
    engine = engine_of(environment or Echo(), **{"max_tokens_per_turn": 5} | settings)
    task = SortDigits(num_digits=2, num_held_out=20, reward=reward or EnvironmentReward())
    return {"engine": engine, "task": task, "sampling": Sampling(max_tokens=16, stop=STOP)}


def test_one_turn_equals_a_run_without_an_environment():
    plain = fit(v=2, rollouts=4)
    wrapped = fit(v=2, rollouts=4, data={"engine": engine_of(OneTurn())})
    assert largest_difference(plain.weights, wrapped.weights) == 0
    for one, other in zip(plain.recorder.rollouts, wrapped.recorder.rollouts, strict=True):
        assert torch.equal(one.tokens, other.tokens)
        assert torch.equal(one.behaviour_logprobs, other.behaviour_logprobs)


def test_an_episode_has_sampled_and_observed_tokens():
    groups, policy = episodes()
    for group in groups:
        for episode in group:
            assert len(episode.turns) == len(episode.turn_rewards) <= 3
            for number, ((start, stop), (_, end)) in enumerate(zip(episode.observed, episode.turns, strict=False), 1):
                assert start == end
                text = policy.tokenizer.decode(episode.token_ids[start:stop])
                turn = episode.token_ids[episode.turns[number - 1][0] : end]
                said = completion_text(turn, STOP, policy.tokenizer)
                assert text == f"{number}{said[:1]}>"
                assert set(episode.logprobs[start:stop]) == {0.0}
    assert any(len(episode.turns) == 3 for group in groups for episode in group)


def test_engine_and_policy_agree_at_every_sampled_token():
    run = fit(v=1, rollouts=2, learning_rate=0.0, data=data_of())
    assert max(row["train/kl_behaviour"] for row in run.logged) < 1e-9
    for batch in run.recorder.rollouts:
        logprobs, _ = run.module.policy(batch.tokens, batch.completion_mask, batch.temperature)
        assert torch.allclose(logprobs, batch.behaviour_logprobs, atol=1e-5)


def test_observed_tokens_are_in_no_gradient_and_no_denominator():
    run = build(v=1, rollouts=2, data=data_of())
    run.trainer.fit(run.module, datamodule=run.data)
    batch = run.recorder.rollouts[-1]
    observed = batch.attention_mask & ~batch.completion_mask
    assert not batch.loss_mask[observed].any()
    assert batch.totals.all_tokens == sum(c.num_sampled for c in completions_of(batch, run.data.tokenizer, Sampling()))

    def gradient(batch):
        policy = run.module.policy
        policy.zero_grad()
        logprobs, entropy = policy(batch.tokens, batch.completion_mask, batch.temperature)
        logprobs.retain_grad()
        run.module.loss(batch, PolicyLogprobs(policy=logprobs, entropy=entropy)).loss.backward()
        return {name: p.grad.clone() for name, p in policy.named_parameters()}, logprobs.grad

    expected, at_tokens = gradient(batch)
    assert (at_tokens[observed] == 0).all()
    disturbed = replace(
        batch,
        advantages=torch.where(observed, 1e3, batch.advantages),
        behaviour_logprobs=torch.where(observed, -50.0, batch.behaviour_logprobs),
    )
    changed, _ = gradient(disturbed)
    assert largest_difference(expected, changed) == 0


def test_an_episode_does_not_depend_on_the_others():
    together, _ = episodes()
    for index, prompt in enumerate(PROMPTS):
        (alone,), _ = episodes(prompts=[prompt])
        assert [e.token_ids for e in alone] == [e.token_ids for e in together[index]]


def test_turns_and_siblings_have_streams_of_their_own():
    class Same(Environment):
        """All contexts of later turns are equal in length and end."""

        def reset(self, row):
            return None

        def step(self, text):
            return Turn("7>", done=False)

    groups, _ = episodes(Same(), max_turns=4, max_tokens=40)
    ends = {tuple(e.token_ids[start:stop]) for group in groups for e in group for start, stop in e.turns[1:]}
    assert len(ends) > 10


@pytest.mark.parametrize(("settings", "turns"), [({"max_turns": 2}, 2), ({"max_tokens": 9}, 3), ({"max_tokens": 3}, 1)])
def test_an_episode_that_reaches_a_limit_is_truncated(settings, turns):
    groups, _ = episodes(Echo(num_turns=9), **settings)
    cut = [episode for group in groups for episode in group if episode.finish_reason == "length"]
    assert cut
    for group in groups:
        for episode in group:
            assert len(episode.token_ids) <= settings.get("max_tokens", 30)
            assert len(episode.turns) <= turns
            assert not episode.observed or episode.observed[-1][1] < len(episode.token_ids)
            assert (episode.turn_rewards[-1] < 0) == (episode.finish_reason == "length")
            assert episode.turn_rewards[-1] >= -2


def test_a_turn_takes_all_that_is_left():
    """An episode at the limit of its tokens has all of them, unless no turn fits after an observation."""
    groups, _ = episodes(Echo(num_turns=9), max_tokens=29, max_tokens_per_turn=None, stop=())
    lengths = [len(e.token_ids) for group in groups for e in group if e.finish_reason == "length"]
    assert lengths.count(29) > len(lengths) / 2
    assert min(lengths) >= 29 - 3


def test_the_next_turns_of_all_episodes_are_one_call(monkeypatch):
    """Also if the limits of their lengths differ."""
    calls, generate = [], TransformersEngine.generate

    def counted(own, prompts, *rest):
        calls.append(prompts)
        return generate(own, prompts, *rest)

    monkeypatch.setattr(TransformersEngine, "generate", counted)
    monkeypatch.setattr(episode_sampler, "GRACE", 5.0)
    episodes(max_tokens=40)
    assert len(calls) == 3
    assert len({prompt.max_tokens for prompt in calls[1]}) > 2


def test_the_batch_gives_the_episodes_back():
    run = fit(v=1, rollouts=1, data=data_of())
    batch = run.recorder.rollouts[0]
    rewards = [sum(c.turn_rewards) for c in completions_of(batch, run.data.tokenizer, run.data.sampling)]
    assert torch.allclose(torch.tensor(rewards), batch.rewards)
    assert any(len(c.turns) > 1 for c in completions_of(batch, run.data.tokenizer, run.data.sampling))
    assert batch.metrics["rollout/turns"] > 1
    assert batch.metrics["rollout/observed_length"] > 0


def test_resume_is_exact(tmp_path):
    settings = {"v": 2, "rollouts": 6, "data": data_of(), "callbacks": [ExactResume()]}
    whole = fit(**settings)
    part = build(**settings | {"data": data_of(), "trainer": {"max_steps": 3}})
    part.trainer.fit(part.module, datamodule=part.data)
    part.trainer.save_checkpoint(tmp_path / "part.ckpt")
    rest = fit(**settings | {"data": data_of()}, ckpt_path=str(tmp_path / "part.ckpt"))
    assert largest_difference(whole.weights, rest.weights) == 0


def test_a_recorded_run_is_repeated_exactly(tmp_path):
    first = fit(v=1, rollouts=3, data=data_of(), callbacks=[RolloutRecorder(path=str(tmp_path))])
    again = fit(v=1, rollouts=3, data=data_of() | {"engine": ReplayEngine(str(tmp_path))})
    assert largest_difference(first.weights, again.weights) == 0
    batch = again.recorder.rollouts[0]
    assert torch.equal(batch.completion_mask, first.recorder.rollouts[0].completion_mask)


def test_the_fingerprint_of_an_old_recording_is_the_same(tmp_path):
    fit(v=1, rollouts=1, callbacks=[RolloutRecorder(path=str(tmp_path))])
    recording = Recording.read(str(tmp_path))
    later = ["observed", "turn_rewards", "episode_failed", "dropped", "kept_token_ids", "kept_counts", "score_notes"]
    old = recording.table.drop_columns(later).combine_chunks()
    digest = hashlib.sha256()
    for batch in old.to_batches():
        digest.update(batch.serialize())
    assert recording.fingerprint == digest.hexdigest()[:16]


def test_the_limit_of_a_prompt_is_that_of_its_episodes():
    """As ``sampling.max_tokens`` is for all: it counts observations too."""
    policy = tiny_policy()
    policy.build()
    engine = EnvironmentEngine(Echo(9), limits=None)
    engine.load_weights(policy.weights(), step=0)
    prompts = [
        Prompt(token_ids=[3, 5, 11], text="24>", row={}, position=position, max_tokens=limit)
        for position, limit in enumerate([None, 9, 2])
    ]
    groups = engine.generate(prompts, 4, Sampling(max_tokens=20, stop=STOP), 0, policy.tokenizer)
    assert [max(len(one.token_ids) for one in group) for group in groups] == [20, 9, 2]
    assert len(groups[1][0].turns) > 1
    assert {one.finish_reason for group in groups for one in group} == {"length"}


def test_a_failure_costs_its_own_episode():
    with pytest.warns(UserWarning, match=r"ZeroDivisionError: second turn"):
        run = fit(v=1, rollouts=2, data=data_of(Failing()))
    batch = run.recorder.rollouts[0]
    assert 0 < int(batch.failed.sum()) < len(batch)
    assert batch.metrics["environment/failures"] == float(batch.failed.sum())
    assert (batch.rewards[batch.failed] == 0).all()


def test_rewards_are_added_to_the_environments():
    run = fit(v=1, rollouts=1, data=data_of(OneTurn(), WeightedSum({"game": EnvironmentReward(), "low": LowDigits()})))
    assert (run.recorder.rollouts[0].rewards >= 1).all()


def test_a_slow_environment_does_not_hold_others_up():
    """The episodes are the same in whatever order the environment answers."""
    import threading
    import time

    class Slow(Echo):
        def step(self, text):
            if text[:1] in ("1", "2", "3"):
                time.sleep(0.15)
            return super().step(text)

        def __deepcopy__(self, memo):
            return Slow(self.num_turns)

    assert threading.current_thread() is threading.main_thread()
    quick, _ = episodes(Echo())
    slow, _ = episodes(Slow())
    assert [[e.token_ids for e in group] for group in slow] == [[e.token_ids for e in group] for group in quick]


def count_waits(monkeypatch):
    """Let each wait for the environment take one second of a clock that nothing else reads."""
    clock = SimpleNamespace(perf_counter=itertools.count().__next__)
    monkeypatch.setattr(episode_sampler, "time", clock)


def test_waiting_for_the_environment_is_measured(monkeypatch):
    count_waits(monkeypatch)
    policy = tiny_policy()
    policy.build()
    engine = engine_of(Echo(), max_tokens_per_turn=6)
    engine.load_weights(policy.weights(), step=0)
    sampling = Sampling(max_tokens=30, stop=STOP)
    (group,) = engine.generate(PROMPTS[:1], 1, sampling, 0, policy.tokenizer)
    assert engine.environment_seconds == len(group[0].turns)


def test_waiting_of_a_validation_is_not_in_the_metric(monkeypatch):
    count_waits(monkeypatch)
    seconds = defaultdict(list)  # by the number of prompts: 4 of a rollout, 20 of a validation
    sample = EnvironmentEngine.sample

    def counting(self, generation):
        before = self.environment_seconds
        sample(self, generation)
        seconds[len(generation.prompts)].append(self.environment_seconds - before)

    monkeypatch.setattr(EnvironmentEngine, "sample", counting)
    validating = {"limit_val_batches": 1.0, "val_check_interval": 1}
    run = fit(v=2, rollouts=3, data=data_of(), trainer=validating)
    assert [rollout.metrics["time/environment"] for rollout in run.recorder.rollouts] == seconds[4]
    assert sum(seconds[20]) > 0


class Listening(Echo):
    """Remembers what it was told."""

    heard: ClassVar[list[str]] = []

    def step(self, text):
        self.heard.append(text)
        return super().step(text)


def test_the_environment_hears_what_the_episode_has(monkeypatch):
    """Without a limit of the turns, episodes with different numbers of tokens left are sampled together."""
    lengths, generate = [], TransformersEngine.generate

    def listen(engine, prompts, num_samples, sampling, *rest):
        lengths.extend(len(p.token_ids) + min(sampling.max_tokens, p.max_tokens or 99) for p in prompts)
        return generate(engine, prompts, num_samples, sampling, *rest)

    monkeypatch.setattr(TransformersEngine, "generate", listen)
    Listening.heard = []
    groups, policy = episodes(Listening(num_turns=9), max_tokens=14, max_tokens_per_turn=None)
    said = [
        completion_text(episode.token_ids[start:stop], STOP, policy.tokenizer)
        for group in groups
        for episode in group
        for start, stop in episode.turns
    ]
    assert sorted(said) == sorted(Listening.heard)
    assert max(lengths) == 3 + 14, "an engine must not be asked for more than prompt and episode may have"


def test_few_episodes_at_a_time_are_the_same():
    expected, _ = episodes()
    for max_live in (1, 9):
        limits = EpisodeLimits(max_live=max_live, num_workers=2)
        limited, _ = episodes(limits=limits)
        assert [[e.token_ids for e in group] for group in limited] == [[e.token_ids for e in g] for g in expected]


def test_other_settings_are_reported_when_resuming(tmp_path):
    part = build(v=1, rollouts=4, data=data_of(), callbacks=[ExactResume()], trainer={"max_steps": 2})
    part.trainer.fit(part.module, datamodule=part.data)
    part.trainer.save_checkpoint(tmp_path / "part.ckpt")
    other = {"v": 1, "rollouts": 4, "data": data_of(max_turns=2), "callbacks": [ExactResume()]}
    with pytest.warns(UserWarning, match=r"max_turns.*episodes from here on end after another number of turns"):
        fit(**other, ckpt_path=str(tmp_path / "part.ckpt"))


# Messages


class Opening(OneTurn):
    """Its reset returns an observation."""

    def reset(self, row):
        return f"{row['question']}>"


def test_the_first_observation_must_be_in_the_prompt():
    task = EnvironmentTask(
        Opening(), source=SortDigits(num_digits=2, num_held_out=20, template=Template(prompt="{observation}"))
    )
    run = fit(v=1, rollouts=1, data={"task": task, "engine": engine_of(None)})
    assert run.data.engine.environment is task.environment
    other = SortDigits(num_digits=2, num_held_out=20, template=Template(prompt="{answer}"))
    with pytest.raises(EngineError, match=r"Opening.reset returned '\d\d>', which is not in the prompt '\d\d': use"):
        fit(v=1, rollouts=1, data={"task": other, "engine": engine_of(Opening())})


def test_an_environment_needs_its_engine():
    task = EnvironmentTask(OneTurn(), source=SortDigits(num_digits=2, num_held_out=20))
    with pytest.raises(ValueError, match=r"but TransformersEngine samples single turns: set data.engine to"):
        build(data={"task": task, "engine": TransformersEngine()})
    with pytest.raises(ValueError, match=r"data.engine.environment is Echo, but the task has OneTurn: leave"):
        build(data={"task": task, "engine": engine_of(Echo())})
    benchmark = Benchmark(task=EnvironmentTask(Echo(), source=SortDigits(num_digits=2, num_held_out=20)))
    with pytest.raises(ValueError, match=r"benchmark 'echo' and data.task have different environments"):
        build(data={"task": task, "engine": engine_of(None), "benchmarks": {"echo": benchmark}})
    with pytest.raises(EngineError, match=r"needs an environment: set data\.engine\.environment"):
        fit(rollouts=1, data={"engine": engine_of(None)})
    with pytest.raises(ValueError, match=r"OneTurn does not generate rows: set data.task.source"):
        EnvironmentTask(OneTurn())


def test_the_config_of_a_game_trains(tmp_path):
    """With the environment in worker processes."""
    run = tmp_path / "run"
    arguments = ["--data.num_rollouts=2", "--trainer.max_epochs=1", "--trainer.enable_progress_bar=false"]
    main(["fit", "--config=configs/guess_number.yaml", f"--run={run}", "--data.evaluation.num_samples=2", *arguments])
    series = read_series(run)
    assert len(series["rollout/turns"]) == 2
    assert {value for _, value in series["environment/failures"]} == {0.0}
    completions = [json.loads(line) for line in (run / "completions.jsonl").read_text().splitlines()]
    assert any("Higher." in row["completion"] or "Lower." in row["completion"] for row in completions)
    assert {row["prompt"] for row in completions} == {"5."}


# Chats

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_THOUGHTS = CHATML.replace("{{ m.content }}", "{{ m.content if loop.last else m.content.split('</think>\n\n')[-1] }}")
CHANGING = CHATML.replace("{{ m.content }}", "{{ m.content if loop.last else m.content | upper }}")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A tokenizer of characters with the special tokens of ChatML."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    vocabulary = {c: i for i, c in enumerate(["<pad>", "<|im_start|>", "<|im_end|>", *characters])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    folder = tmp_path_factory.mktemp("tokenizer")
    made.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_an_observation_is_the_difference_it_makes(tokenizer):
    tokenizer.chat_template = CHATML
    encoder = ObservationEncoder(tokenizer, {})
    expected = "\n<|im_start|>user\nHigher.<|im_end|>\n<|im_start|>assistant\n"
    after_end = encoder("Higher.", tokenizer.eos_token_id)
    assert tokenizer.decode(after_end).replace(" ", "") == expected.replace(" ", "")
    after_stop = encoder("Higher.", tokenizer.convert_tokens_to_ids("x"))
    assert after_stop == [tokenizer.eos_token_id, *after_end]
    tool = encoder([{"role": "tool", "content": "4"}], tokenizer.eos_token_id)
    assert tool == tokenizer("\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n").input_ids


def test_dropped_messages_are_replaced_in_a_chat(tokenizer, tmp_path):
    """Each by a message of its role, in the contexts of the engine and in those that training reads."""

    class Tools(Talkative):
        def step(self, text):
            turn = super().step(text)
            messages = [{"role": "tool", "content": turn.observation}, {"role": "user", "content": "Go on to the end."}]
            return turn._replace(observation=messages)

    tokenizer.chat_template = CHATML
    torch.manual_seed(0)
    policy = tiny_policy(
        config=MODEL | {"max_position_embeddings": 512}, characters=None, tokenizer=tokenizer.name_or_path
    )
    policy.build()
    engine = engine_of(Tools(tmp_path), max_tokens_per_turn=16, max_contexts=2)
    engine.load_weights(policy.weights(), step=0)
    prompts = [Prompt(token_ids=tokenizer("12").input_ids, text="12", row={}, position=0, chat={})]
    ((episode,),) = engine.generate(
        prompts, 1, Sampling(max_tokens=300, stop=list("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ")), 0, tokenizer
    )
    assert mismatch_of({0: policy}, prompts[0], episode) < 1e-5
    shown = tokenizer.decode(context_of(prompts[0], episode, episode.dropped[0].turn)).replace(" ", "")
    replacement = "".join(f"\n<|im_start|>{role}\n...<|im_end|>" for role in ("tool", "user"))
    assert shown.count(f"{replacement}\n<|im_start|>assistant\n") == len(episode.dropped) > 0
    assert shown.count("2345>") == 1


def test_templates_that_change_earlier_turns(tokenizer):
    tokenizer.chat_template = CHANGING
    with pytest.raises(ValueError, match=r"differently when an observation follows: .lgrpo.*' becomes 'LGRPO"):
        ObservationEncoder(tokenizer, {}).check()
    tokenizer.chat_template = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}")
    ObservationEncoder(tokenizer, {}).check()  # shows what a user says
    with pytest.raises(ValueError, match=r"does not show messages of the role tool"):
        ObservationEncoder(tokenizer, {"tools": [{}]}).check()
    tokenizer.chat_template = NO_THOUGHTS
    with pytest.warns(UserWarning, match=r"drops the thoughts of earlier turns"):
        ObservationEncoder(tokenizer, {}).check()
    tokenizer.chat_template = CHATML
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ObservationEncoder(tokenizer, {}).check()
    with pytest.raises(ValueError, match=r"which needs a chat: set template.chat"):
        ObservationEncoder(tokenizer, None)([{"role": "tool", "content": "4"}], 5)


def test_prompts_offer_the_tools(tokenizer):
    tokenizer.chat_template = "{% for t in tools %}{{ t.function.name }};{% endfor %}" + CHATML
    engine = engine_of(ToolEnvironment(Calculator()))
    template = Template(prompt="{question}", chat=True)
    text, _ = template.render({"question": "1+1"}, tokenizer, tools=engine.tool_schemas())
    assert text.startswith("calculate;") or ";" in text.split("<|im_start|>")[0]
    with pytest.raises(ValueError, match=r"tools are shown by the chat template: set template.chat"):
        Template(prompt="{question}").render({"question": "1+1"}, tokenizer, tools=engine.tool_schemas())
