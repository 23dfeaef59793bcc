"""The engine on transformers."""

from __future__ import annotations

from itertools import chain

import pytest
import torch

from lgrpo import Prompt, Sampling, TransformersEngine
from lgrpo.engines import NoWeightsError, WeightSyncError
from lgrpo.engines.completions import Generation
from lgrpo.engines.transformers import draw, log_distribution
from lgrpo.weights import PolicyWeights
from tests.engines.episodes import check_limits
from tests.engines.kept import check_kept
from tests.engines.partial import SAMPLING, TRUNCATED, check_continued
from tests.helpers import tiny_policy


@pytest.fixture
def engine(policy):
    engine = TransformersEngine()
    engine.load_weights(policy.weights(), step=3)
    return engine


def prompts(policy, *texts):
    return [
        Prompt(text=t, token_ids=policy.tokenizer(t).input_ids, row={}, position=10 + i) for i, t in enumerate(texts)
    ]


TEXTS = ("12>", "3456789>", "0>", "98>")


def as_ids(groups):
    return [[c.token_ids for c in group] for group in groups]


def test_logprobs_are_the_policys(policy, engine):
    for temperature in (0.5, 1.0, 1.7):
        questions = prompts(policy, *TEXTS)
        groups = engine.generate(questions, 5, Sampling(temperature=temperature, max_tokens=12), 0, policy.tokenizer)
        for prompt, group in zip(questions, groups, strict=True):
            assert len(group) == 5
            for c in group:
                tokens = torch.tensor([prompt.token_ids + c.token_ids])
                mask = torch.arange(tokens.shape[1])[None] >= len(prompt.token_ids)
                expected, _ = policy(tokens, mask, temperature)
                assert torch.allclose(expected[mask], torch.tensor(c.logprobs), atol=1e-5)
                assert c.behaviour_step == 3
                ended = c.token_ids[-1] == policy.tokenizer.eos_token_id
                assert c.finish_reason == ("stop" if ended else "length")
                assert ended or len(c.token_ids) == 12


def test_limits_of_prompts(policy, engine):
    check_limits(policy, engine, prompts(policy, *TEXTS))


def test_samples_do_not_depend_on_batch_or_order(policy, engine):
    sampling, questions = Sampling(max_tokens=10), prompts(policy, *TEXTS)
    together = as_ids(engine.generate(questions, 4, sampling, 7, policy.tokenizer))
    backwards = as_ids(engine.generate(questions[::-1], 4, sampling, 7, policy.tokenizer))[::-1]
    alone = [as_ids(engine.generate([q], 4, sampling, 7, policy.tokenizer))[0] for q in questions]
    fewer = as_ids(engine.generate(questions, 2, sampling, 7, policy.tokenizer))
    engine.max_sequences = 3
    in_parts = as_ids(engine.generate(questions, 4, sampling, 7, policy.tokenizer))
    assert together == backwards == alone == in_parts
    assert [group[:2] for group in together] == fewer
    assert together != as_ids(engine.generate(questions, 4, sampling, 8, policy.tokenizer))
    assert len({tuple(ids) for ids in together[1]}) > 1, "siblings draw from different streams"


def test_copies_of_a_prompt_draw_from_different_streams(policy, engine):
    """A prompt's position in the run is part of the key of its stream: a second epoch samples other completions."""
    first, second = engine.generate(prompts(policy, "12>", "12>"), 4, Sampling(max_tokens=10), 7, policy.tokenizer)
    assert as_ids([first]) != as_ids([second])


def test_samples_follow_the_distribution(policy, engine):
    (group,) = engine.generate(prompts(policy, "5>"), 4000, Sampling(max_tokens=1), 0, policy.tokenizer)
    counts = torch.bincount(torch.tensor([c.token_ids[0] for c in group]), minlength=13) / 4000
    logits = policy.model(input_ids=torch.tensor([policy.tokenizer("5>").input_ids])).logits[0, -1].detach()
    assert float((counts - logits.softmax(-1)).abs().max()) < 0.03


def test_truncation_keeps_the_likeliest_and_renormalises():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).repeat(1000, 1)
    uniform = torch.linspace(0, 0.9999, 1000).double()

    def kept(**settings):
        tokens, logprobs = draw(log_distribution(logits, Sampling(**settings)), uniform)
        chances = dict(zip(tokens.tolist(), logprobs.exp().tolist(), strict=True))
        return {token: round(chance, 3) for token, chance in sorted(chances.items())}

    assert kept() == {0: 0.5, 1: 0.3, 2: 0.15, 3: 0.05}
    assert kept(top_k=2) == {0: 0.625, 1: 0.375}
    assert kept(top_p=0.7) == {0: 0.625, 1: 0.375}
    assert kept(top_p=0.8) == {0: 0.625, 1: 0.375}
    assert kept(top_p=0.81) == {0: 0.526, 1: 0.316, 2: 0.158}
    assert kept(top_k=3, top_p=0.5) == {0: 1.0}
    assert kept(top_p=1e-9) == {0: 1.0}
    assert kept(min_p=0.35) == {0: 0.625, 1: 0.375}


def test_impossible_token_is_never_drawn():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).repeat(3, 1)
    uniform = torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)
    tokens, _ = draw(log_distribution(logits, Sampling()), uniform)
    assert tokens.tolist() == [1, 3, 3]


