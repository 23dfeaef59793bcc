"""Check LoRA: only adapters are trained and saved, and the reference is one of them."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lgrpo import ClippedLoss, LoRA, ReferenceRefresh, RolloutCallback
from lgrpo.callbacks import ExactResume
from lgrpo.commands.hf_folder import write_model_folder
from lgrpo.policy import make_reference
from lgrpo.run.resume import ResumeError
from tests.helpers import a_batch, build, fit, largest_difference, tiny_policy

LAYERS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def adapted(**settings):
    torch.manual_seed(0)
    policy = tiny_policy(**{"lora": LoRA(rank=4, alpha=8.0)} | settings)
    policy.build()
    return policy


def perturb(policy, scale=0.1):
    with torch.no_grad():
        for p in policy.parameters():
            if p.requires_grad:
                p.add_(scale * torch.randn_like(p))


def logprobs(policy, batch):
    return policy(batch.tokens, batch.completion_mask, 1.0)[0]


@pytest.fixture
def base(tmp_path):
    """Return the folder of a saved model."""
    torch.manual_seed(0)
    policy = tiny_policy()
    policy.build()
    write_model_folder(policy, tmp_path / "base", None)
    return tmp_path / "base"


class TestPolicy:
    def test_only_adapters_are_trained(self):
        policy = adapted()
        trained = {name for name, p in policy.named_parameters() if p.requires_grad}
        assert {name.split(".lora_")[0].rpartition(".")[2] for name in trained} == LAYERS
        assert all(".lora_" in name for name in trained)
        logprobs(policy, a_batch()).sum().backward()
        assert {name for name, p in policy.named_parameters() if p.grad is not None} == trained

    def test_a_new_adapter_does_not_change_the_policy(self):
        torch.manual_seed(0)
        plain = tiny_policy()
        plain.build()
        assert torch.equal(logprobs(plain, a_batch()), logprobs(adapted(), a_batch()))

    @pytest.mark.parametrize("attention", ["packed", "sdpa"])
    def test_merged_weights_are_the_same_policy(self, attention):
        policy, plain = adapted(attention=attention), tiny_policy(attention=attention)
        perturb(policy)
        plain.build()
        plain.model.load_state_dict(dict(policy.weights()))
        difference = (logprobs(plain, a_batch()) - logprobs(policy, a_batch())).abs().max()
        assert difference < 1e-5
        perturb(policy)
        assert (logprobs(plain, a_batch()) - logprobs(policy, a_batch())).abs().max() > 1e-2

    def test_chosen_layers(self):
        policy = adapted(lora=LoRA(rank=2, modules=["q_proj", "down_proj"]))
        names = {name.rpartition(".lora_")[0].rpartition(".")[2] for name, _ in policy.weights().adapter.tensors()}
        assert names == {"q_proj", "down_proj"}

    def test_adapters_are_float32_on_a_bfloat16_model(self):
        policy = adapted(dtype="bfloat16")
        assert {p.dtype for p in policy.parameters() if p.requires_grad} == {torch.float32}
        assert {p.dtype for p in policy.parameters() if not p.requires_grad} == {torch.bfloat16}

    def test_a_layer_that_does_not_exist(self):
        with pytest.raises(
            ValueError, match=r"names query: the linear layers of Qwen2ForCausalLM are down_proj, gate_"
        ):
            adapted(lora=LoRA(modules=["q_proj", "query"]))

    @pytest.mark.parametrize(
        ("settings", "message"),
        [({"rank": 0}, "rank is 0"), ({"alpha": 0.0}, "alpha is 0"), ({"modules": []}, "empty list")],
    )
    def test_wrong_settings(self, settings, message):
        with pytest.raises(ValueError, match=message):
            LoRA(**settings)


class TestReference:
    def test_it_is_frozen(self):
        policy = adapted()
        perturb(policy)
        reference, batch = make_reference(policy), a_batch()
        before = logprobs(policy, batch)
        assert torch.equal(logprobs(reference, batch), before)
        perturb(policy)
        assert torch.equal(logprobs(reference, batch), before)
        assert not torch.equal(logprobs(policy, batch), before)
        assert dict(reference.weights()).keys() == dict(policy.weights()).keys()
        reference.update_from(policy, 0.0)
        assert torch.equal(logprobs(reference, batch), logprobs(policy, batch))

    def test_a_pass_in_the_middle_of_a_step(self):
        """A pass of the reference between forward and backward does not change the gradient."""
        gradients = []
        for has_pass in (False, True):
            policy = adapted()
            perturb(policy)
            reference, batch = make_reference(policy), a_batch()
            loss = logprobs(policy, batch).sum()
            if has_pass:
                with torch.no_grad():
                    logprobs(reference, batch)
            loss.backward()
            gradients.append({name: p.grad for name, p in policy.named_parameters() if p.grad is not None})
        assert largest_difference(*gradients) == 0

    def test_it_adds_only_an_adapter(self):
        policy = adapted()
        before = sum(p.numel() for p in policy.parameters())
        own = sum(p.numel() for p in policy.parameters() if p.requires_grad)
        make_reference(policy)
        assert sum(p.numel() for p in policy.parameters()) == before + own

    def test_a_mean_of_adapters_is_refused(self):
        with pytest.raises(ValueError, match=r"decay is 0\.5: the mean of two adapters"):
            fit(
                policy=tiny_policy(lora=LoRA()),
                loss=ClippedLoss(kl_coef=0.1),
                callbacks=[ReferenceRefresh(period=1, decay=0.5)],
            )


class CompareWeights(RolloutCallback):
    """Checks that the engine holds the policy's merged weights at lag 0."""

    def __init__(self):
        self.checked = 0

    def on_rollout_end(self, trainer, pl_module, batch):
        held = trainer.datamodule.engine.held_weights()
        assert largest_difference(held, dict(pl_module.policy_weights())) == 0
        self.checked += 1


