"""The start of vLLM: a model folder that is the same in every run, and the cache of engines that start together."""

from __future__ import annotations

import shutil

import pytest
import torch
from transformers import Qwen2Config

from lgrpo.engines import EnginePool, VLLMEngine, VLLMServerEngine
from lgrpo.engines.manifest import WeightSyncError
from lgrpo.engines.recovery import EngineError
from lgrpo.engines.vllm.cache_size import with_cache_size
from lgrpo.engines.vllm.embedded import cached_folder
from lgrpo.weights import PolicyWeights
from tests.helpers import build, tiny_policy

GIB = 2**30


class TestCachedFolder:
    def test_the_path_depends_on_the_content_only(self, tmp_path):
        paths = []
        for name, content in (("a", "{}"), ("b", "{}"), ("c", '{"hidden_size": 3}')):
            (tmp_path / name).mkdir()
            (tmp_path / name / "config.json").write_text(content)
            paths.append(cached_folder(tmp_path / name, tmp_path / "cache"))
            shutil.rmtree(tmp_path / name)
            assert (paths[-1] / "config.json").read_text() == content
        assert paths[0] == paths[1] != paths[2]
        assert sorted((tmp_path / "cache").iterdir()) == sorted(set(paths)), "nothing else is left"

    def test_a_cache_that_cannot_be_written(self, tmp_path):
        (tmp_path / "a").mkdir()
        (tmp_path / "file").touch()
        assert cached_folder(tmp_path / "a", tmp_path / "file" / "cache") == tmp_path / "a"


class TestCacheSize:
    def weights(self, number=3 * GIB // 4):
        tensor = torch.empty(1, dtype=torch.float32).expand(number)
        config = Qwen2Config(hidden_size=1536, intermediate_size=8960, vocab_size=151936)
        return PolicyWeights.of(config, {"weight": tensor})

    def test_engines_that_start_together_share_a_gpu(self):
        engine = VLLMEngine(gpu_memory_utilization=0.2)
        found = with_cache_size(engine, self.weights(), torch.bfloat16, 140 * GIB)
        weights = 1.5
        assert 0.7 * (28 - weights) < found.kv_cache_gib < 28 - weights - 1.25, "vLLM measured 1.25 GiB of other memory"
        assert engine.kv_cache_gib is None, "the settings stay as they were given"
        exact = with_cache_size(engine, self.weights(), None, 140 * GIB)
        assert abs(found.kv_cache_gib - exact.kv_cache_gib - 1.5) < 1e-6, "float32 takes twice the memory"

    def test_a_given_size_is_kept(self):
        engine = VLLMEngine(kv_cache_gib=4)
        assert with_cache_size(engine, self.weights(), None, 140 * GIB) is engine

    def test_on_a_small_gpu_vllm_measures(self):
        engine = VLLMEngine(gpu_memory_utilization=0.2)
        assert with_cache_size(engine, self.weights(), torch.bfloat16, 24 * GIB) is engine


class TestBatchInvariance:
    def test_in_the_trainers_process(self):
        run = build(data={"engine": VLLMEngine(batch_invariant=True)})
        with pytest.raises(ValueError, match=r"shares the trainer's: use an EnginePool of it"):
            run.trainer.fit(run.module, datamodule=run.data)

    def test_running_servers(self):
        with pytest.raises(ValueError, match=r"urls names running servers: start them with VLLM_BATCH_INVARIANT=1"):
            VLLMServerEngine(batch_invariant=True, urls=["http://127.0.0.1:9"])

    def test_servers_on_a_cpu(self):
        policy = tiny_policy()
        policy.build()
        with pytest.raises(EngineError, match=r"need a GPU: leave it out on a CPU"):
            VLLMServerEngine(batch_invariant=True).load_weights(policy.weights(), 0)

    @pytest.mark.slow("starts a process that imports vLLM")
    def test_a_pool_on_a_cpu(self):
        policy = tiny_policy()
        policy.build()
        engine = EnginePool(VLLMEngine(batch_invariant=True), num_processes=1)
        with pytest.raises(WeightSyncError, match=r"need a GPU: leave it out on a CPU"):
            engine.load_weights(policy.weights(), 0)
        engine.close()
