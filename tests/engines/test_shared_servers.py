"""Two training ranks and one vLLM server, for real; and which GPUs servers are given."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lgrpo.engines import EngineError, VLLMServerEngine
from lgrpo.tasks.recording import Recording
from tests.engines.test_vllm import TOLERANCE
from tests.helpers import largest_difference
from tests.two_servers import make, weights

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """What the two ranks saw, and their folder."""
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("shared")
    command = [sys.executable, "-m", "tests.two_servers", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in (0, 1)], folder


class TestSharedServers:
    def test_rank_0_alone_has_the_servers(self, shared):
        (first, second), folder = shared
        assert [first["num_processes"], second["num_processes"]] == [1, 0]
        assert first["addresses"] == second["addresses"]
        key = first["addresses"][0][1].encode()
        files = [path for path in folder.rglob("*") if path.is_file() and path.parent != folder]  # not what we wrote
        assert len(files) > 10
        assert not [path for path in files if key in path.read_bytes()]

    def test_the_ledger_is_one(self, shared):
        (first, second), _ = shared
        assert [record["step"] for record in first["ledger"]] == [0, 4]
        assert first["ledger"] == second["ledger"]
        assert [record["version"] for record in second["again_ledger"]] == [0, 1]

    def test_one_process_does_the_same(self, shared, two_servers, tmp_path):
        (first, second), folder = shared
        one = make(tmp_path, "one", two_servers, [])
        one.trainer.fit(one.module, datamodule=one.data)
        assert largest_difference(weights(one), first["weights"]) <= 1e-5
        assert largest_difference(first["weights"], second["weights"]) == 0
        recorded = [Recording.read(str(path)).table for path in (tmp_path / "one-rollouts", folder / "two-rollouts")]
        for name in ("rollout", "position", "sibling", "token_ids", "reward", "behaviour_step"):
            assert recorded[0][name].to_pylist() == recorded[1][name].to_pylist(), name
        for row, other in zip(one.logged, first["logged"], strict=True):
            assert row["rollout/reward"] == pytest.approx(other["rollout/reward"], abs=1e-6)

    def test_it_goes_on_from_inside_a_cycle(self, shared):
        (first, second), _ = shared
        assert largest_difference(first["again"], first["weights"]) == 0
        assert largest_difference(second["again"], second["weights"]) == 0

    def test_rank_0_brings_a_server_back_that_fails_under_another_rank(self, shared):
        (first, second), _ = shared
        assert second["after"] == second["before"]
        assert second["before"] == first["before"]
        assert first["faults"] == second["faults"] == {"failures": 1, "restarts": 1}

    def test_servers_that_are_down_stop_all_ranks(self, shared):
        (first, second), _ = shared
        assert "no vLLM server answers at http://127.0.0.1:9" in first["error"]
        assert "EngineError: on rank 0: no vLLM server answers at http://127.0.0.1:9" in second["error"]
        assert max(first["error_seconds"], second["error_seconds"]) < 60

    def test_a_vllm_inside_each_rank_holds_the_whole_policy(self, shared):
        (first, second), _ = shared
        assert [record["step"] for record in first["inside_ledger"]] == [0, 4]
        checksums = [[record["checksum"] for record in seen["inside_ledger"]] for seen in (first, second)]
        assert checksums[0] == checksums[1]
        assert checksums[0][0] == first["ledger"][0]["checksum"]
        assert largest_difference(first["inside"], second["inside"]) == 0
        fresh = [row["train/engine_mismatch_max"] for row in first["inside_logged"] if row["train/lag"] == 0]
        assert len(fresh) == 2
        assert max(fresh) <= TOLERANCE


class TestDevices:
    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"devices": [[6], [7]]}, "devices names the GPUs of 2 servers, but num_servers is 1"),
            ({"devices": [[6]], "tensor_parallel_size": 2}, "gives server 0 1 GPUs, but tensor_parallel_size is 2"),
            ({"devices": [[6, 6]], "tensor_parallel_size": 2}, "each is a number from 0 on, named once"),
            ({"devices": [[-1]]}, "each is a number from 0 on"),
            ({"devices": [[6]], "urls": ["http://127.0.0.1:9"]}, "urls names servers that run already"),
        ],
    )
    def test_that_do_not_go_with_the_rest(self, settings, message):
        with pytest.raises(ValueError, match=message):
            VLLMServerEngine(**settings)

    def test_which_server_gets_which(self):
        last = VLLMServerEngine(num_servers=2)
        assert [last._devices_of(index, list("01234567")) for index in (0, 1)] == [["7"], ["6"]]
        wide = VLLMServerEngine(num_servers=2, tensor_parallel_size=2)
        assert [wide._devices_of(index, list("2345")) for index in (0, 1)] == [["4", "5"], ["2", "3"]]
        chosen = VLLMServerEngine(num_servers=2, devices=[[0], [3]])
        assert [chosen._devices_of(index, ["a", "b", "c", "d"]) for index in (0, 1)] == [["a"], ["d"]]
        with pytest.raises(EngineError, match=r"server 1 is to run on GPU 3, but this process sees 2 \(0 to 1\)"):
            chosen._devices_of(1, ["a", "b"])
        with pytest.raises(EngineError, match="2 servers of 2 GPUs each need 4, and this process sees 2"):
            wide._devices_of(1, list("01"))
