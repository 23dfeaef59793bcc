"""``lgrpo export``: a checkpoint as a Hugging Face folder, which ``from_pretrained`` and ``vllm serve`` load.

And ``lgrpo consolidate``: a sharded one as a file.
"""

from __future__ import annotations

import argparse
import copy
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import Namespace
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging

from lgrpo import __version__
from lgrpo.checkpoints import META, SIZES, consolidate, damage, is_whole, newest_checkpoint, read_sharded
from lgrpo.functional import combined_checksum, named_checksums
from lgrpo.plan import plan, policy_of
from lgrpo.policy import CausalPolicy, is_reference
from lgrpo.report import read_series

PREFIX = "policy."


class ExportError(ValueError):
    """What is there cannot be exported."""


def export(args: list[str], parse: Callable[[list[str]], Namespace]) -> None:
    """``lgrpo export CHECKPOINT OUT``; ``parse`` reads settings as ``lgrpo fit`` would."""
    parser = argparse.ArgumentParser(
        prog="lgrpo export",
        description="Writes a checkpoint's policy as a Hugging Face folder: weights, tokenizer, a card. Adapters are "
        "merged into the weights.",
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", type=Path, help="file or sharded folder; or a run, for its newest checkpoint")
    parser.add_argument("out", type=Path, help="folder to write; it must not exist, or be empty")
    parser.add_argument("--config", type=Path, help="config of the run; by default the one beside its checkpoints")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="by default the checkpoint's")
    parser.add_argument("--adapter", action="store_true", help="the adapter alone, as peft saves it (LoRA)")
    own = parser.parse_args(args)
    logging.disable_progress_bar()
    try:
        path = find(own.checkpoint)
        config_path = own.config or find_config(path)
        config = parse([f"--config={config_path}"])
        policy, step = load(path, config)
        if own.adapter and policy.lora is None:
            raise ExportError("--adapter: this run trained no adapters (policy.lora is not set)")
        if own.out.exists() and (not own.out.is_dir() or any(own.out.iterdir())):
            raise ExportError(f"{own.out} is not empty, and nothing is overwritten: choose another folder")
        own.out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{own.out.name}-", dir=own.out.parent) as part:
            folder = Path(part) / "export"
            checksum = write_adapter(policy, folder) if own.adapter else write(policy, folder, own.dtype)
            (folder / "README.md").write_text(card(own.out.name, policy, config, config_path.parent, step), "utf-8")
            if own.out.exists():
                own.out.rmdir()
            shutil.move(folder, own.out)
    except (ValueError, OSError) as error:
        raise SystemExit(f"lgrpo: {error}") from error
    print(f"The policy of optimizer step {step} is in {own.out}/, checksum {checksum}")


def find(path: Path) -> Path:
    """The checkpoint that is meant, whole."""
    is_sharded = (path / SIZES).exists() or (path / META).exists()
    if path.is_dir() and not is_sharded:
        return newest_checkpoint(path / "checkpoints" if (path / "checkpoints").is_dir() else path)
    if not path.exists():
        raise ExportError(f"there is no checkpoint at {path}")
    if not is_whole(path):
        raise ExportError(f"the checkpoint {path} is damaged: {damage(path)}")
    return path


def find_config(checkpoint: Path) -> Path:
    """The config of the run a checkpoint lies in."""
    for folder in (checkpoint.parent, checkpoint.parent.parent):
        if (folder / "config.yaml").exists():
            return folder / "config.yaml"
    raise ExportError(f"there is no config.yaml beside {checkpoint}: give the run's by --config")


def load(path: Path, config: Namespace) -> tuple[CausalPolicy, int]:
    """The policy of a checkpoint, and its optimizer step."""
    state, step = read(path)
    policy = policy_of(config)
    policy.build()
    own = {name.removeprefix(PREFIX): tensor for name, tensor in state.items() if name.startswith(PREFIX)}
    own = {name: tensor for name, tensor in own.items() if not is_reference(name)}
    kept = {name: tensor for name, tensor in policy.state_dict().items() if policy.checkpoint_leaves_out(name)}
    try:
        policy.load_state_dict(kept | own)
    except RuntimeError as error:
        raise ExportError(f"the checkpoint {path} does not fit the config's model: {error}") from error
    return policy, step


def read(path: Path) -> tuple[dict[str, Tensor], int]:
    """The weights of a checkpoint, sharded or not, and its optimizer step. Nothing in it is executed."""
    if not path.is_dir():
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        return checkpoint["state_dict"], checkpoint["global_step"]
    checkpoint, spread = read_sharded(path)
    return spread["state_dict"], checkpoint["global_step"]


