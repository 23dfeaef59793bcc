"""The NCCL transfer without a GPU: rejected settings, syncs, and failures during a sync.

Two things differ from GPUs: the process group uses gloo, and the servers are threads that answer vLLM's routes, join
the group and receive the broadcasts. Addresses, ranks, requests and timeouts are real.
"""

from __future__ import annotations

import json
import math
import threading
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
import torch.distributed as dist

from lgrpo.engines import EngineError, VLLMServerEngine
from lgrpo.engines.manifest import WeightManifest
from lgrpo.engines.recovery import EngineFailure
from lgrpo.engines.servers.client import VLLMServer
from lgrpo.engines.servers.transfer import nccl
from lgrpo.engines.servers.transfer.base import PeerFailure
from lgrpo.engines.servers.transfer.nccl import NCCLTransfer, check_separate_gpus, own_address
from lgrpo.engines.weight_files import read_folder
from lgrpo.weights import PolicyWeights

vllm = pytest.importorskip("vllm")
NCCLWeightTransferInitInfo, NCCLWeightTransferUpdateInfo = (
    getattr(pytest.importorskip("vllm.distributed.weight_transfer.nccl_engine"), f"NCCLWeightTransfer{stage}Info")
    for stage in ("Init", "Update")
)

TENSORS = {
    "a": torch.randn(3, 5, dtype=torch.bfloat16),
    "b": torch.randn(7, dtype=torch.float32),
    "c": torch.randn(4, 4, dtype=torch.float32),
}


class Group:
    """Process group of gloo instead of NCCL."""

    disabled = False

    def __init__(self, rendezvous, rank):
        limit = timedelta(seconds=10)
        store = dist.TCPStore(
            rendezvous["master_address"],
            rendezvous["master_port"],
            rendezvous["world_size"],
            rank == 0,
            timeout=limit,
            wait_for_workers=False,
        )
        self.store = store
        self.gloo = dist.ProcessGroupGloo(store, rank, rendezvous["world_size"], limit)
        self.is_destroyed = False

    def broadcast(self, packed):
        self.gloo.broadcast([packed], dist.BroadcastOptions()).wait()

    def destroy(self):
        self.is_destroyed = True


class Server(ThreadingHTTPServer):
    """Answers vLLM's routes. At the route ``fails_at`` it closes the connection, or does not answer."""

    daemon_threads = True

    def __init__(self, num_workers=1, version=vllm.__version__):
        super().__init__(("127.0.0.1", 0), Handler)
        self.num_workers, self.version = num_workers, version
        self.fails_at, self.is_silent, self.over = "", False, threading.Event()
        self.asked, self.held, self.groups, self.packed_at = [], {}, [], set()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def client(self):
        return VLLMServer(f"http://127.0.0.1:{self.server_address[1]}", None)

    def init(self, info):
        NCCLWeightTransferInitInfo(**info)  # raises if vLLM does not know a field
        self.packed_at |= {"init"} if info.get("packed") else set()
        ranks = range(info["rank_offset"], info["rank_offset"] + self.num_workers)
        self.groups = in_threads([lambda rank=rank: Group(info, rank) for rank in ranks])

    def update(self, info):
        NCCLWeightTransferUpdateInfo(**info)
        self.packed_at |= {"update"} if info.get("packed") else set()
        dtypes = [getattr(torch, name) for name in info["dtype_names"]]
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(info["shapes"], dtypes, strict=True)]

        def receive(group):
            group.broadcast(packed := torch.empty(sum(sizes), dtype=torch.uint8))
            return packed

        packed = in_threads([lambda group=group: receive(group) for group in self.groups])[-1]
        for name, dtype, shape, piece in zip(info["names"], dtypes, info["shapes"], packed.split(sizes), strict=True):
            self.held[name] = piece.view(dtype).view(shape)


