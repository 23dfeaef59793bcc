"""Two training ranks that share one real vLLM server, and the GPUs of servers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lgrpo.engines import EngineError, Faults, VLLMServerEngine
from lgrpo.recordings.recording import Recording
from tests.engines.vllm.test_vllm import TOLERANCE
from tests.helpers import largest_difference
from tests.processes.two_servers import make, weights

pytestmark = pytest.mark.slow("starts servers for two ranks")

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Return what the two ranks recorded, and their folder."""
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("shared")
    command = [sys.executable, "-m", "tests.processes.two_servers", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in (0, 1)], folder


class TestSharedServers:
    def test_only_rank_0_starts_servers(self, shared):
        (first, second), folder = shared
        assert [first["num_processes"], second["num_processes"]] == [1, 0]
        assert first["addresses"] == second["addresses"]
        key = first["addresses"][0][1].encode()
        files = [
            path for path in folder.rglob("*") if path.is_file() and path.parent != folder
        ]  # not those of the test
        assert len(files) > 10
        assert not [path for path in files if key in path.read_bytes()]

    def test_both_ranks_have_the_same_ledger(self, shared):
        (first, second), _ = shared
        assert [record["step"] for record in first["ledger"]] == [0, 4]
        assert first["ledger"] == second["ledger"]
        assert [record["version"] for record in second["again_ledger"]] == [0, 1]

    def test_one_process_gives_the_same_result(self, shared, two_servers, tmp_path):
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

    def test_resuming_inside_a_cycle(self, shared):
        (first, second), _ = shared
        assert largest_difference(first["again"], first["weights"]) == 0
        assert largest_difference(second["again"], second["weights"]) == 0

    def test_rank_0_restarts_a_server_that_fails_while_another_rank_samples(self, shared):
        (first, second), _ = shared
        assert second["after"] == second["before"]
        assert second["before"] == first["before"]
        assert [Faults(**rank["faults"]) for rank in (first, second)] == [Faults(num_failures=1, num_restarts=1)] * 2

    def test_all_ranks_stop_if_a_server_is_down(self, shared):
        (first, second), _ = shared
        assert "no vLLM server answers at http://127.0.0.1:9" in first["error"]
        assert "EngineError: on rank 0: no vLLM server answers at http://127.0.0.1:9" in second["error"]
        assert max(first["error_seconds"], second["error_seconds"]) < 60

    def test_in_process_vllm_of_each_rank_holds_the_whole_policy(self, shared):
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
            ({"devices": [[6], [7]]}, "devices lists the GPUs of 2 servers, but num_servers is 1"),
            (
                {"devices": [[6]], "tensor_parallel_size": 2},
                "1 GPUs to server 0, but tensor_parallel_size is 2",
            ),
            ({"devices": [[6, 6]], "tensor_parallel_size": 2}, "use each number at most once, 0 or above"),
            ({"devices": [[-1]]}, "0 or above"),
            ({"devices": [[6]], "urls": ["http://127.0.0.1:9"]}, "urls names running servers"),
        ],
    )
    def test_contradicting_settings(self, settings, message):
        with pytest.raises(ValueError, match=message):
            VLLMServerEngine(**settings)

    def test_devices_of_each_server(self):
        last = VLLMServerEngine(num_servers=2).group.launcher
        assert [last.devices_of(index, list("01234567")) for index in (0, 1)] == [["7"], ["6"]]
        wide = VLLMServerEngine(num_servers=2, tensor_parallel_size=2).group.launcher
        assert [wide.devices_of(index, list("2345")) for index in (0, 1)] == [["4", "5"], ["2", "3"]]
        chosen = VLLMServerEngine(num_servers=2, devices=[[0], [3]]).group.launcher
        assert [chosen.devices_of(index, ["a", "b", "c", "d"]) for index in (0, 1)] == [["a"], ["d"]]
        with pytest.raises(EngineError, match=r"server 1 is assigned GPU 3, but this process sees 2 \(0 to 1\)"):
            chosen.devices_of(1, ["a", "b"])
        with pytest.raises(EngineError, match="2 servers of 2 GPUs each need 4, and this process sees 2"):
            wide.devices_of(1, list("01"))
