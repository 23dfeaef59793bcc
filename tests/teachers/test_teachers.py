"""Distillation: exact divergences, no gradient from a teacher that equals the policy, templates, resume, messages."""

from __future__ import annotations

import itertools

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn.functional import kl_div, log_softmax

from lgrpo import Sampling, ZeroVarianceMask
from lgrpo.callbacks import ExactResume
from lgrpo.functional import TeacherDivergence, TopLogprobs
from lgrpo.losses import ComposedLoss, EntropyBonus, MinClip, TeacherKL
from lgrpo.tasks.template import Template
from lgrpo.teachers import FrozenTeacher
from tests.helpers import MODEL, fit, largest_difference, tiny_policy


def save(policy, folder):
    policy.build()
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Return the folder of a model with other weights than the policies of the tests."""
    torch.manual_seed(11)
    policy = tiny_policy()
    policy.build()
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return save(policy, tmp_path_factory.mktemp("teacher"))


def distil(name, rewards=False, **settings):
    kl = TeacherKL(FrozenTeacher(name, dtype="float32"), **{"top_k": None} | settings)
    return ComposedLoss(gate=MinClip(), regularisers=[kl], scale=1.0 if rewards else 0.0)


def direct(kl, logits):
    return kl.of(logits, *kl.teacher.tensors())


class TestDivergence:
    @pytest.mark.parametrize("temperature", [1.0, 1.7])
    @pytest.mark.parametrize("direction", ["forward", "reverse"])
    def test_of_all_tokens(self, direction, temperature):
        policy, teacher = torch.randn(2, 50, 23).unbind()
        kl = TeacherDivergence(
            teacher=TopLogprobs.of(teacher, None, temperature), direction=direction, temperature=temperature
        )
        p, q = log_softmax(policy / temperature, -1), log_softmax(teacher / temperature, -1)
        expected = kl_div(p, q, reduction="none", log_target=True) if direction == "forward" else None
        expected = kl_div(q, p, reduction="none", log_target=True) if expected is None else expected
        torch.testing.assert_close(direct(kl, policy), expected.sum(-1))

    @pytest.mark.parametrize("direction", ["forward", "reverse"])
    def test_fewer_tokens_give_less(self, direction):
        policy, teacher = torch.randn(2, 50, 23).unbind()
        found = [
            direct(
                TeacherDivergence(teacher=TopLogprobs.of(teacher, k, 1.0), direction=direction, temperature=1.0), policy
            )
            for k in (1, 2, 5, 22, 23)
        ]
        assert (found[0] > -1e-6).all()
        for fewer, more in itertools.pairwise(found):
            assert (fewer <= more + 1e-5).all()
        torch.testing.assert_close(found[-2], found[-1])

    @pytest.mark.parametrize("direction", ["forward", "reverse"])
    def test_tokens_that_a_teacher_never_samples(self, direction):
        teacher = torch.randn(9, 7).index_fill(1, torch.tensor([2, 3]), -torch.inf)
        for top_k in (3, 6, None):
            policy = torch.randn(9, 7, requires_grad=True)
            kl = TeacherDivergence(teacher=TopLogprobs.of(teacher, top_k, 1.0), direction=direction, temperature=1.0)
            direct(kl, policy).sum().backward()
            assert policy.grad.isfinite().all()


def test_chunks_change_nothing(teacher):
    torch.manual_seed(0)
    policy = tiny_policy()
    policy.build()
    tokens = torch.randint(2, 13, (3, 9))
    mask = torch.arange(9).expand(3, 9) >= torch.tensor([[3], [2], [4]])
    frozen = FrozenTeacher(teacher, dtype="float32", chunk_size=4)
    frozen.start(policy.tokenizer, 3, 1.0)
    whole = FrozenTeacher(teacher, dtype="float32")
    whole.start(policy.tokenizer, 3, 1.0)
    top = frozen.top_logprobs(tokens, mask, 3, 1.0, policy.num_logits)
    for a, b in zip(top.tensors(), whole.top_logprobs(tokens, mask, 3, 1.0, policy.num_logits).tensors(), strict=True):
        torch.testing.assert_close(a, b)
    kl = TeacherDivergence(teacher=top, direction="reverse", temperature=1.0)
    results = []
    for policy.chunk_size in (1024, 4):
        policy.zero_grad()
        *_, found = policy(tokens, mask, 1.0, False, kl)
        found.sum().backward()
        results.append((found.detach(), {name: p.grad.clone() for name, p in policy.named_parameters()}))
    assert (results[0][0][~mask] == 0).all()
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize(("direction", "top_k"), [("forward", None), ("reverse", None), ("forward", 3), ("reverse", 3)])
def test_a_teacher_that_equals_the_policy_has_no_gradient(direction, top_k, tmp_path):
    torch.manual_seed(0)
    policy = tiny_policy()
    name = save(policy, tmp_path / "same")
    run = fit(rollouts=1, policy=policy, loss=distil(name, direction=direction, top_k=top_k))
    assert max(float(g.abs().max()) for g in run.recorder.gradients[0].values()) < 1e-6
    assert abs(run.logged[0]["train/kl_teacher"]) < 1e-6


def test_the_gradient_is_that_of_the_divergence(teacher):
    """With temperature 1.7 in the divergence and 1.3 in sampling, and the mean over all sampled tokens."""
    run = fit(
        rollouts=1,
        learning_rate=0.0,
        loss=distil(teacher, coef=0.5, temperature=1.7, direction="forward"),
        data={"sampling": Sampling(max_tokens=6, temperature=1.3)},
        trainer={"accumulate_grad_batches": 2},
    )
    batch, policy = run.recorder.rollouts[0], run.module.policy
    other = tiny_policy(config=None, characters=None, name=teacher)
    other.build()
    p, q = (log_softmax(each.model(batch.tokens).logits / 1.7, -1)[:, :-1] for each in (policy, other))
    kl = kl_div(p, q.detach(), reduction="none", log_target=True).sum(-1)[batch.completion_mask[:, 1:]]
    policy.zero_grad()
    (0.5 * kl.mean()).backward()
    expected = {name: p.grad for name, p in policy.named_parameters()}
    assert largest_difference(run.recorder.gradients[0], expected) < 1e-6
    assert run.logged[0]["train/kl_teacher"] == pytest.approx(kl.mean().item(), rel=1e-5)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("v", [1, 4])
def test_the_policy_approaches_its_teacher(direction, v, teacher):
    run = fit(
        rollouts=24, v=v, loss=distil(teacher, direction=direction), learning_rate=0.02, optimizer=torch.optim.Adam
    )
    assert run.recorder.lags[:4] == list(range(v)) * (4 // v)
    assert run.logged[-1]["train/kl_teacher"] < 0.5 * run.logged[0]["train/kl_teacher"]


def test_rewards_and_a_teacher_add_up(teacher):
    """The gradient with both is the sum of the gradients with each."""
    settings = {"rollouts": 1, "learning_rate": 0.0}
    both = fit(loss=distil(teacher, rewards=True), **settings).recorder.gradients[0]
    alone = fit(loss=distil(teacher), **settings).recorder.gradients[0]
    rewards = fit(loss=ComposedLoss(gate=MinClip()), **settings).recorder.gradients[0]
    assert largest_difference(both, {name: alone[name] + rewards[name] for name in alone}) < 1e-6
    assert largest_difference(both, alone) > 1e-4


def test_a_rollout_is_read_once(teacher, monkeypatch):
    calls, read = [], FrozenTeacher.top_logprobs
    monkeypatch.setattr(FrozenTeacher, "top_logprobs", lambda *args: (calls.append(len(args[1])), read(*args))[1])
    fit(rollouts=2, i=3, loss=distil(teacher), trainer={"accumulate_grad_batches": 2})
    assert sum(calls) == 2 * 16, "each completion once, not in each of three passes"


class TestTemplate:
    template = Template(prompt="{solution}>{question}>")

    def test_the_teacher_reads_its_own_prompt(self, teacher):
        run = fit(rollouts=1, learning_rate=0.0, loss=distil(teacher, teacher_template=self.template))
        batch, policy = run.recorder.rollouts[0], run.module.policy
        other = tiny_policy(config=None, characters=None, name=teacher)
        other.build()
        found = []
        for row in range(len(batch)):
            at, length = batch.columns(row).start, int(batch.lengths[row])
            prompt = run.data.train_prompts.at(int(batch.positions[row]))
            own = policy.tokenizer(f"{prompt.row['solution']}>{prompt.row['question']}>").input_ids
            completion = batch.tokens[row, at:length].tolist()
            given = other.model(torch.tensor([own + completion])).logits[0, len(own) - 1 : -1]
            p = log_softmax(policy.model(batch.tokens[row : row + 1, :length]).logits[0, at - 1 : -1], -1)
            found.append((p.exp() * (p - log_softmax(given, -1))).sum(-1))
        assert run.logged[0]["train/kl_teacher"] == pytest.approx(torch.cat(found).mean().item(), rel=1e-5)

    def test_a_field_that_rows_do_not_have(self, teacher):
        with pytest.raises(ValueError, match=r"teacher_template reads \['hint'\], but the rows have only \['answer'"):
            fit(rollouts=1, loss=distil(teacher, teacher_template=Template(prompt="{hint}{question}")))


def test_a_resumed_run(teacher, tmp_path):
    def settings(**more):
        callbacks = [ExactResume(), *more.pop("callbacks", [])]
        return {"v": 2, "i": 2, "rollouts": 4, "loss": distil(teacher, top_k=5), "callbacks": callbacks, **more}

    saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    straight = fit(**settings(callbacks=[saving], trainer={"enable_checkpointing": True}))
    for step in (1, 4):  # in the middle of a rollout, and between two
        again = fit(**settings(), ckpt_path=str(tmp_path / f"step={step}.ckpt"))
        assert largest_difference(straight.weights, again.weights) == 0
    state = torch.load(tmp_path / "step=4.ckpt", weights_only=False)
    assert len(state["state_dict"]) == len(straight.module.policy.state_dict()), "without the teacher's weights"
    changed = settings() | {"loss": distil(teacher, top_k=4)}
    with pytest.warns(UserWarning, match="steps from here on minimise another loss"):
        fit(**changed, ckpt_path=str(tmp_path / "step=4.ckpt"))


class TestRejected:
    def test_another_vocabulary(self, tmp_path):
        name = save(tiny_policy(characters="abcdefghijk"), tmp_path / "other")
        with pytest.raises(ValueError, match=r"another vocabulary than the policy \(13 and 13 tokens\)"):
            fit(rollouts=1, loss=distil(name))

    def test_a_short_context(self, tmp_path):
        name = save(tiny_policy(config=MODEL | {"max_position_embeddings": 5}), tmp_path / "short")
        with pytest.raises(ValueError, match=r"has up to 9 tokens, but the teacher .*short can read only 5"):
            fit(rollouts=1, loss=distil(name))

    def test_no_such_model(self):
        with pytest.raises(FileNotFoundError, match="there is no such folder"):
            fit(rollouts=1, loss=distil("./nowhere"))

    def test_settings(self, teacher):
        with pytest.raises(ValueError, match="TeacherKL's direction is 'backward'; it must be one of forward, reverse"):
            distil(teacher, direction="backward")
        with pytest.raises(ValueError, match="TeacherKL's top_k is 0"):
            distil(teacher, top_k=0)
        with pytest.raises(ValueError, match="TeacherKL's temperature is 0"):
            distil(teacher, temperature=0.0)
        one = TeacherKL(FrozenTeacher(teacher))
        with pytest.raises(ValueError, match="at most one TeacherKL"):
            ComposedLoss(regularisers=[one, EntropyBonus(), one])
        with pytest.raises(ValueError, match=r"scale is 0.*nothing else to train on"):
            ComposedLoss(scale=0.0)

    def test_the_mask_of_groups_with_equal_rewards(self, teacher):
        with pytest.raises(ValueError, match="set zero_variance_mask: null"):
            fit(rollouts=1, loss=distil(teacher), callbacks=[ZeroVarianceMask()])