def in_threads(functions):
    return nccl.run_concurrently(functions, 10.0)


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        self.answer({"version": self.server.version, "world_size": self.server.num_workers})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"null")
        self.server.asked.append(self.path)
        if self.path == self.server.fails_at:
            if self.server.is_silent:
                self.server.over.wait()
            self.connection.close()
            return
        if self.path == "/init_weight_transfer_engine":
            self.server.init(body["init_info"])
        elif self.path == "/update_weights":
            self.server.update(body["update_info"])
        self.answer({})

    def answer(self, content):
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture(scope="module", autouse=True)
def finished_threads():
    """Wait for abandoned threads at the end: gloo aborts the process if they still wait when Python exits."""
    yield
    for thread in threading.enumerate():
        if thread.name == "nccl-transfer":
            thread.join(15)


@pytest.fixture
def servers():
    servers = [Server(num_workers=2), Server()]
    yield servers
    for server in servers:
        server.over.set()
        server.shutdown()
        server.server_close()


@pytest.fixture
def transfer(tmp_path, monkeypatch):
    def broadcast(group, tensors, device):
        group.broadcast(torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors.values()]))

    monkeypatch.setattr(nccl, "join", lambda rendezvous, device: Group(rendezvous, 0))
    monkeypatch.setattr(nccl, "broadcast", broadcast)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", NoStream)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    return NCCLTransfer(tmp_path, 5.0)


class NoStream:
    def synchronize(self):
        pass


def weights(tensors):
    return PolicyWeights(config=None, tensors=lambda: iter(tensors.items()))


def holds(server, tensors):
    return server.held.keys() == tensors.keys() and all(torch.equal(server.held[n], t) for n, t in tensors.items())


def test_one_group_serves_all_workers_and_all_syncs(transfer, servers):
    clients = [server.client for server in servers]
    transfer.on_connect(clients)
    group = transfer._group
    for tensors in (TENSORS, {name: 2 * tensor for name, tensor in TENSORS.items()}):
        sent = WeightManifest()
        assert transfer.send(clients, weights(tensors), sent) == {}
        assert sent.shapes == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        assert all(holds(server, tensors) for server in servers)
    assert transfer._group is group
    assert not group.is_destroyed
    assert group.gloo.size() == 4
    for server in servers:
        assert server.asked.count("/init_weight_transfer_engine") == 1
        assert server.asked.count("/update_weights") == 4, "two precisions, two syncs"
        assert len(server.packed_at) == 1
    transfer.close()
    assert group.is_destroyed


def test_other_servers_need_another_group(transfer, servers):
    clients = [server.client for server in servers]
    transfer.on_connect(clients)
    first = transfer._group
    assert transfer.send(clients[1:], weights(TENSORS), WeightManifest()) == {}
    assert first.is_destroyed
    assert transfer._group.gloo.size() == 2
    assert holds(servers[1], TENSORS)
    clients[0] = servers[0].client  # as after a restart
    transfer.on_connect(clients[:1])
    assert transfer._group.gloo.size() == 2, "a restarted server joins at the next sync"
    assert transfer.send(clients, weights(TENSORS), WeightManifest()) == {}
    assert all(holds(server, TENSORS) for server in servers)


@pytest.mark.parametrize("is_silent", [False, True])
@pytest.mark.parametrize("path", ["/start_weight_update", "/update_weights", "/finish_weight_update"])
def test_if_one_server_fails_all_fail(transfer, servers, path, is_silent):
    clients = [server.client for server in servers]
    transfer.on_connect(clients)
    group = transfer._group
    transfer.timeout = 1.0 if is_silent else 5.0
    servers[1].fails_at, servers[1].is_silent = path, is_silent
    sent = WeightManifest()
    failures = transfer.send(clients, weights(TENSORS), sent)
    assert list(failures) == clients
    assert [isinstance(failure, PeerFailure) for failure in failures.values()] == [False, True]
    assert "within 1 s" in str(failures[clients[0]]) if is_silent else clients[1].url in str(failures[clients[0]])
    assert group.is_destroyed
    assert sent.shapes.keys() == TENSORS.keys(), "complete, although not everything was sent"
    with transfer.files([]), transfer.files([]):  # two servers start at the same time
        transfer.on_connect([])
        held = read_folder(transfer.folder)
        assert all(torch.equal(held[name], tensor) for name, tensor in TENSORS.items())
    assert not list(transfer.folder.glob("*.safetensors"))


