"""The systems of the step benchmark, lgrpo and TRL, each run in a separate process."""

from __future__ import annotations

import argparse
import importlib
import json
import tempfile
import traceback
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer

from lgrpo.callbacks import EngineSync
from lgrpo.engines import EnginePool, RolloutEngine, TransformersEngine, VLLMEngine
from lgrpo.tasks import Template
from tests.benchmarks.stages import Stages, bare_trainer
from tests.benchmarks.workload import (
    PrescribedEmbedded,
    PrescribedVLLM,
    cache_gib,
    lengths,
    prescribe_embedded,
    prescribe_generate,
    prescribe_vllm,
    prompt_texts,
    real_prompts,
)


class Cycles(EngineSync):
    """Syncs at the start of each cycle; ``periods`` are the lengths of the cycles in rollouts."""

    def __init__(self, periods: Sequence[int]) -> None:
        self.periods = dict(zip(accumulate(periods, initial=0), periods, strict=False))

    def is_due(self, trainer: Any, rollout: int) -> bool:
        return rollout in self.periods

    def num_rollouts(self, trainer: Any, rollout: int) -> int:
        return self.periods[rollout]


def run_lgrpo(options: argparse.Namespace) -> list[dict[str, Any]]:
    import lightning as L

    from lgrpo import (
        CausalPolicy,
        ClippedLoss,
        GRPOModule,
        RolloutBatch,
        RolloutCallback,
        RolloutDataModule,
        Sampling,
    )
    from lgrpo.data.scorer import GroupScores
    from lgrpo.engines.pool import engine as pool
    from lgrpo.engines.vllm.embedded import EmbeddedLLM
    from lgrpo.tasks import DatasetTask
    from tests.benchmarks.parity_reward import Parity

    cuda, work = options.device == "cuda", Work(options, options.share_prompts)
    stages = Stages(work.phase_of, options.clock)
    policy = CausalPolicy(
        str(options.folder),
        gradient_checkpointing=options.checkpointing,
        compile=options.compile,
        activation_memory=options.activation_memory,
        chunk_size=4096,
        share_prompts=options.share_prompts,
    )
    module = GRPOModule(policy, ClippedLoss(), lambda p: torch.optim.AdamW(p, lr=1e-6, fused=True))
    engine = lgrpo_engine(options, work)
    data = RolloutDataModule(
        DatasetTask(Parity(), train=[{"question": text} for text in work.prompts], template=work.template),
        engine,
        num_prompts=options.prompts,
        group_size=options.group,
        num_rollouts=len(work.phase_of),
        sampling=Sampling(max_tokens=work.longest),
        generate_ahead=max(work.periods) > 1,
        micro_batch_tokens=options.micro_batch_tokens,
        shuffle=False,
    )

    class Watch(RolloutCallback):
        def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
            stages.wrap(trainer.strategy, "backward", "arithmetic")
            stages.wrap(trainer.precision_plugin, "clip_gradients", "arithmetic")
            stages.wrap_optimizer(trainer.optimizers[0])

        def on_rollout_end(self, trainer: L.Trainer, pl_module: Any, batch: RolloutBatch) -> None:
            work.check(batch.rollout, batch.completion_mask.sum(1).tolist(), batch.lengths.tolist())
            work.check_policy(batch.rollout, set(batch.behaviour_step.tolist()))

        def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, i: int) -> None:
            if (i + 1) % trainer.accumulate_grad_batches == 0:
                stages.end_step(trainer.global_step)

    stages.wrap(type(engine), "generate", "generate")
    for name in ("sleep", "wake"):
        stages.wrap(type(engine), name, "turn")
    owner, name = (EmbeddedLLM, "wake") if isinstance(engine, VLLMEngine) else (pool, "free_cached_memory")
    stages.wrap(owner, name, "turn", outside="sync")
    stages.wrap(type(engine), "load_weights", "sync")
    stages.wrap(GroupScores, "__call__", "rest")
    stages.wrap(GroupScores, "result", "score")
    stages.wrap(GRPOModule, "training_step", "overhead")
    stages.wrap(CausalPolicy, "forward", "arithmetic")
    micro_batches = 1 if options.micro_batch_tokens else options.micro_batches
    trainer = bare_trainer(cuda, micro_batches, [Cycles(work.periods), Watch()])

    def results() -> list[dict[str, Any]]:
        found, syncs = work.results(stages, policy.model), [record.seconds for record in engine.state.ledger]
        for phase, result in zip(options.phases, found, strict=True):
            count = phase["warm_up"] + phase["steps"] // phase["v"]
            result["sync_each"], syncs = syncs[phase["warm_up"] : count], syncs[count:]
            if cuda and options.processes:
                result["cache_gib"] = work.cache_gib
        return found

    return work.run(lambda: trainer.fit(module, datamodule=data), stages, results)


