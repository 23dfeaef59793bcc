"""Weights sent to workers through GPU memory: what is kept, what is sent again, and what is released."""

from __future__ import annotations

from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch
from transformers import PretrainedConfig

from lgrpo import CausalPolicy, TransformersEngine
from lgrpo.engines import EnginePool
from lgrpo.engines.manifest import WeightManifest
from lgrpo.engines.pool import cuda_buffers, workers
from lgrpo.engines.pool.cuda_buffers import MappedBuffers, StagedChunk, StagingBuffers, write_file
from lgrpo.engines.pool.worker import WorkerRequests, portable
from lgrpo.functional import named_checksums
from lgrpo.weights import PolicyWeights

ON_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
WIDE = {"model_type": "llama", "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8}
WIDE |= {"num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 64, "tie_word_embeddings": True}
SMALL = WIDE | {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}


def make_chunk(start: float, rows: int = 2) -> dict[str, torch.Tensor]:
    return {"a": torch.full((rows, 3), start), "b": torch.full((5,), start + 1)}


@pytest.fixture
def in_this_process(monkeypatch):
    """Both ends are in this process, and share memory of the CPU."""
    monkeypatch.setattr(cuda_buffers, "reduce_tensor", lambda memory: (lambda memory: memory, (memory,)))
    monkeypatch.setattr(cuda_buffers, "_with_local_device", lambda arguments: arguments)


class TestStagingBuffers:
    def test_a_buffer_is_overwritten_after_two_others(self):
        buffers = StagingBuffers()
        filled = [buffers.fill(number, make_chunk(number), None) for number in range(3)]
        assert [float(chunk.tensors["a"][0, 0]) for chunk in filled] == [0, 1, 2]
        again = buffers.fill(3, make_chunk(3), None)
        assert again.memory is filled[0].memory
        assert [float(chunk.tensors["b"][0]) for chunk in filled] == [4, 2, 3]

    def test_cast_to_the_engines_precision(self):
        chunk = StagingBuffers().fill(0, make_chunk(0.1), torch.bfloat16)
        assert {tensor.dtype for tensor in chunk.tensors.values()} == {torch.bfloat16}
        assert torch.equal(chunk.tensors["a"], make_chunk(0.1)["a"].bfloat16())

    def test_next_sync_reuses_the_chunks(self):
        buffers = StagingBuffers()
        first = [buffers.fill(number, make_chunk(number), None) for number in range(4)]
        assert all(buffers.fill(number, make_chunk(9), None) is chunk for number, chunk in enumerate(first))
        assert all(float(chunk.tensors["a"][1, 2]) == 9 for chunk in first)

    def test_fill_in_inference_mode(self):
        buffers = StagingBuffers()
        with torch.inference_mode():
            given = make_chunk(1)
            buffers.fill(0, given, None)
        assert float(buffers.fill(0, make_chunk(2), None).tensors["a"][0, 0]) == 2
        assert float(buffers.fill(0, given, None).tensors["a"][0, 0]) == 1

    def test_leaked_memory_is_kept(self):
        buffers = StagingBuffers()
        memory = buffers.fill(0, make_chunk(1), None).memory
        buffers.mark_leaked()
        buffers.clear()
        assert buffers.fill(0, make_chunk(2), None).memory is memory


@pytest.mark.usefixtures("in_this_process")
class TestMessages:
    def test_known_layouts_and_handles_are_not_sent_again(self):
        buffers, cache, other = StagingBuffers(), {}, MappedBuffers()
        for sync in range(3):
            messages = []
            for number in range(5):
                chunk = buffers.fill(number, make_chunk(10 * sync + number), None)
                messages.append(chunk.message(cache))
                assert float(other.tensors_of(messages[-1])["a"][1, 2]) == 10 * sync + number
            assert [message.layout is not None for message in messages] == [sync == 0] * 5
            assert [message.handle is not None for message in messages] == [sync == 0] * 3 + [False] * 2

    def test_new_receiver_gets_everything(self):
        buffers, cache = StagingBuffers(), {}
        buffers.fill(0, make_chunk(1), None).message(cache)
        chunk = buffers.fill(0, make_chunk(2), None)
        assert torch.equal(MappedBuffers().tensors_of(chunk.message({}))["b"], make_chunk(2)["b"])

    def test_larger_chunk(self):
        buffers, cache, other = StagingBuffers(), {}, MappedBuffers()
        for number, rows in enumerate([2, 2, 2, 50, 2, 2, 2]):
            other.tensors_of(buffers.fill(number, make_chunk(number, rows), None).message(cache))
        assert sorted(other._tensors) == [1, 2, 3, 4, 5, 6], "no views of memory that was too small"
        for number, rows in enumerate([2, 2, 2, 50, 2, 2, 2]):
            given = make_chunk(number, rows)
            got = other.tensors_of(buffers.fill(number, given, None).message(cache))
            assert got.keys() == given.keys()
            assert all(torch.equal(got[name], given[name]) for name in given)

    def test_different_layout(self):
        buffers, cache, other = StagingBuffers(), {}, MappedBuffers()
        other.tensors_of(buffers.fill(0, make_chunk(1), None).message(cache))
        given = {"c": torch.arange(6.0), "a": torch.ones(1)}
        got = other.tensors_of(buffers.fill(0, given, torch.bfloat16).message(cache))
        assert list(got) == ["c", "a"]
        assert got["c"].tolist() == list(range(6))


class OnAGPU(torch.Tensor):
    """A tensor that claims to be on a GPU."""

    is_cuda = True
    __torch_function__ = torch._C._disabled_torch_function_impl


class LateReader:
    """A worker that asks for the next chunk while it still reads the last two."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.chunks: list[Path | StagedChunk] = []
        self.checksums: dict[str, int] = {}

    def request(self, *_, timeout):
        pass

    def send_chunk(self, chunk, timeout):
        self.chunks.append(chunk)

    def expect(self, kind, timeout):
        for chunk in self.chunks[-2:]:
            for name, tensor in chunk.tensors.items() if isinstance(chunk, StagedChunk) else ():
                assert torch.equal(tensor, self.tensors[name].to(tensor.dtype)), name

    def send(self, checksums, timeout):
        self.checksums = checksums

    def answer(self, timeout):
        pass


class TestSendWeights:
    @pytest.fixture(autouse=True)
    def small(self, monkeypatch):
        monkeypatch.setattr(workers, "_CHUNK_BYTES", 400)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    @pytest.mark.parametrize("on_gpu", ["1" * 10, "1010101010", "1001001100", "0110110011", "0" * 10])
    @pytest.mark.parametrize(("own", "dtype"), [("float32", None), ("float32", "bfloat16"), ("float64", "bfloat16")])
    def test_no_chunk_is_overwritten_too_early(self, on_gpu, own, dtype, tmp_path):
        dtype = dtype and getattr(torch, dtype)
        tensors = {f"w{n}": torch.full((100 + n,), n + 0.3, dtype=getattr(torch, own)) for n in range(10)}
        group, worker = workers.Workers(TransformersEngine(), 1), LateReader(tensors)
        group.folder = tmp_path

        def weights():
            for flag, (name, tensor) in zip(on_gpu, tensors.items(), strict=True):
                yield name, tensor.as_subclass(OnAGPU) if flag == "1" else tensor

        for _ in range(2):
            manifest, given = WeightManifest(dtype=dtype), PolicyWeights(config=PretrainedConfig(), tensors=weights)
            assert group.send_weights([worker], given, manifest, 0, 0, 1) == []
            assert manifest.checksums == named_checksums((n, t.to(dtype or t.dtype)) for n, t in tensors.items())
            assert worker.checksums == manifest.checksums
            full = [chunk for chunk in worker.chunks[:-1] if isinstance(chunk, StagedChunk)]
            assert all(sum(t.nbytes for t in chunk.tensors.values()) >= 400 for chunk in full)
            for tensor in tensors.values():
                tensor += 1
            worker.chunks.clear()
        assert not list(tmp_path.iterdir())


class CountingBuffers(MappedBuffers):
    """Buffers that count how often they were synchronized."""

    count = 0

    def synchronize(self):
        self.count += 1


@pytest.mark.parametrize("verify", [True, False])
def test_worker_computes_checksums_if_its_engine_does_not_verify(verify, tmp_path):
    policy, buffers = CausalPolicy(config=SMALL, characters="0123456789>"), CountingBuffers()
    policy.build()
    engine = TransformersEngine()
    engine.verify = verify
    given = {name: tensor.clone() for name, tensor in policy.weights()}
    checksums = dict.fromkeys(given, 7)
    trainer, connection = Pipe()
    trainer.send(write_file(given, tmp_path / "weights"))
    trainer.send(checksums)
    worker = WorkerRequests(connection, Pipe()[1], engine, buffers)
    worker.receive_weights(policy.weights().config, 0, 0)
    assert trainer.recv() == ("next", None)
    assert worker._manifest.checksums == (checksums if verify else named_checksums(given.items()))
    assert buffers.count == 2, "before the next chunk, and at the end"


def test_portable_error_has_no_traceback():
    def fail():
        weights = torch.ones(3)
        raise ValueError(f"{weights.sum():g} weights")

    with pytest.raises(ValueError, match="3 weights") as caught:
        fail()
    sent = portable(caught.value)
    assert (type(sent), str(sent), sent.__traceback__) == (ValueError, "3 weights", None)


@pytest.mark.gpu
@ON_A_GPU
def test_pool_reuses_and_releases_buffers():
    with torch.device("cuda"):
        policy = CausalPolicy(config=WIDE | {"num_hidden_layers": 30}, characters="0123456789>")
        policy.build()
    before = torch.cuda.memory_allocated()
    pool = EnginePool(TransformersEngine(dtype="bfloat16"))
    try:
        for step in range(3):
            with torch.no_grad():
                for number, weight in enumerate(policy.parameters()):
                    weight.fill_(step + number / 1000)
            pool.load_weights(policy.weights(), step)
            held = pool.held_weights()
            assert all(torch.equal(held[name].cuda(), tensor.bfloat16()) for name, tensor in policy.weights())
        assert len(pool._workers._buffers._chunks) > len(pool._workers._buffers._memory)
    finally:
        pool.close()
    assert torch.cuda.memory_allocated() - before < 2**20, "the buffers are released; checksums keep a small table"