def test_a_group_that_cannot_form_is_an_error_at_the_start(transfer, servers):
    servers[1].fails_at = "/init_weight_transfer_engine"
    with pytest.raises(EngineFailure, match=r"could not form an NCCL group at 127\.0\.0\.1: .* transfer 'file'"):
        transfer.on_connect([server.client for server in servers])


def test_the_trainer_has_a_timeout():
    with pytest.raises(EngineFailure, match=r"did not complete this step within 0\.2 s"):
        nccl.run_concurrently([int, threading.Event().wait], 0.2)


def test_no_server_is_available(transfer):
    sent = WeightManifest()
    assert transfer.send([], weights(TENSORS), sent) == {}
    assert sent.shapes.keys() == TENSORS.keys()
    assert read_folder(transfer.folder).keys() == TENSORS.keys(), "the next server starts from the files"


def test_one_failure_counts_once(monkeypatch):
    engine = VLLMServerEngine(num_servers=4, max_failures=1)
    group, server = engine.group, VLLMServer("http://127.0.0.1:9", None)
    monkeypatch.setattr(group, "_restart", lambda *_: server)
    for failure in (PeerFailure("a"), EngineFailure("b"), PeerFailure("c")):
        with pytest.warns(UserWarning, match="recovering from failure"):
            group.recover(server, failure, group.cancelled)
    assert engine.faults.num_failures == 1
    with pytest.raises(EngineError):
        group.recover(server, EngineFailure("d"), group.cancelled)


def test_another_version_of_vllm_is_rejected(transfer):
    with pytest.raises(EngineError, match=r"has version 0\.1, .* requires the same version on both sides"):
        transfer.on_connect([Server(version="0.1").client])


def test_an_address_of_another_machine(transfer, servers):
    transfer.address = "192.0.2.1"  # reserved for documentation
    with pytest.raises(EngineError, match=r"192\.0\.2\.1 is not an address of this machine .* transfer_address"):
        transfer.on_connect([server.client for server in servers])
    with pytest.raises(ValueError, match="transfer_address applies to transfer 'nccl', and transfer is 'file'"):
        VLLMServerEngine(transfer_address="127.0.0.1")


def test_own_address():
    assert own_address(["http://127.0.0.1:8000", "http://localhost:8001/"]) == "127.0.0.1"
    with pytest.raises(EngineError, match=r"this machine has no route to"):
        own_address(["http://no.such.host.invalid:8000"])


def test_separate_gpus():
    check_separate_gpus("0", [["5", "6"], ["7"]])
    with pytest.raises(EngineError, match=r"GPU 7 is assigned to the trainer and to server 1, .* transfer 'file'"):
        check_separate_gpus("7", [["6"], ["7"]])
    with pytest.raises(EngineError, match="GPU 7 is assigned to server 0 and to server 1"):
        check_separate_gpus("0", [["7"], ["7"]])


def test_the_same_gpu_number_on_two_machines(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(EngineError, match="GPU 3 is assigned to the trainer and to server 0"):
        VLLMServerEngine(transfer="nccl").group.launcher.check_separate_gpus()
    engine = VLLMServerEngine(transfer="nccl", environment_variables={"NCCL_HOSTID": "other"})
    engine.group.launcher.check_separate_gpus()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu():
    with pytest.raises(EngineError, match="sends from GPU to GPU, and there is no GPU here: use 'file'"):
        VLLMServerEngine(transfer="nccl").load_weights(weights(TENSORS), 0)