def lgrpo_engine(options: argparse.Namespace, work: Work) -> RolloutEngine:
    """Return vLLM on a GPU, the embedded engine on a CPU; in the trainer's process or in a pool."""
    cuda, pooled = options.device == "cuda", options.processes > 0
    prescribed = pooled and not work.is_natural
    engine: RolloutEngine
    if cuda:
        engine = (PrescribedVLLM if prescribed else VLLMEngine)(
            dtype="bfloat16",
            max_model_len=work.longest_sequence,
            max_num_seqs=options.sequences,
            gpu_memory_utilization=options.engine_memory / max(1, options.processes),
            kv_cache_gib=work.cache_gib / options.processes
            if pooled
            else None,  # with a given size they start in parallel
        )
    else:
        engine = (PrescribedEmbedded if prescribed else TransformersEngine)()
    if isinstance(engine, PrescribedVLLM | PrescribedEmbedded):
        engine.given, engine.group = work.lengths, options.group
    elif not work.is_natural:
        (prescribe_vllm if cuda else prescribe_embedded)(work.lengths)
    return EnginePool(engine, options.processes) if pooled else engine


def run_trl(options: argparse.Namespace) -> list[dict[str, Any]]:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    cuda, work, peer = options.device == "cuda", Work(options), options.peer
    stages = Stages(work.phase_of, options.clock)
    rollouts, generate = [0], GRPOTrainer._generate_single_turn

    def parity(completion_ids: list[list[int]], **_: Any) -> list[float]:
        size = options.prompts * options.group
        for start in range(0, len(completion_ids), size):
            work.check(rollouts[0], [len(ids) for ids in completion_ids[start : start + size]])
            rollouts[0] += 1
        return [float(sum(ids) % 2) for ids in completion_ids]

    def checked(self: Any, prompt_ids: list[list[int]], *arguments: Any, **given: Any) -> Any:
        work.check_prompts(rollouts[0], prompt_ids)
        return generate(self, prompt_ids, *arguments, **given)

    class Watch(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            stages.wrap_optimizer(given["optimizer"])

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            stages.end_step(state.global_step)

    if cuda and not work.is_natural:
        prescribe_vllm(work.lengths)
    accumulation = work.size // peer["rows"]
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_vllm=cuda,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=peer["engine_memory"],
        vllm_enable_sleep_mode=cuda and peer["sleeps"],
        vllm_max_model_length=work.longest_sequence,
        vllm_importance_sampling_correction=peer["correction"],
        generation_kwargs={"detokenize": peer["detokenize"]} if cuda else None,
        per_device_train_batch_size=peer["rows"],
        gradient_accumulation_steps=accumulation,
        steps_per_generation=accumulation * options.phases[0]["v"],
        num_generations=options.group,
        max_completion_length=work.longest,
        shuffle_dataset=False,
        max_steps=len(work.phase_of),
        learning_rate=1e-6,
        temperature=1.0,
        beta=0.0,
        bf16=cuda,
        gradient_checkpointing=peer["checkpointing"],
        torch_compile=peer["compile"],
        optim="adamw_torch_fused",
        lr_scheduler_type="constant",
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        use_cpu=not cuda,
        model_init_kwargs={"dtype": "float32", "attn_implementation": peer["attention"]},
        use_liger_kernel=peer["liger"],
        use_transformers_continuous_batching=peer["continuous_batching"],
    )
    trainer = GRPOTrainer(
        model=str(options.folder),
        reward_funcs=parity,
        args=arguments,
        train_dataset=Dataset.from_list(
            [{"prompt": [{"role": "user", "content": text}] if work.template.chat else text} for text in work.prompts]
        ),
        callbacks=[Watch()],
    )
    if cuda:
        stages.wrap(trainer.vllm_generation, "sync_weights", "sync")
    elif not work.is_natural:
        prescribe_generate(trainer.model, trainer.eos_token_ids, work.lengths)
    GRPOTrainer._generate_single_turn = checked
    stages.wrap(GRPOTrainer, "_generate_single_turn", "generate")
    stages.wrap(GRPOTrainer, "_calculate_rewards", "score")
    stages.wrap(GRPOTrainer, "compute_loss", "overhead")
    stages.wrap(GRPOTrainer, "_get_per_token_logps_and_entropies", "overhead")
    stages.wrap(trainer.model, "forward", "arithmetic", outside="generate")
    stages.wrap(trainer.accelerator, "backward", "arithmetic")
    stages.wrap(trainer.accelerator, "clip_grad_norm_", "arithmetic")

    def results() -> list[dict[str, Any]]:
        found = work.results(stages, trainer.model)
        if cuda:
            cache = trainer.vllm_generation.llm.llm_engine.vllm_config.cache_config
            size = cache_gib(trainer.model.config, cache.num_gpu_blocks * cache.block_size)
            found = [result | {"cache_gib": size} for result in found]
        return found

    return work.run(trainer.train, stages, results)


