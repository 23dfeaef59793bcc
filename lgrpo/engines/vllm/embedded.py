"""One ``vllm.LLM`` in the training process."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from lgrpo.engines.manifest import WeightManifest
from lgrpo.engines.recovery import EngineError
from lgrpo.engines.vllm.runtime import explain, import_vllm, isolated
from lgrpo.engines.weight_files import temporary_folder, write_folder
from lgrpo.weights import NamedTensors


def cached_folder(folder: Path, cache: Path) -> Path:
    """Move a folder into a cache, where its name depends on its content only, and return it as it is there.

    The path of a model is a part of the key of vLLM's compiled code, so it must be the same in the next run. If the
    cache cannot be written, the folder stays where it is.
    """
    files = sorted(path for path in folder.iterdir() if path.is_file())
    digest = hashlib.sha256(b"".join(path.name.encode() + path.read_bytes() for path in files)).hexdigest()[:16]
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if not (cache / digest).exists():
            copied = Path(tempfile.mkdtemp(dir=cache))
            try:
                shutil.copytree(folder, copied, dirs_exist_ok=True)
                copied.rename(cache / digest)
            except OSError:  # the disk is full, or another process was faster
                shutil.rmtree(copied, ignore_errors=True)
    except OSError:
        return folder
    return cache / digest if (cache / digest).exists() else folder


class EmbeddedLLM:
    """A ``vllm.LLM`` in this process, and the memory it takes.

    After ``__init__`` it has no weights yet, or the base weights for adapters. ``sleep`` releases its memory, ``wake``
    takes it back. After ``close`` it cannot be used.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        dtype: torch.dtype,
        arguments: dict[str, Any],
        base: NamedTensors | None = None,
    ) -> None:
        """Build ``vllm.LLM`` with these arguments, and with base weights if given."""
        self.dtype = dtype
        self.manifest = WeightManifest(dtype=dtype)
        """The base weights."""
        self.shares_process_groups = torch.distributed.is_initialized()
        """Whether it uses process groups of the trainer, so that no other can be built after it failed."""
        self._asleep: set[str] = set()
        self._is_frozen = False
        self.llm = self._build(config, arguments, base)

    def _build(self, config: PretrainedConfig, arguments: dict[str, Any], base: NamedTensors | None) -> Any:
        vllm = import_vllm()
        num_bytes = sum(tensor.numel() for _, tensor in base()) * self.dtype.itemsize if base else 0
        with temporary_folder(num_bytes) as folder, isolated():
            config.save_pretrained(folder)
            if base is not None:
                write_folder(folder, self.manifest.stream(base()))
            else:
                folder = cached_folder(folder, Path(vllm.envs.VLLM_CACHE_ROOT) / "lgrpo")
            if self.shares_process_groups:
                os.environ["RANK"] = str(torch.distributed.get_rank())  # vLLM requires it; Lightning does not set it
            try:
                return vllm.LLM(model=str(folder), **arguments)
            except Exception as error:
                if not self.shares_process_groups:  # vLLM leaves process groups behind, with which a restart would fail
                    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

                    cleanup_dist_env_and_memory()
                raise EngineError(explain(error, config)) from error
            finally:
                gc.unfreeze()  # vLLM freezes every object, also the trainer's garbage

    def on_worker(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function with vLLM's worker."""
        return self.llm.collective_rpc(function, args=arguments)[0]

    def on_model(self, function: Callable[..., Any]) -> Any:
        """Call a function with vLLM's model."""
        return self.llm.apply_model(function)[0]

    def wake(self, *tags: str) -> None:
        """Take back the memory of ``weights`` or ``kv_cache``, if it sleeps."""
        if asleep := [tag for tag in tags if tag in self._asleep]:
            torch.cuda.empty_cache()  # vLLM needs the memory that the trainer caches for its next update
            with isolated():
                self.llm.wake_up(tags=asleep)
            self._asleep -= set(asleep)

    def sleep(self, keep_weights: bool) -> None:
        """Release the memory of cache and weights; ``keep_weights`` copies the weights to host memory first."""
        if len(self._asleep) == 2:
            return
        self.wake("weights", "kv_cache")  # vLLM can only sleep as a whole
        if not self._is_frozen:
            gc.collect()
            gc.freeze()  # vLLM collects garbage at every sleep, which takes 0.3 s with all objects
            self._is_frozen = True
        with isolated():
            self.llm.sleep(level=1 if keep_weights else 2)
        self._asleep = {"weights", "kv_cache"}

    def unfreeze(self) -> None:
        """Let garbage of the previous run be collected, which the first ``sleep`` had frozen."""
        gc.unfreeze()
        self._is_frozen = False

    def close(self) -> None:
        """Shut vLLM down, and release its memory."""
        with contextlib.suppress(Exception):  # if there is no memory left to take back
            self.wake("weights", "kv_cache")  # vLLM fails to free memory that is asleep, and the next engine crashes
        llm, self.llm = self.llm, None
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.unfreeze()
        gc.collect()
