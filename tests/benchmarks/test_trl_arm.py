"""TRL as an arm of the study on a real model, without vLLM."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.benchmarks import trl_arm
from tests.benchmarks.held_out import LoadWeights
from tests.helpers import build, fit

pytest.importorskip("trl")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Write a tiny model and its tokenizer, of characters, and return the folder."""
    from tests.helpers import tiny_policy

    folder = tmp_path_factory.mktemp("model")
    policy = tiny_policy(characters="0123456789>+= ")
    policy.build()
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def arguments(model, tmp_path):
    """Return arguments of ``lgrpo fit``: eight prompts, two in a rollout, in a random order."""
    rows = [{"question": f"{n}+{n}=", "answer": str(2 * n)} for n in range(8)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {
        "seed_everything": 3,
        "model.policy.name": model,
        "model.loss": "lgrpo.losses.ClippedLoss",
        "model.loss.init_args.kl_coef": 0.0,
        "model.optimizer": "torch.optim.AdamW",
        "model.optimizer.init_args.lr": 1e-2,
        "model.optimizer.init_args.weight_decay": 0.0,
        "data.task": "lgrpo.tasks.GSM8K",
        "data.task.init_args.train": tmp_path / "train.jsonl",
        "data.task.init_args.validation": tmp_path / "train.jsonl",
        "data.task.init_args.template.prompt": "{question}",
        "data.num_prompts": 2,
        "data.group_size": 4,
        "data.num_rollouts": 2,
        "data.max_prompt_tokens": 16,
        "data.sampling.max_tokens": 4,
        "trainer.gradient_clip_val": 1.0,
    }
    return [f"--{name}={value}" for name, value in given.items()]


def test_trl_trains_on_the_prompts_of_lgrpo(model, arguments, tmp_path, monkeypatch):
    """The prompts are compared inside; the trained weights are saved, and a second call trains nothing."""
    monkeypatch.setattr(trl_arm, "scores", lambda task, prompts, texts, ids: [float(sum(each) % 2) for each in ids])
    found = trl_arm.train(arguments, tmp_path)
    assert len(found["reward"]) == len(found["step_seconds"]) == 2
    assert found["peer"]["rows"] == 8
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / trl_arm.MODEL))
    assert any(not before[name].equal(after[name]) for name in before)

    (tmp_path / trl_arm.RESULTS).write_text(json.dumps(found))
    assert trl_arm.run(["nothing"], tmp_path, limit=0) == found


def test_other_prompts_are_noticed(arguments, tmp_path, monkeypatch):
    original = trl_arm.training_prompts
    monkeypatch.setattr(trl_arm, "training_prompts", lambda *given: Shifted(original(*given)))
    with pytest.raises(RuntimeError, match="other prompts"):
        trl_arm.train(arguments, tmp_path)


class Shifted(list):
    """Prompts of which slices begin one later."""

    def __getitem__(self, index):
        return super().__getitem__(slice(index.start + 1, index.stop + 1) if isinstance(index, slice) else index)


def test_completions_are_scored_by_the_task(arguments):
    from lgrpo.commands.settings import parse_settings
    from lgrpo.types import Prompt

    task = trl_arm.instantiated_task(parse_settings(arguments).data.task)
    prompts = [Prompt(text="2+2=", token_ids=[1], row={"answer": "4"}, position=0)] * 2
    assert trl_arm.scores(task, prompts, ["it is 4", "4 or 5"], [[1], [2]]) == [1.0, 0.0]


def test_weights_of_a_folder_replace_the_policy(tmp_path):
    trained = fit(rollouts=2).module.policy.model
    trained.save_pretrained(tmp_path)
    run = build(rollouts=1, learning_rate=0.0, callbacks=[LoadWeights(str(tmp_path))])
    first = {name: value.clone() for name, value in run.module.policy.model.state_dict().items()}
    run.trainer.fit(run.module, datamodule=run.data)
    found = run.module.policy.model.state_dict()
    assert all(found[name].equal(value) for name, value in trained.state_dict().items())
    assert any(not found[name].equal(value) for name, value in first.items())


def test_weights_of_another_model_are_an_error(tmp_path):
    save_file({"other": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="other weights than the policy"):
        fit(rollouts=1, callbacks=[LoadWeights(str(tmp_path))])