class TestRuns:
    def settings(self, folder, base, save=False, **others):
        callbacks = [ReferenceRefresh(period=2), ExactResume()]
        if save:
            callbacks.append(ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1))
        own = {
            "v": 3,
            "i": 2,
            "rollouts": 4,
            "loss": ClippedLoss(kl_coef=0.1),
            "optimizer": torch.optim.AdamW,
            "policy": tiny_policy(config=None, characters=None, name=str(base), lora=LoRA(rank=4)),
            "callbacks": callbacks,
            "trainer": {"enable_checkpointing": save, "default_root_dir": str(folder)},
        }
        return own | others

    def test_resume_from_every_step(self, tmp_path, base):
        """A resumed run ends with identical bits, and base weights are neither trained nor saved."""
        straight = fit(**self.settings(tmp_path, base, save=True))
        frozen = {n: p for n, p in straight.weights.items() if ".lora_" not in n}
        begun = build(**self.settings(tmp_path, base))
        assert largest_difference({n: begun.weights[n] for n in frozen}, frozen) == 0
        assert (
            largest_difference(
                {n: begun.weights[n] for n in begun.weights if ".policy." in n and "lora_B" in n},
                {n: p for n, p in straight.weights.items() if ".policy." in n and "lora_B" in n},
            )
            > 1e-3
        )
        for step in (1, 4, 5):
            path = tmp_path / f"step={step}.ckpt"
            saved = torch.load(path, weights_only=True)["state_dict"]
            assert saved
            assert all(".lora_" in name for name in saved)
            resumed = fit(**self.settings(tmp_path, base), ckpt_path=path)
            assert largest_difference(resumed.weights, straight.weights) == 0

    def test_resume_with_another_base_model(self, tmp_path, base):
        fit(**self.settings(tmp_path, base, save=True, rollouts=1))
        other = tiny_policy()
        torch.manual_seed(7)
        other.build()
        write_model_folder(other, tmp_path / "other", None)
        with pytest.raises(ResumeError, match="the adapters in the checkpoint belong to another model"):
            fit(**self.settings(tmp_path, tmp_path / "other"), ckpt_path=tmp_path / "step=1.ckpt")

    def test_resume_with_another_rank(self, tmp_path, base):
        fit(**self.settings(tmp_path, base, save=True, rollouts=1))
        policy = tiny_policy(config=None, characters=None, name=str(base), lora=LoRA(rank=2))
        with pytest.raises(ResumeError, match="the adapters in the checkpoint have different shapes"):
            fit(**self.settings(tmp_path, base, policy=policy), ckpt_path=tmp_path / "step=1.ckpt")

    def test_the_engine_samples_with_the_merged_weights(self, tmp_path, base):
        compare = CompareWeights()
        settings = self.settings(tmp_path, base, v=1)
        run = fit(**settings | {"callbacks": [*settings["callbacks"], compare], "i": 1})
        assert compare.checked == 4
        assert all(row["train/engine_mismatch_max"] < 1e-4 for row in run.logged)
