"""Weights through memory of the GPU into the processes of a pool: what stays, what is told, what is given back."""

from __future__ import annotations

from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch
from transformers import PretrainedConfig

from lgrpo import CausalPolicy, TransformersEngine
from lgrpo.engines import EnginePool, pool_parcels, pool_process
from lgrpo.engines.ledger import Sent
from lgrpo.engines.pool_member import Member, portable
from lgrpo.engines.pool_parcels import OpenTrays, Tray, Trays, in_a_file
from lgrpo.functional import named_checksums
from lgrpo.types import PolicyWeights

ON_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
WIDE = {"model_type": "llama", "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8}
WIDE |= {"num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 64, "tie_word_embeddings": True}
SMALL = WIDE | {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}


def parcel(start: float, rows: int = 2) -> dict[str, torch.Tensor]:
    return {"a": torch.full((rows, 3), start), "b": torch.full((5,), start + 1)}


@pytest.fixture
def in_this_process(monkeypatch):
    """CUDA's memory is opened in another process; here the other end has the same."""
    monkeypatch.setattr(pool_parcels, "reduce_tensor", lambda memory: (lambda memory: memory, (memory,)))
    monkeypatch.setattr(pool_parcels, "_on_own_device", lambda arguments: arguments)


class TestTrays:
    def test_two_more_may_be_filled_before_one_is_lost(self):
        trays = Trays()
        filled = [trays.fill(number, parcel(number), None) for number in range(3)]
        assert [float(tray.tensors["a"][0, 0]) for tray in filled] == [0, 1, 2]
        again = trays.fill(3, parcel(3), None)
        assert again.memory is filled[0].memory
        assert [float(tray.tensors["b"][0]) for tray in filled] == [4, 2, 3]

    def test_they_are_cast_to_what_the_engine_holds(self):
        tray = Trays().fill(0, parcel(0.1), torch.bfloat16)
        assert {tensor.dtype for tensor in tray.tensors.values()} == {torch.bfloat16}
        assert torch.equal(tray.tensors["a"], parcel(0.1)["a"].bfloat16())

    def test_the_next_sync_finds_all_as_it_was(self):
        trays = Trays()
        first = [trays.fill(number, parcel(number), None) for number in range(4)]
        assert all(trays.fill(number, parcel(9), None) is tray for number, tray in enumerate(first))
        assert all(float(tray.tensors["a"][1, 2]) == 9 for tray in first)

    def test_a_validation_before_the_first_step(self):
        trays = Trays()
        with torch.inference_mode():
            given = parcel(1)
            trays.fill(0, given, None)
        assert float(trays.fill(0, parcel(2), None).tensors["a"][0, 0]) == 2
        assert float(trays.fill(0, given, None).tensors["a"][0, 0]) == 1

    def test_memory_that_would_be_lost_is_kept(self):
        trays = Trays()
        memory = trays.fill(0, parcel(1), None).memory
        trays.lose()
        trays.clear()
        assert trays.fill(0, parcel(2), None).memory is memory


@pytest.mark.usefixtures("in_this_process")
class TestWhatIsTold:
    def test_what_is_known_is_not_told_again(self):
        trays, known, other = Trays(), {}, OpenTrays()
        for sync in range(3):
            told = []
            for number in range(5):
                tray = trays.fill(number, parcel(10 * sync + number), None)
                told.append(tray.packed(known))
                assert float(other.unpacked(told[-1])["a"][1, 2]) == 10 * sync + number
            assert [contents is not None for *_, contents, _ in told] == [sync == 0] * 5
            assert [where is not None for *_, where in told] == [sync == 0] * 3 + [False] * 2

    def test_another_process_is_told_all(self):
        trays, known = Trays(), {}
        trays.fill(0, parcel(1), None).packed(known)
        tray = trays.fill(0, parcel(2), None)
        assert torch.equal(OpenTrays().unpacked(tray.packed({}))["b"], parcel(2)["b"])

    def test_a_larger_parcel(self):
        trays, known, other = Trays(), {}, OpenTrays()
        for number, rows in enumerate([2, 2, 2, 50, 2, 2, 2]):
            other.unpacked(trays.fill(number, parcel(number, rows), None).packed(known))
        assert sorted(other._last) == [1, 2, 3, 4, 5, 6], "no tensor in memory that was too small"
        for number, rows in enumerate([2, 2, 2, 50, 2, 2, 2]):
            given = parcel(number, rows)
            got = other.unpacked(trays.fill(number, given, None).packed(known))
            assert got.keys() == given.keys()
            assert all(torch.equal(got[name], given[name]) for name in given)

    def test_other_contents(self):
        trays, known, other = Trays(), {}, OpenTrays()
        other.unpacked(trays.fill(0, parcel(1), None).packed(known))
        given = {"c": torch.arange(6.0), "a": torch.ones(1)}
        got = other.unpacked(trays.fill(0, given, torch.bfloat16).packed(known))
        assert list(got) == ["c", "a"]
        assert got["c"].tolist() == list(range(6))


class OnAGPU(torch.Tensor):
    """Says that it is, since there is none here."""

    is_cuda = True
    __torch_function__ = torch._C._disabled_torch_function_impl


class Late:
    """Asks for more and has still to read some of what it was given before, as a member may."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.given: list[Path | Tray] = []
        self.noted: dict[str, int] = {}

    def give(self, chunk, config, version, number, timeout):
        self.given.append(chunk)

    def expect(self, word, timeout):
        for tray in self.given[-2:]:
            for name, tensor in tray.tensors.items() if isinstance(tray, Tray) else ():
                assert torch.equal(tensor, self.tensors[name].to(tensor.dtype)), name

    def send(self, noted, timeout):
        self.noted = noted

    def answer(self, timeout):
        pass


class TestAHandover:
    @pytest.fixture(autouse=True)
    def small(self, monkeypatch):
        monkeypatch.setattr(pool_process, "_PARCEL", 400)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    @pytest.mark.parametrize("on_gpu", ["1" * 10, "1010101010", "1001001100", "0110110011", "0" * 10])
    @pytest.mark.parametrize(("own", "dtype"), [("float32", None), ("float32", "bfloat16"), ("float64", "bfloat16")])
    def test_nothing_is_overwritten_that_is_still_to_be_read_or_noted(self, on_gpu, own, dtype, tmp_path):
        dtype = dtype and getattr(torch, dtype)
        tensors = {f"w{n}": torch.full((100 + n,), n + 0.3, dtype=getattr(torch, own)) for n in range(10)}
        trays, member = Trays(), Late(tensors)

        def weights():
            for flag, (name, tensor) in zip(on_gpu, tensors.items(), strict=True):
                yield name, tensor.as_subclass(OnAGPU) if flag == "1" else tensor

        for _ in range(2):
            sent, given = Sent(dtype=dtype), PolicyWeights(config=PretrainedConfig(), tensors=weights)
            assert pool_process.hand_over([member], given, sent, 0, trays, tmp_path, 1) == {}
            assert sent.checksums == named_checksums((n, t.to(dtype or t.dtype)) for n, t in tensors.items())
            assert member.noted == sent.checksums
            full = [tray for tray in member.given[:-1] if isinstance(tray, Tray)]
            assert all(sum(t.nbytes for t in tray.tensors.values()) >= 400 for tray in full)
            for tensor in tensors.values():
                tensor += 1
            member.given.clear()
        assert not list(tmp_path.iterdir())


class Watched(OpenTrays):
    """Notes how often all was waited for."""

    times = 0

    def finish(self):
        self.times += 1


@pytest.mark.parametrize("verify", [True, False])
def test_a_member_takes_checksums_where_its_engine_is_not_compared(verify, tmp_path):
    policy, trays = CausalPolicy(config=SMALL, characters="0123456789>"), Watched()
    policy.build()
    engine = TransformersEngine()
    engine.verify = verify
    given = {name: tensor.clone() for name, tensor in policy.weights()}
    noted = dict.fromkeys(given, 7)
    trainer, own = Pipe()
    trainer.send(noted)
    member = Member(own, engine, trays)
    member.receive(policy.weights().config, 0, in_a_file(given, tmp_path / "weights"))
    assert trainer.recv() == ("next", None)
    assert member._sent.checksums == (noted if verify else named_checksums(given.items()))
    assert trays.times == 2, "before more is asked for, and at the end"


def test_an_error_lets_go_of_what_it_came_from():
    def fail():
        weights = torch.ones(3)
        raise ValueError(f"{weights.sum():g} weights")

    with pytest.raises(ValueError, match="3 weights") as caught:
        fail()
    sent = portable(caught.value)
    assert (type(sent), str(sent), sent.__traceback__) == (ValueError, "3 weights", None)


@pytest.mark.gpu
@ON_A_GPU
def test_a_pool_of_real_processes_goes_round_the_trays_and_gives_them_back():
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
        assert len(pool._trays._last) > len(pool._trays._memory), "more parcels than trays"
    finally:
        pool.close()
    assert torch.cuda.memory_allocated() == before
