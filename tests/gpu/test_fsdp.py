"""FSDP and FSDP2 with vLLM in one process on a GPU. ``pytest tests/gpu -s``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers import largest_difference

pytest.importorskip("vllm")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Run it in a new process, whose process groups vLLM and Lightning share."""
    folder = tmp_path_factory.mktemp("one_rank")
    command = [sys.executable, "-m", "tests.processes.one_rank", str(folder)]
    subprocess.run(command, check=True, timeout=300, cwd=Path(__file__).parents[2])
    return folder


@pytest.mark.parametrize("kind", ["fsdp", "fsdp2"])
def test_sharded_policy(folder, kind):
    seen = torch.load(folder / f"{kind}.pt")
    watch, later = seen["watch"], seen["later"]
    assert seen["steps"] == (4, 4)
    assert watch["agree"] == [True, False, True, False], "vLLM holds the policy at a sync, then an older one"
    assert watch["dtypes"] == {torch.float32}, "weights stay in float32; computation is in bfloat16"
    assert watch["devices"] == {"cuda"}
    for before, after in zip(range(3), range(1, 4), strict=True):
        assert largest_difference(watch["policies"][before], watch["policies"][after]) > 1e-5
    assert all(row["fault/nonfinite_steps"] == 0 for row in seen["logged"] if "fault/nonfinite_steps" in row)
    assert all(tensor.isfinite().all() for tensor in seen["end"].values())
    assert later["policies"].keys() == {2, 3}
    assert largest_difference(watch["policies"][2], later["policies"][2]) == 0, "it resumes from the same weights"
    assert later["agree"] == [True, False]
    print(f"{kind}: resumed and straight end differ by {largest_difference(seen['end'], seen['later_end']):.1e}")