SYSTEMS = {"lgrpo": run_lgrpo, "trl": run_trl}
PACKAGES = {"lgrpo": ("lightning",), "trl": ("datasets", "trl.trainer.grpo_trainer")}
"""Packages to import early. TRL's trainer imports vLLM; lgrpo's engine does so itself, possibly in other processes."""


def import_packages(system: str) -> None:
    """Import the packages of a system before its measurement starts."""
    for name in PACKAGES[system]:
        importlib.import_module(name)


class Work:
    """The prompts and lengths of all phases of a run, and checks that a system kept to them."""

    def __init__(self, options: argparse.Namespace, shares_prompts: bool = False) -> None:
        self.options, self.shares_prompts = options, shares_prompts
        self.size = options.prompts * options.group
        self.phase_of: list[int | None] = []
        """Phase of each rollout (one optimizer step each); None in a warm-up."""
        self.periods: list[int] = []
        """Number of rollouts of each cycle; 1 in a warm-up."""
        self.lengths: list[int] = []
        """Tokens of each completion; with real prompts the cap, until a rollout has been sampled."""
        for number, phase in enumerate(options.phases):
            warm_up, steps, v = phase["warm_up"], phase["steps"], phase["v"]
            self.phase_of += [None] * warm_up + [number] * steps
            self.periods += [1] * warm_up + [v] * (steps // v)
            sizes = (options.completion_tokens, options.mean_tokens, options.cap_tokens)
            self.lengths += lengths(phase["workload"], (warm_up + steps) * self.size, *sizes)
        self.is_natural = any(phase["workload"] == "real" for phase in options.phases)
        self.failure = "the phase was not completed"
        self.longest = max(self.lengths)
        tokenizer = AutoTokenizer.from_pretrained(options.folder)
        needed = options.prompts * len(self.phase_of)
        if self.is_natural:
            self.prompts = real_prompts(Path(options.data), needed)
        else:
            self.prompts = prompt_texts(Path(options.folder), options.prompt_tokens, needed)
        self.template = Template(chat=self.is_natural and tokenizer.chat_template is not None)
        rendered = [self.template.render({"question": text}, tokenizer)[1] for text in self.prompts]
        self.prompt_ids = [ids for ids in rendered if ids is not None]
        self.longest_sequence = max(map(len, self.prompt_ids)) + self.longest

    def check(self, rollout: int, found: list[int], whole: list[int] | None = None) -> None:
        """Raise if completions, or whole sequences, of a rollout do not have their lengths."""
        completions = slice(rollout * self.size, (rollout + 1) * self.size)
        if self.is_natural and max(found) <= self.longest:
            self.lengths[completions] = found
        expected = self.lengths[completions]
        if found != expected:
            raise RuntimeError(f"rollout {rollout} has completions of {found[:8]}… tokens, not {expected[:8]}…")
        prompts = self.prompt_lengths(rollout)
        if whole is not None and whole != [sum(each) for each in zip(found, prompts, strict=True)]:
            raise RuntimeError(f"the prompts of rollout {rollout} are not {prompts[:8]} tokens long")

    def check_prompts(self, rollout: int, found: list[list[int]]) -> None:
        """Raise if the prompts from a rollout on, each repeated for its siblings, have other tokens than expected."""
        first = rollout * self.options.prompts
        expected = [ids for ids in self.prompt_ids[first:] for _ in range(self.options.group)][: len(found)]
        if found != expected:
            raise RuntimeError(f"rollout {rollout} has the prompt {found[0]}, not {expected[0]}")

    def prompt_lengths(self, rollout: int) -> list[int]:
        """Return the number of tokens of the prompt of each completion of a rollout."""
        prompts = self.prompt_ids[rollout * self.options.prompts : (rollout + 1) * self.options.prompts]
        return [len(ids) for ids in prompts for _ in range(self.options.group)]

    def check_policy(self, rollout: int, steps: set[int]) -> None:
        """Raise if a rollout was not sampled by the policy at the start of its cycle."""
        begin = max(start for start in accumulate(self.periods, initial=0) if start <= rollout)
        if steps != {begin}:
            raise RuntimeError(f"rollout {rollout} was sampled by the policy of steps {sorted(steps)}, not {begin}")

    def run(
        self, train: Callable[[], Any], stages: Stages, results: Callable[[], list[dict[str, Any]]]
    ) -> list[dict[str, Any]]:
        """Train and return the results; they are also written after every phase, so that a crash loses none."""
        stages.on_phase_end = lambda: self.write(results())
        try:
            train()
        except Exception as error:
            traceback.print_exc()
            self.failure = f"{type(error).__name__}: {error}"[:600]
        return results()

    def write(self, results: list[dict[str, Any]]) -> None:
        Path(self.options.results).write_text(json.dumps(results))

    def results(self, stages: Stages, model: Any) -> list[dict[str, Any]]:
        """Return the measurements of each phase, or its error."""
        parameters, found = sum(p.numel() for p in model.parameters()), []
        for number, phase in enumerate(self.options.phases):
            if len(stages.steps[number]) < phase["steps"]:
                found.append({"error": self.failure})
                continue
            summary = stages.summary(number, self.tokens(number), phase["v"], parameters, self.options.peak_flops)
            summary["peak_gib"] -= self.options.memory_before / 2**30
            found.append(summary | {"parameters": parameters})
        return found

    def tokens(self, phase: int) -> list[tuple[int, int, int]]:
        """Return the numbers of sampled, trained and read tokens of each step of a phase.

        A shared prompt counts as read once, also where the end of a micro-batch divides its group.
        """
        found = []
        for rollout in (index for index, other in enumerate(self.phase_of) if other == phase):
            sampled = sum(self.lengths[rollout * self.size : (rollout + 1) * self.size])
            prompts = self.prompt_lengths(rollout)
            read = sum(prompts[:: self.options.group]) if self.shares_prompts else sum(prompts)
            found.append((sampled, sampled + sum(prompts), sampled + read))
        return found

    @cached_property
    def cache_gib(self) -> float:
        """Size of lgrpo's cache: the given one, or enough for a rollout of the longest sequences.

        For cycles of several rollouts it is at least the size for all sequences that the engines decode together.
        """
        if self.options.cache_gib:
            return float(self.options.cache_gib)
        tokens: float = self.size * self.longest_sequence
        max_sequences = self.options.processes * self.options.sequences
        for number, phase in enumerate(self.options.phases):
            each = self.tokens(number)
            mean = sum(trained for _, trained, _ in each) / len(each) / self.size
            tokens = max(tokens, min(self.size * phase["v"], max_sequences) * mean)
        return 1.1 * cache_gib(AutoConfig.from_pretrained(self.options.folder), tokens)
