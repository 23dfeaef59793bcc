"""Actions of rank 0 in which another rank takes part."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import PretrainedConfig

from lgrpo.engines import EngineError
from lgrpo.engines.servers.rank_zero import RankZeroChannel
from lgrpo.weights import Adapter, PolicyWeights

NUM_TENSORS = 4


def gathered(taken, part):
    """Return a source of tensors that all ranks must take together, and that counts those taken here."""

    def tensors():
        for number in range(NUM_TENSORS):
            tensor = torch.ones(2, 2)
            dist.all_reduce(tensor)
            taken[part] = taken.get(part, 0) + 1
            yield f"{number}.weight", tensor

    return tensors


def fail(weights):
    next(iter(weights))
    raise RuntimeError("the disk is full")


def take_part(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    channel, taken, config = RankZeroChannel(60.0), {}, PretrainedConfig()
    whole = PolicyWeights(config=config, tensors=gathered(taken, "whole"))
    adapter = Adapter(rank=1, base=gathered(taken, "base"), tensors=gathered(taken, "adapter"))
    adapted = PolicyWeights.adapted(config, adapter)
    adapted.compute_dtype = torch.bfloat16

    def lead(act, weights):
        return channel.lead(act, weights, lambda: "outcome") if rank == 0 else channel.follow(weights)

    def act(weights):
        next(weights.adapter.base())
        assert len(dict(weights)) == NUM_TENSORS
        return weights.compute_dtype

    assert lead(act, adapted) == (torch.bfloat16 if rank == 0 else "outcome")
    assert taken == {"base": 2 * NUM_TENSORS, "adapter": NUM_TENSORS}
    with pytest.raises(RuntimeError if rank == 0 else EngineError, match="the disk is full"):
        lead(fail, whole)
    assert taken["whole"] == NUM_TENSORS, "also those after the failure"
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow("starts two ranks")
def test_all_ranks_take_the_same_tensors(tmp_path):
    """Rank 0 stops early, iterates again, and fails; the other rank takes every tensor that it gathers."""
    mp.spawn(take_part, (tmp_path / "store",), nprocs=2)
