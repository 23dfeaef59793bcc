"""The fast settings with several ranks, and what FSDP2 does with one."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.nn.parallel import DistributedDataParallel

from lgrpo.policy.compilation import ActivationBudgetBackend
from tests.helpers import MODEL, a_batch, largest_difference, tiny_policy
from tests.processes import two_fast

LAYERS = 2


@pytest.mark.slow("starts two ranks, and compiles")
@pytest.mark.parametrize("kind", two_fast.RUNS)
def test_fast_settings_on_two_ranks(tmp_path, kind):
    """Packed rows, shared prompts, compiled layers, a pool and micro-batches by tokens give the plain run's steps."""
    command = [sys.executable, "-m", "tests.processes.two_fast", kind, str(tmp_path)]
    subprocess.run(command, check=True, timeout=600, cwd=Path(__file__).parents[2], capture_output=True)
    for name in two_fast.RUNS[kind][1:]:
        empty = []
        for rank in (0, 1):
            plain, fast = (torch.load(tmp_path / f"{run}-{rank}.pt") for run in ("plain", name))
            assert (plain["graphs"], fast["graphs"] > 0) == (0, True)
            assert (plain["micro_batches"], fast["micro_batches"]) == (4, 4)
            assert min(plain["num_rows"]) > 0
            empty.append([count == 0 for count in fast["num_rows"]])
            assert fast["io"] == ("BackgroundCheckpointIO" if kind == "ddp" else "AtomicCheckpointIO")
            assert len(fast["tokens"]) == len(plain["tokens"]) == 4
            assert all(map(torch.equal, fast["tokens"], plain["tokens"]))
            for metric in ("train/loss", "train/grad_norm"):
                expected = [row[metric] for row in plain["logged"]]
                assert [row[metric] for row in fast["logged"]] == pytest.approx(expected, rel=1e-5, abs=1e-6), metric
            assert largest_difference(fast["weights"], plain["weights"]) < 1e-6
        assert any(empty[0]), "the lengths need all micro-batches"
        assert empty[0] == empty[1], "the ranks must gather weights in the same micro-batches"


def test_a_layer_is_one_graph_under_ddp(monkeypatch):
    """Torch would split it at buckets, which are smaller than a layer of a large model."""
    sizes = []
    monkeypatch.setattr(ActivationBudgetBackend, "__call__", lambda self, graph, _: sizes.append(1) or graph.forward)
    monkeypatch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 5000)
    monkeypatch.setattr(DistributedDataParallel, "_active_ddp_module", SimpleNamespace(bucket_bytes_cap=5000))
    policy = tiny_policy(config=MODEL | {"num_hidden_layers": LAYERS}, compile=True)
    policy.build()
    batch = a_batch(size=7, width=11, group_size=1)
    torch._dynamo.reset()
    policy(batch.tokens, batch.completion_mask, 1.0)
    torch._dynamo.reset()
    assert len(sizes) == 1, "all layers share one graph"
    assert torch._dynamo.config.optimize_ddp, "other compiled code is not affected"


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def make_policy(**settings):
    torch.manual_seed(0)
    policy = tiny_policy(config=MODEL | {"num_hidden_layers": LAYERS}, **settings)
    policy.build()
    return policy


def gradients(policy, num_micro_batches=3):
    """Return the gradients after several backward passes, the last of which reduces them."""
    for number in range(num_micro_batches):
        is_last = number == num_micro_batches - 1
        batch = a_batch(seed=number)
        with nullcontext() if is_last else policy.accumulating_gradients():
            policy(batch.tokens, batch.completion_mask, 1.0)[0].sum().backward()
    whole = [(name, parameter.grad) for name, parameter in policy.named_parameters()]
    return {name: gradient.to_local() if hasattr(gradient, "to_local") else gradient for name, gradient in whole}


@pytest.mark.parametrize("reshard", [None, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gathers_and_reductions_of_fsdp2(mesh, monkeypatch, reshard, checkpointing):
    """By default one process gathers and reduces each layer once a step, not in every micro-batch."""
    counts, reduce = Counter(), _fsdp_param_group.foreach_reduce
    gather = _fsdp_param_group.FSDPParamGroup._to_unsharded

    def counted_reduce(*arguments):
        counts["reductions"] += 1
        return reduce(*arguments)

    def counted_gather(group):
        counts["gathers"] += not group.is_unsharded
        gather(group)

    monkeypatch.setattr(_fsdp_param_group, "foreach_reduce", counted_reduce)
    monkeypatch.setattr(_fsdp_param_group.FSDPParamGroup, "_to_unsharded", counted_gather)
    expected = gradients(make_policy())
    policy = make_policy(reshard=reshard, gradient_checkpointing=checkpointing)
    policy.shard_fsdp2(mesh)
    assert largest_difference(gradients(policy), expected) < 1e-6
    groups = LAYERS + 1  # the embedding and the head are one
    if reshard:
        assert counts == {"gathers": 3 * (2 * LAYERS + 1), "reductions": 3 * groups}
    else:
        assert counts == {"gathers": groups, "reductions": groups}


def test_weights_kept_by_fsdp2_are_freed(mesh):
    """A pass without gradients leaves gathered weights, which the next step must not use."""
    policy, plain, batch = make_policy(), make_policy(), a_batch()
    policy.shard_fsdp2(mesh)
    sharded = list(policy.parameters())
    with torch.no_grad():
        policy(batch.tokens, batch.completion_mask, 1.0)
        policy.free_gathered()
        for one in (sharded, plain.parameters()):
            for parameter in one:
                parameter.mul_(1.5)
        got, expected = (p(batch.tokens, batch.completion_mask, 1.0)[0] for p in (policy, plain))
    assert torch.equal(got, expected)


def test_one_process_copies_no_weights_for_a_sync(mesh):
    policy = make_policy()
    policy.shard_fsdp2(mesh)
    own = {parameter.to_local().data_ptr() for parameter in policy.parameters()}
    assert {tensor.data_ptr() for _, tensor in policy.weights()} == own