def write(policy: CausalPolicy, folder: Path, dtype: str | None) -> str:
    """Weights, config, generation config and tokenizer. The checksum of the weights as they lie there."""
    kind = getattr(torch, dtype) if dtype else policy.dtype
    weights = {name: tensor.to(kind).contiguous() for name, tensor in policy.weights()}
    config = copy.deepcopy(policy.model.config)
    config.dtype = kind
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=kind, trust_remote_code=policy.trust_remote_code)
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    model.generation_config = GenerationConfig(
        eos_token_id=config.eos_token_id, pad_token_id=policy.tokenizer.pad_token_id, do_sample=True
    )
    model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    code = policy.trust_remote_code
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=kind, trust_remote_code=code)
    return same(weights.items(), loaded.state_dict())


def write_adapter(policy: CausalPolicy, folder: Path) -> str:
    """The adapter as peft saves it, its scale in B."""
    from lgrpo.engines.vllm_adapter import read_adapter, write_adapter

    adapter = policy.weights().adapter
    assert adapter is not None
    tensors = dict(adapter.tensors())
    write_adapter(folder, adapter.rank, tensors.items(), base=policy.name or "")
    policy.tokenizer.save_pretrained(folder)
    return same(tensors.items(), read_adapter(folder))


def same(weights: Iterable[tuple[str, Tensor]], held: dict[str, Tensor]) -> str:
    """The checksum of what was read back, or an error where it is not what was written."""
    sums = named_checksums((name, tensor.cpu()) for name, tensor in weights)
    found = named_checksums(held.items())
    if different := [name for name in sums | found if sums.get(name) != found.get(name)]:
        raise ExportError(f"{different[0]} is not in the folder as it is in the policy")
    return combined_checksum(sums)


def card(title: str, policy: CausalPolicy, config: Namespace, run: Path, step: int) -> str:
    """The model card: what it is, how it was made, how it fared."""
    head: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    head["tags"] = ["grpo", "reinforcement-learning", "lgrpo"]
    if policy.name and not Path(policy.name).exists():
        head["base_model"] = policy.name
    front = yaml.safe_dump(head, sort_keys=False, allow_unicode=True)
    settings = {
        "model.loss": config.model.loss,
        "model.optimizer": config.model.optimizer,
        "model.policy.lora": config.model.policy.lora,
        "data.task": config.data.task,
        "data.sampling": config.data.sampling,
        "data.advantage": config.data.advantage,
        "weight_sync": config.weight_sync,
        "reference_refresh": config.reference_refresh,
        "zero_variance_mask": config.zero_variance_mask,
        "seed_everything": config.seed_everything,
    }
    plain = {name: _plain(value) for name, value in settings.items() if value is not None}
    return f"""---
{front}---

# {title}

{"Low-rank adapters trained" if policy.lora else "Trained"} from {policy.name or "a random initialisation"} by
group-relative policy optimisation, {step} optimizer steps, with lgrpo {__version__}.

## How it fared

{_results(run, step)}

## How it was made

```
{plan(config)}
```

```yaml
{yaml.safe_dump(plain, sort_keys=False, allow_unicode=True).strip()}
```
"""


def _results(run: Path, step: int) -> str:
    """First and present figures of every validation that was logged."""
    try:
        series = read_series(run)
    except FileNotFoundError:
        return "No metrics were kept with the checkpoint."
    rows = []
    for name, points in series.items():
        before = [(at, value) for at, value in points if at <= step]
        if name.startswith("val/") and "pass@" in name and not name.endswith("_stderr") and before:
            errors = dict(series.get(f"{name}_stderr", []))
            (first, start), (last, end) = before[0], before[-1]
            spread = f" ± {errors[last]:.3f}" if last in errors else ""
            rows.append(
                f"| {name.removeprefix('val/')} | {start:.3f} (step {first}) | {end:.3f}{spread} (step {last}) |"
            )
    if not rows:
        return "It was not validated."
    return "\n".join(["| held-out problems | at first | last |", "|---|---|---|", *rows])


def _plain(value: Any) -> Any:
    """Settings as plain containers."""
    if isinstance(value, Namespace):
        return {key: _plain(part) for key, part in vars(value).items()}
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    for kind in (bool, int, float):  # jsonargparse's restricted numbers among them
        if isinstance(value, kind):
            return kind(value)
    return None if value is None else str(value)


def consolidate_command(args: list[str]) -> None:
    """``lgrpo consolidate FOLDER FILE``: a sharded checkpoint as one file."""
    parser = argparse.ArgumentParser("lgrpo consolidate", description="Makes one file of a sharded checkpoint.")
    parser.add_argument("folder", type=Path, help="checkpoint of a run whose policy is spread over ranks (FSDP, FSDP2)")
    parser.add_argument("file", type=Path, help="checkpoint to write, for lgrpo validate and test, or to look into")
    own = parser.parse_args(args)
    try:
        consolidate(own.folder, own.file)
    except (ValueError, OSError) as error:
        raise SystemExit(f"lgrpo: {error}") from error
    print(f"{own.file} holds all of {own.folder}")