def test_stop_strings_end_the_text_but_keep_their_tokens(policy, engine):
    plain = engine.generate(prompts(policy, *TEXTS), 8, Sampling(max_tokens=20), 0, policy.tokenizer)
    stopped = engine.generate(
        prompts(policy, *TEXTS), 8, Sampling(max_tokens=20, stop=["7", "31"]), 0, policy.tokenizer
    )
    num_cut = 0
    for a, b in zip(chain(*plain), chain(*stopped), strict=True):
        assert a.token_ids[: len(b.token_ids)] == b.token_ids
        assert "7" not in b.text
        assert "31" not in b.text
        if len(b.token_ids) < len(a.token_ids):
            num_cut += 1
            assert b.finish_reason == "stop"
            decoded = policy.tokenizer.decode(b.token_ids)
            assert decoded.endswith(("7", "31"))
            assert len(b.logprobs) == len(b.token_ids)
    assert num_cut > 5


def test_engine_holds_a_copy(policy, engine):
    before = as_ids(engine.generate(prompts(policy, *TEXTS), 4, Sampling(max_tokens=8), 0, policy.tokenizer))
    saved = [p.detach().clone() for p in policy.parameters()]
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.5 * torch.randn_like(p))
    lagging = as_ids(engine.generate(prompts(policy, *TEXTS), 4, Sampling(max_tokens=8), 0, policy.tokenizer))
    with engine.holding(policy.weights(), step=9):
        assert engine.state.step == 9
        current = as_ids(engine.generate(prompts(policy, *TEXTS), 4, Sampling(max_tokens=8), 0, policy.tokenizer))
    restored = as_ids(engine.generate(prompts(policy, *TEXTS), 4, Sampling(max_tokens=8), 0, policy.tokenizer))
    with torch.no_grad():
        for p, old in zip(policy.parameters(), saved, strict=True):
            p.copy_(old)
    assert before == lagging == restored
    assert current != before
    assert engine.state.step == 3


def test_policys_attention_is_unchanged(policy, engine):
    assert policy.model.config._attn_implementation == "lgrpo_packed"


def test_no_weights_before_the_first_load(policy):
    engine = TransformersEngine()
    assert engine.state.step is None
    with pytest.raises(NoWeightsError, match="WeightSync"):
        engine.generate(prompts(policy, "1>"), 2, Sampling(), 0, policy.tokenizer)
    with engine.holding(policy.weights(), step=0):
        assert engine.state.step == 0
    assert engine.state.step is None
    with pytest.raises(NoWeightsError):
        engine.generate(prompts(policy, "1>"), 2, Sampling(), 0, policy.tokenizer)


def test_state_survives_a_checkpoint(policy, engine, tmp_path):
    torch.save(engine.state_dict(), tmp_path / "engine.pt")
    other = TransformersEngine()
    other.load_state_dict(torch.load(tmp_path / "engine.pt", weights_only=True))
    assert other.state.step == 3
    a = engine.generate(prompts(policy, *TEXTS), 4, Sampling(max_tokens=8), 0, policy.tokenizer)
    b = other.generate(prompts(policy, *TEXTS), 4, Sampling(max_tokens=8), 0, policy.tokenizer)
    assert a == b


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_weights_are_rejected(policy, engine, value):
    weights = dict(policy.weights())
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], value)
    with pytest.raises(WeightSyncError, match=r"the policy's model\.norm\.weight is not finite"):
        engine.load_weights(PolicyWeights.of(policy.model.config, weights), step=4)
    assert engine.state.step is None, "unverified weights are not sampled from"
    assert [record.step for record in engine.state.ledger] == [3]


def test_different_model_is_rejected(engine):
    other = tiny_policy(config={**dict(tiny_policy().settings), "num_hidden_layers": 2})
    other.build()
    with pytest.raises(WeightSyncError, match=r"differ in their tensors: \['model\.layers\.1"):
        engine.load_weights(other.weights(), step=4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"stop": ["x", ""]}, "empty string"),
    ],
)
def test_bad_sampling(settings, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**settings)


@pytest.mark.parametrize("sampling", [SAMPLING, TRUNCATED])
@pytest.mark.parametrize("max_sequences", [512, 6])
def test_continued_completions(policy, engine, max_sequences, sampling):
    engine.max_sequences = max_sequences
    check_continued(engine, policy, prompts(policy, *TEXTS, "1>", "23>"), tolerance=1e-5, sampling=sampling)


def test_kept_tokens(policy, engine):
    check_kept(policy, engine, prompts(policy, *TEXTS), tolerance=1e-5)


def test_stop_strings_across_a_continuation(policy, engine):
    """A stop string that began before the completion was left ends it."""
    questions, sampling = prompts(policy, *TEXTS), Sampling(max_tokens=20)
    text = engine.generate(questions[:1], 4, sampling, 7, policy.tokenizer)[0][0].text
    sampling = Sampling(max_tokens=20, stop=[text[3:6]])
    whole = engine.generate(questions[:1], 4, sampling, 7, policy.tokenizer)
    begun, tokenizer = {}, policy.tokenizer
    for _ in range(25):  # one token at a time
        part = Generation(questions[:1], 4, sampling, 7, tokenizer, None, *engine.require_weights())
        part.begun, part.is_partial = begun, True
        count = iter(range(2))
        engine.on_step = lambda part=part, count=count: setattr(part, "is_stopped", next(count) > 0)
        engine.generate_part(part)
        if part.groups:
            break
        begun = part.unfinished
    engine.on_step = None
    assert as_ids([part.groups[0]]) == as_ids(whole)
    assert [c.text for c in part.groups[0]] == [c.text for c in whole[0]]
    assert whole[0][0].finish_reason == "stop"
