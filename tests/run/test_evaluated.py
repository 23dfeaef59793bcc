"""Check that a checkpoint is evaluated, exported and resumed only with the policy settings it was trained with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tokenizers import normalizers

from lgrpo import LoRA
from lgrpo.cli import main
from tests.helpers import MODEL, build, fit, tiny_policy

TINY = Path(__file__).parents[2] / "configs" / "tiny.yaml"
SMALL = [
    "--data.num_rollouts=1",
    "--trainer.max_epochs=1",
    "--data.evaluation.num_problems=8",
    "--data.evaluation.num_samples=2",
    "--trainer.num_sanity_val_steps=0",
    "--trainer.enable_progress_bar=false",
]


def train(folder, **policy):
    checkpoint = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    fit(rollouts=1, policy=tiny_policy(**policy), callbacks=[checkpoint], trainer={"enable_checkpointing": True})
    return folder / "step=1.ckpt"


def validate(path, *, edit=None, **policy):
    run = build(policy=tiny_policy(**policy), trainer={"limit_val_batches": 1})
    if edit is not None:
        edit(run.module.policy.tokenizer)
    run.trainer.validate(run.module, datamodule=run.data, ckpt_path=str(path), verbose=False)
    return run


def read_9_as_0(tokenizer):
    """Change which tokens a text has. The vocabulary remains the same."""
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("9", "0")


def end_with_0(tokenizer):
    tokenizer.eos_token = "0"


def set_chat_template(tokenizer):
    tokenizer.chat_template = "{{ messages }}"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return train(tmp_path_factory.mktemp("run"))


def test_the_same_policy(checkpoint):
    assert validate(checkpoint).module.policy_step == 1


@pytest.mark.parametrize(
    ("policy", "edit", "message"),
    [
        ({"characters": "9876543210>"}, None, r"another tokenizer \(\w{12}, now \w{12}\): use the policy settings"),
        ({"characters": "0123456789>x"}, None, r"another model \(\{'vocab_size': 13\}, now .* and another tokenizer"),
        ({"config": MODEL | {"hidden_size": 16}}, None, r"another model \(\{'hidden_size': 32\}, now"),
        ({"config": MODEL | {"rms_norm_eps": 0.1}}, None, r"another model config \(\{'rms_norm_eps': 1e-06\}, now"),
        ({}, read_9_as_0, "trained with another tokenization"),
        ({}, end_with_0, "trained with another tokenization"),
        ({}, set_chat_template, r"another chat template \(None, now \w{12}\): use"),
    ],
)
def test_another_policy(checkpoint, policy, edit, message):
    with pytest.raises(ValueError, match=message) as refused:
        validate(checkpoint, edit=edit, **policy)
    assert "\n" not in str(refused.value)


def test_other_adapters(tmp_path):
    path = train(tmp_path, lora=LoRA(rank=2, alpha=4))
    validate(path, lora=LoRA(rank=2, alpha=4))
    with pytest.raises(ValueError, match=r"another lora \(\{'alpha': 4"):
        validate(path, lora=LoRA(rank=2, alpha=8))


def test_a_checkpoint_that_describes_less(checkpoint, tmp_path):
    """Only what the checkpoint describes is compared."""
    state = torch.load(checkpoint, weights_only=True)
    del state["grpo"]["settings"]["chat template"]
    torch.save(state, tmp_path / "old.ckpt")
    validate(tmp_path / "old.ckpt", edit=set_chat_template)


def write_model(folder, chat_template):
    """Write a small random model with a character-level tokenizer, as a Hugging Face folder."""
    policy = tiny_policy()
    policy.build()
    policy.tokenizer.chat_template = chat_template
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)


class TestCommands:
    """The files of the tokenizer change after the run, so that even the run's own config names another one."""

    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory):
        folder = tmp_path_factory.mktemp("commands")
        write_model(folder / "model", "{{ messages[0]['content'] }}")
        before, rest = TINY.read_text().split("    config:\n", 1)
        loss = rest[rest.index("  loss:") :]
        (folder / "config.yaml").write_text(f"{before}    name: {folder / 'model'}\n{loss}")
        main(["fit", f"--config={folder / 'config.yaml'}", *SMALL, f"--run={folder / 'run'}"])
        main(["test", f"--checkpoints={folder / 'run'}", "--run", str(folder / "tested")])
        write_model(folder / "model", "{{ messages[0]['content'] }}>")
        return folder

    @pytest.mark.parametrize("command", ["fit", "validate", "test", "test --checkpoints", "export"])
    def test_the_checkpoint_is_refused(self, folder, command):
        run = folder / "run"
        options, path = [f"--config={folder / 'config.yaml'}", *SMALL], run / "checkpoints" / "last.ckpt"
        arguments = {
            "fit": ["fit", *options, f"--run={run}", "--ckpt_path=last"],
            "validate": ["validate", *options, f"--ckpt_path={path}"],
            "test": ["test", *options, f"--ckpt_path={path}"],
            "test --checkpoints": ["test", f"--checkpoints={run}"],
            "export": ["export", str(run), str(folder / "out")],
        }
        with pytest.raises(SystemExit if command == "export" else ValueError, match="chat template"):
            main(arguments[command])
        assert not (folder / "out").exists()
