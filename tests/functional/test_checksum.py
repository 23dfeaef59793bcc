"""Checksums depend on every bit and its index."""

from __future__ import annotations

import pytest
import torch

from lgrpo.functional import named_checksums, tensor_checksum, tensor_checksums
from lgrpo.functional.checksum import _BLOCK, _SHIFT, _START, _STEP, _kernel

BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


@pytest.mark.parametrize("dtype", BITS)
def test_every_single_bit_changes_the_checksum(dtype):
    tensor = torch.randn(64, generator=torch.Generator().manual_seed(0)).to(dtype)
    seen = {int(tensor_checksum(tensor))}
    bits = tensor.view(BITS[dtype])
    width = 8 * tensor.element_size()
    for index in range(len(tensor)):
        for bit in range(width):
            flipped = bits.clone()
            flipped[index] ^= 1 << bit if bit < width - 1 else -(1 << bit)
            seen.add(int(tensor_checksum(flipped.view(dtype))))
    assert len(seen) == 1 + len(tensor) * width, "all are different"


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("size", [4096, 4099])
def test_changed_signs_change_the_checksum(dtype, size):
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = int(tensor_checksum(tensor))
    for step in (1, 2, 4, 8, 16):
        for start in range(step):
            other = tensor.clone()
            other[start::step] *= -1
            assert int(tensor_checksum(other)) != whole
    for first in range(0, 64):
        other = tensor.clone()
        other[[first, first + 4]] *= -1
        assert int(tensor_checksum(other)) != whole, "two signs at the same index modulo 4"


def test_checksum_of_several_blocks_is_that_of_the_whole():
    numbers = torch.randint(-(2**62), 2**62, (2 * _BLOCK + 5,), generator=torch.Generator().manual_seed(0))
    weights = torch.arange(len(numbers)) * _STEP + _START
    expected = (((numbers >> 31) ^ numbers) + _SHIFT) * weights
    assert int(tensor_checksum(numbers)) == int(expected.sum())


@pytest.mark.parametrize("size", [7, 8, 9, 63, 64, 72])
def test_tensors_of_single_bytes(size):
    """They are read in words of eight bytes only if there are whole ones."""
    tensor = torch.arange(size).to(torch.int8)
    seen = {int(tensor_checksum(tensor))}
    for index in range(size):
        other = tensor.clone()
        other[index] += 1
        seen.add(int(tensor_checksum(other)))
    assert len(seen) == 1 + size


def several(device: str) -> list[torch.Tensor]:
    """Return tensors of every type and of many sizes, two of them not aligned to eight bytes."""
    draw = torch.Generator().manual_seed(0)
    sizes = [1, 3, 4, 4096, 4099, 2**20 + 4, 2]
    tensors = [torch.randn(size, generator=draw).to(dtype) for size in sizes for dtype in BITS]
    tensors += [torch.tensor([-3, 5], dtype=torch.int8), torch.randn(8, 6, generator=draw).t(), torch.zeros(0)]
    tensors = [tensor.to(device) for tensor in tensors]
    return [*tensors, tensors[10][1:], tensors[0][1:]]


@pytest.mark.parametrize("num_bytes", [2**28, 20000, 0])
def test_checksums_of_many_tensors_equal_those_of_each(num_bytes, monkeypatch):
    monkeypatch.setattr("lgrpo.functional.checksum.CHUNK_BYTES", num_bytes)
    tensors = several("cpu")
    assert tensor_checksums(tensors).tolist() == [int(tensor_checksum(tensor)) for tensor in tensors]
    named = named_checksums((str(index), tensor) for index, tensor in enumerate(tensors))
    assert named == {str(index): int(tensor_checksum(tensor)) % 2**64 for index, tensor in enumerate(tensors)}
    assert named_checksums({}.items()) == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_checksums_of_many_tensors_are_equal_on_a_gpu():
    assert tensor_checksums(several("cuda")).tolist() == tensor_checksums(several("cpu")).tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("size", [1, 7, 4096, 4 * 4096 + 4, 4 * 4096 + 1, 4 * _BLOCK + 12])
def test_checksum_is_equal_on_a_gpu(dtype, size):
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert _kernel(torch.device("cuda", 0)) is not None, "torch for CUDA comes with Triton"
    assert int(tensor_checksum(tensor.cuda())) == int(tensor_checksum(tensor))
    assert int(tensor_checksum(tensor.cuda()[1:])) == int(tensor_checksum(tensor[1:]))
