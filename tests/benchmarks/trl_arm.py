"""TRL's GRPOTrainer as an arm of the study on a real model, in a process of its own.

It reads the settings of the arm ``v=1``: the same model, prompts in the same order, sampling, reward, clip, optimizer
and number of steps. Differences that remain: TRL's ratio is to the policy at the start of the step (so 1), not to
vLLM's log-probabilities, with ``vllm_importance_sampling_correction`` off; groups whose rewards are all equal stay in
the batch, where they have no gradient; completions are sampled with other random numbers. The final weights are saved,
and ``tests.benchmarks.real_model`` evaluates them as those of its other arms.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.isolated import IsolatedPart, isolated_part, wait_for_start

PEER = {"rows": 16, "liger": True, "detokenize": True, "engine_memory": 0.3}
"""TRL's settings that change its speed only: completions in a micro-batch, Liger kernels, whether vLLM decodes text,
and vLLM's share of the memory. They are those of TRL's fastest row of ``tests.benchmarks.step`` on real prompts."""
LOGGED = {
    "reward": "reward",
    "truncated_fraction": "completions/clipped_ratio",
    "zero_variance_fraction": "frac_reward_zero_std",
    "completion_length": "completions/mean_length",
}
"""Names of TRL's metrics by those of the rows."""
MODEL, RESULTS = "model", "results.json"


def run(arguments: list[str], folder: Path, limit: float) -> dict[str, Any]:
    """Train with TRL in a new process and return its results; they and the weights stay in the folder.

    Args:
        arguments: Arguments of ``lgrpo fit`` with the settings to take over.
        folder: Folder to write to. If an earlier call has finished there, its results are returned.
        limit: Time limit in seconds.
    """
    if (done := folder / RESULTS).exists():
        return dict(json.loads(done.read_text()))
    options = argparse.Namespace(arguments=arguments, folder=folder)
    with IsolatedPart("tests.benchmarks.trl_arm", "trl", options) as process:
        found, failure = process.measure(limit)
    if found is None or failure:
        return failure or {"error": "no results"}
    done.write_text(json.dumps(found))
    return dict(found)


def train(arguments: list[str], folder: Path) -> dict[str, Any]:
    """Train with TRL, save the model, and return what a row has of it."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from lgrpo.commands.settings import parse_settings

    begin = time.perf_counter()
    settings = parse_settings(arguments)
    data, loss, cuda = settings.data, settings.model.loss.init_args, torch.cuda.is_available()
    tokenizer = AutoTokenizer.from_pretrained(settings.model.policy.name)
    task = instantiated_task(data.task)
    prompts = training_prompts(task, tokenizer, settings)
    size = data.num_prompts * data.group_size
    rows = next(size // n for n in range(1, size + 1) if size % n == 0 and size // n <= PEER["rows"])
    seconds, marks = list[float](), [time.perf_counter()]
    num_sampled = [0]

    def reward(completions: list[str], completion_ids: list[list[int]], position: list[int], **_: Any) -> list[float]:
        return scores(task, [prompts[each] for each in position], completions, completion_ids)

    def checked(prompt_ids: list[list[int]], *arguments: Any, **given: Any) -> Any:
        first = num_sampled[0]
        num_sampled[0] += data.num_prompts
        expected = [p.token_ids for p in prompts[first : num_sampled[0]] for _ in range(data.group_size)]
        if [list(ids) for ids in prompt_ids] != expected:
            raise RuntimeError(f"TRL samples other prompts than lgrpo from prompt {first} on")
        return generate(prompt_ids, *arguments, **given)

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            marks[0] = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - marks[0])
            marks[0] = time.perf_counter()

    optimizer = settings.model.optimizer.init_args
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        seed=settings.seed_everything,
        use_vllm=cuda,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=PEER["engine_memory"],
        vllm_max_model_length=max(len(prompt.token_ids) for prompt in prompts) + data.sampling.max_tokens,
        vllm_importance_sampling_correction=False,
        generation_kwargs={"detokenize": PEER["detokenize"]} if cuda else None,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=size // rows,
        num_generations=data.group_size,
        max_completion_length=data.sampling.max_tokens,
        temperature=data.sampling.temperature,
        shuffle_dataset=False,
        max_steps=data.num_rollouts,
        learning_rate=optimizer.lr,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=settings.trainer.gradient_clip_val,
        optim="adamw_torch_fused",
        lr_scheduler_type="constant",
        loss_type="dapo",
        epsilon=loss.clip_low,
        epsilon_high=loss.clip_high,
        beta=loss.kl_coef,
        bf16=cuda,
        gradient_checkpointing=False,
        use_liger_kernel=PEER["liger"] and cuda,
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        use_cpu=not cuda,
    )
    trainer = GRPOTrainer(
        model=str(settings.model.policy.name),
        processing_class=tokenizer,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(
            [{"prompt": prompt.text, "position": position} for position, prompt in enumerate(prompts)]
        ),
        callbacks=[Watch()],
    )
    generate, trainer._generate_single_turn = trainer._generate_single_turn, checked
    trainer.train()
    start_seconds = time.perf_counter() - begin - sum(seconds)
    trainer.model.save_pretrained(folder / MODEL)
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    found: dict[str, Any] = {
        name: [float(f"{entry[metric]:.4g}") for entry in logs] for name, metric in LOGGED.items() if metric in logs[0]
    }
    packages = ("trl", *(["vllm"] if cuda else []))
    return found | {
        "step_seconds": [round(each, 3) for each in seconds],
        "start_seconds": round(start_seconds, 1),
        "peer": PEER | {"rows": rows},
        "versions": {name: version(name) for name in packages},
    }


def instantiated_task(settings: Any) -> Any:
    """Return the task that parsed settings describe."""
    from jsonargparse import ArgumentParser

    from lgrpo.tasks import Task

    parser = ArgumentParser()
    parser.add_subclass_arguments(Task, "task")
    return parser.instantiate_classes(parser.parse_object({"task": settings.as_dict()})).task


def training_prompts(task: Any, tokenizer: Any, settings: Any) -> list[Any]:
    """Return the prompts of all rollouts of a run, in order."""
    from lgrpo.data.prompts import load_prompts

    data = settings.data
    prompts = load_prompts(
        task,
        "train",
        tokenizer,
        max_tokens=data.max_prompt_tokens,
        overlong=data.overlong_prompts,
        shuffle_seed=settings.seed_everything,
    )
    return [prompts.at(position) for position in range(data.num_prompts * data.num_rollouts)]


def scores(task: Any, prompts: list[Any], texts: list[str], token_ids: list[list[int]]) -> list[float]:
    """Return the task's rewards of completions."""
    from lgrpo.types import Completion

    completions = [
        Completion(token_ids=ids, logprobs=[0.0] * len(ids), text=text, finish_reason="stop", behaviour_step=0)
        for text, ids in zip(texts, token_ids, strict=True)
    ]
    return [float(score) for score in task.reward(prompts, completions)]


def main() -> None:
    part = isolated_part()
    if part is None:
        raise SystemExit("use python -m tests.benchmarks.real_model --groups trl")
    options = wait_for_start()
    Path(options.results).write_text(json.dumps(train(options.arguments, Path(options.folder))))


if __name__ == "__main__":
    main()
