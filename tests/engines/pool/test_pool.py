"""Pools of real processes, some of which are killed or stopped. Most tests share one pool."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import termios
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lgrpo import ReplayEngine, Sampling, TransformersEngine
from lgrpo.engines import EngineError, EnginePool, Faults, NoWeightsError, VLLMServerEngine, WeightSyncError
from lgrpo.engines.pool.worker_process import WorkerProcess
from lgrpo.engines.pool.workers import Workers
from lgrpo.weights import PolicyWeights
from tests.engines.conftest import build_policy
from tests.engines.faulty import Distorted, StoppedTransformers, StoppedVLLM
from tests.engines.kept import check_kept
from tests.engines.partial import check_continued
from tests.engines.vllm.test_vllm import TEXTS, TOLERANCE, as_ids, disturb, mismatch, prompts
from tests.helpers import fit, largest_difference

SAMPLING = Sampling(max_tokens=10)


@pytest.fixture(scope="module")
def pool(policy):
    pool = EnginePool(StoppedTransformers(), num_processes=2)
    pool.load_weights(policy.weights(), step=3)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def alone(policy):
    engine = TransformersEngine()
    engine.load_weights(policy.weights(), step=3)
    return engine


def ask(engine, policy, texts=TEXTS, on_group=None):
    return engine.generate(prompts(policy, *texts), 4, SAMPLING, 7, policy.tokenizer, on_group)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class TestRejected:
    @pytest.mark.parametrize("inner", [VLLMServerEngine(), ReplayEngine("x.parquet"), EnginePool()])
    def test_engines_that_cannot_be_in_a_pool(self, inner):
        with pytest.raises(ValueError, match=rf"{type(inner).__name__} in an EnginePool"):
            EnginePool(inner)

    def test_no_processes(self):
        with pytest.raises(ValueError, match="num_processes is 0"):
            EnginePool(num_processes=0)

    def test_no_weights(self, policy):
        with pytest.raises(NoWeightsError):
            ask(EnginePool(), policy)

    def test_error_of_an_engine_reaches_the_trainer(self, policy):
        pool = EnginePool(TransformersEngine(), num_processes=1)
        pool.engine.max_sequences = None
        pool.load_weights(policy.weights(), 0)
        with pytest.raises(TypeError, match="NoneType"):  # as it would without a pool
            ask(pool, policy)
        pool.close()


def test_same_completions_as_one_engine(policy, pool, alone):
    seen = []
    groups = ask(pool, policy, on_group=lambda index, group: seen.append((index, group)))
    assert as_ids(groups) == as_ids(ask(alone, policy))
    assert sorted(seen, key=lambda pair: pair[0]) == list(enumerate(groups)), "each is reported once"
    assert as_ids(ask(pool, policy, TEXTS[:1])) == as_ids(groups[:1]), "fewer prompts than processes"
    held = pool.held_weights()
    assert all(torch.equal(held[name], tensor) for name, tensor in policy.weights())


def test_continued_completions(policy, pool):
    check_continued(pool, policy, prompts(policy, *TEXTS, "1>", "23>", "456>", "78>"), TOLERANCE)


def test_rows_are_not_sent(policy, pool, alone):
    """A row may not be picklable."""
    questions = prompts(policy, *TEXTS)
    questions[0].row["function"] = lambda: None
    assert as_ids(pool.generate(questions, 4, SAMPLING, 7, policy.tokenizer)) == as_ids(ask(alone, policy))


def test_other_weights(policy, pool):
    other = build_policy()
    disturb(other)
    with pool.holding(other.weights(), step=99):
        assert mismatch(other, prompts(policy, *TEXTS), ask(pool, policy)) <= TOLERANCE
    assert mismatch(policy, prompts(policy, *TEXTS), ask(pool, policy)) <= TOLERANCE
    before = len(pool.state.ledger)
    record = pool.load_weights(other.weights(), step=4)
    assert (record.version, record.step) == (before, 4)
    groups = ask(pool, policy)
    assert mismatch(other, prompts(policy, *TEXTS), groups) <= TOLERANCE
    assert {(c.behaviour_step, c.version) for group in groups for c in group} == {(4, before)}
    pool.load_weights(policy.weights(), step=3)


def test_interrupted_generation(policy, pool, alone, monkeypatch):
    """A checkpoint and the next generation do not wait for the rest of it."""
    finished, kinds = [], record_messages(monkeypatch)

    def interrupt(index, group):
        finished.append(index)
        raise KeyboardInterrupt

    many = prompts(policy, *TEXTS) * 2000
    with pytest.raises(KeyboardInterrupt):
        pool.generate(many, 4, SAMPLING, 7, policy.tokenizer, interrupt)
    held = pool.held_weights()
    assert all(torch.equal(held[name], tensor) for name, tensor in policy.weights())
    assert as_ids(ask(pool, policy)) == as_ids(ask(alone, policy)), "the rest is discarded"
    assert len(finished) == 1
    assert kinds.count("group") < len(many) / 2, "the workers cancelled it"
    assert all(worker.is_alive for worker in pool._workers.running)


@pytest.mark.parametrize("is_earlier", [False, True], ids=["before the request", "during the request"])
def test_interrupt_when_the_pipe_is_full(policy, pool, alone, monkeypatch, is_earlier):
    """The worker waits for the trainer to read, and cannot serve the request of a checkpoint meanwhile."""
    monkeypatch.setattr(pool, "timeouts", replace(pool.timeouts, generate=60))
    workers = list(pool._workers.running)
    pipes = [worker.connection.fileno() for worker in workers]

    def unread():
        return [int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder) for pipe in pipes]

    def interrupt(index, group):
        before = [-1]
        while before != (before := unread()):
            time.sleep(1)
        assert min(before) > 50_000
        if is_earlier:
            requests.append(thread.submit(pool.held_weights))
            time.sleep(0.5)
        raise KeyboardInterrupt

    requests = []
    with ThreadPoolExecutor(1) as thread:
        with pytest.raises(KeyboardInterrupt):
            pool.generate(prompts(policy, *TEXTS) * 3000, 4, SAMPLING, 7, policy.tokenizer, interrupt)
        held = requests[0].result() if is_earlier else pool.held_weights()
    assert all(torch.equal(held[name], tensor) for name, tensor in policy.weights())
    assert as_ids(ask(pool, policy)) == as_ids(ask(alone, policy)), "the rest is discarded"
    assert pool._workers.running == workers, "none was killed because it did not answer"


def test_interrupt_before_a_worker_starts_generating(policy, pool, alone, monkeypatch):
    """The request is still in the pipe when the worker is interrupted."""
    slow, kinds = pool._workers.running[1].process.pid, record_messages(monkeypatch)

    def interrupt(index, group):
        raise KeyboardInterrupt

    pool._workers.running[1].set_tokenizer(policy.tokenizer, 60)
    os.kill(slow, signal.SIGSTOP)
    many = prompts(policy, *TEXTS) * 300
    with pytest.raises(KeyboardInterrupt):
        pool.generate(many, 4, SAMPLING, 7, policy.tokenizer, interrupt)
    os.kill(slow, signal.SIGCONT)
    assert as_ids(ask(pool, policy)) == as_ids(ask(alone, policy))
    assert kinds.count("group") < len(many) / 2, "both workers cancelled it"
    assert all(worker.is_alive for worker in pool._workers.running)


def record_messages(monkeypatch):
    """Return a list to which the kinds of all following messages of workers are added."""
    kinds, receive = [], WorkerProcess._receive

    def recording(worker, timeout):
        kind, content = receive(worker, timeout)
        kinds.append(kind)
        return kind, content

    monkeypatch.setattr(WorkerProcess, "_receive", recording)
    return kinds


def test_error_is_raised_once(policy, pool):
    """Also if both workers raise, and the second error is discarded."""
    wrong = prompts(policy, *TEXTS)
    for prompt in wrong:
        prompt.token_ids[0] = 10**6
    with pytest.raises(IndexError):
        pool.generate(wrong, 4, SAMPLING, 7, policy.tokenizer)
    assert len(ask(pool, policy)) == len(TEXTS)


class Slow(TransformersEngine):
    """An engine that takes six seconds for many prompts."""

    def generate(self, prompts, *settings):
        time.sleep(6 if len(prompts) > 400 else 0)
        return super().generate(prompts, *settings)


@pytest.mark.slow("waits for a time limit")
def test_unread_request_does_not_shorten_the_time_limit(policy):
    """The time limit of the other workers starts after the stopped one has exceeded its own."""
    pool = EnginePool(Slow(), num_processes=2)
    pool.load_weights(policy.weights(), step=0)
    try:
        for worker in pool._workers.running:
            worker.set_tokenizer(policy.tokenizer, 60)
        os.kill(pool._workers.running[1].process.pid, signal.SIGSTOP)
        pool.timeouts = replace(pool.timeouts, generate=5.0)
        long = [replace(prompt, text=f"{i:2000}") for prompt in prompts(policy, *TEXTS) for i in range(300)]
        with pytest.warns(UserWarning, match="recovering from failure 1"):
            groups = pool.generate(long, 1, Sampling(max_tokens=1), 7, policy.tokenizer)
        assert len(groups) == len(long)
        assert pool.faults == Faults(num_failures=1, num_restarts=1)
    finally:
        pool.close()


@pytest.mark.parametrize("where", ["receive_weights", "held_checksums"])
@pytest.mark.slow("starts workers again")
def test_replacement_fails(policy, monkeypatch, where):
    """A replacement that fails in a sync, or while it is verified, counts as one more failure."""
    pool = EnginePool(TransformersEngine(), num_processes=2)
    pool.load_weights(policy.weights(), step=0)
    start, act, first = Workers.start, getattr(EnginePool, where), [True, True]

    def start_badly(self):
        worker = start(self)
        if first.pop():
            worker.process.kill()
            monkeypatch.setattr(Workers, "start", start)
        return worker

    def begin(self, *arguments):
        monkeypatch.setattr(EnginePool, where, act)
        self._workers.running[1].process.kill()
        return act(self, *arguments)

    monkeypatch.setattr(Workers, "start", start_badly)
    monkeypatch.setattr(EnginePool, where, begin)
    try:
        with pytest.warns(UserWarning, match="recovering from failure 2"):
            assert pool.load_weights(policy.weights(), step=1).version == 1
        assert len(ask(pool, policy)) == len(TEXTS)
    finally:
        pool.close()


class Stuck(TransformersEngine):
    def generate(self, *_):
        print("stuck", flush=True)
        torch.ones(1).expand(2**50).sum()  # native code, during which no signal is handled


STUCK = """
import sys, threading, time
from lgrpo import Sampling
from lgrpo.engines import EnginePool
from tests.engines.pool.test_pool import TEXTS, Stuck, build_policy, prompts
policy = build_policy()
pool = EnginePool(Stuck(), num_processes=1)
pool.load_weights(policy.weights(), 0)
asked = (prompts(policy, *TEXTS), 1, Sampling(max_tokens=2), 0, policy.tokenizer)
threading.Thread(target=pool.generate, args=asked, daemon=True).start()
while "stuck" not in pool._workers.running[0].log.read_text():
    time.sleep(0.1)
print(pool._workers.running[0].process.pid, pool._workers.folder, flush=True)
time.sleep(100)
"""


@pytest.mark.slow("waits for processes to end")
def test_blocked_worker_ends_with_the_trainer():
    with subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE, text=True) as trainer:
        pid, folder = trainer.stdout.readline().split()
        trainer.kill()
    until = time.monotonic() + 30
    while is_running(pid) and time.monotonic() < until:
        time.sleep(0.1)
    assert not is_running(pid)
    assert not Path(folder).exists()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_killed_or_stopped_worker(policy, pool, alone, how):
    before = replace(pool.faults)
    os.kill(pool._workers.running[1].process.pid, how)
    pool.timeouts, timeouts = replace(pool.timeouts, generate=8.0), pool.timeouts
    with pytest.warns(UserWarning, match=r"recovering from failure 1 of at most 3: .*process"):
        groups = ask(pool, policy)
    pool.timeouts = timeouts
    assert as_ids(groups) == as_ids(ask(alone, policy))
    assert (pool.faults - before).num_failures == 1
    assert (pool.faults - before).num_restarts >= 1
    assert all(worker.is_alive for worker in pool._workers.running)


def test_worker_killed_before_a_sync(policy, pool, alone):
    pool._workers.running[0].kill()
    with pytest.warns(UserWarning, match="exit code -9"):
        pool.load_weights(policy.weights(), step=3)
    assert as_ids(ask(pool, policy)) == as_ids(ask(alone, policy))


def test_a_replaced_worker_is_verified(policy, pool, monkeypatch):
    call = WorkerProcess.call

    def with_another_tensor(worker, name, *arguments, **options):
        answer = call(worker, name, *arguments, **options)
        return answer | {"model.norm.weight": 1} if name == "checksums" else answer

    pool._workers.running[0].kill()
    message = r"the engine's model\.norm\.weight differs from the policy's"
    with monkeypatch.context() as patch:
        patch.setattr(WorkerProcess, "call", with_another_tensor)
        with pytest.warns(UserWarning, match="exit code -9"), pytest.raises(WeightSyncError, match=message):
            ask(pool, policy)
    assert len(pool._workers.running) == 1, "it is not used"
    pool.load_weights(policy.weights(), step=3)


class TestManyChunks:
    """Weights sent in many chunks of one or two tensors."""

    @pytest.fixture(autouse=True)
    def small(self, monkeypatch):
        monkeypatch.setattr("lgrpo.engines.pool.workers._CHUNK_BYTES", 4096)

    def test_all_tensors_arrive(self, policy, pool):
        other, given = build_policy(), []
        disturb(other)

        def counted():
            for name, tensor in other.weights():
                given.append(sorted(path.name for path in pool._workers.folder.glob("weights-*")))
                yield name, tensor

        pool.load_weights(PolicyWeights(config=other.weights().config, tensors=counted), step=4)
        held = pool.held_weights()
        assert held.keys() == dict(other.weights()).keys()
        assert all(torch.equal(held[name], tensor) for name, tensor in other.weights())
        files = {name for names in given for name in names}
        assert len(files) > 5
        assert max(map(len, given)) == 1, "no more than one file exists while the next is made"
        assert not list(pool._workers.folder.glob("weights-*"))
        pool.load_weights(policy.weights(), step=3)

    def test_worker_killed_between_chunks(self, policy, pool, alone):
        def deadly():
            for number, (name, tensor) in enumerate(policy.weights()):
                if number == 10:
                    pool._workers.running[0].kill()
                yield name, tensor

        with pytest.warns(UserWarning, match="exit code -9"):
            pool.load_weights(PolicyWeights(config=policy.weights().config, tensors=deadly), step=3)
        assert all(worker.is_alive for worker in pool._workers.running)
        assert not list(pool._workers.folder.glob("weights-*"))
        assert as_ids(ask(pool, policy)) == as_ids(ask(alone, policy))


def test_no_worker_left(policy, pool):
    for worker in pool._workers.running:
        worker.kill()
    with (
        pytest.warns(UserWarning, match="recovering"),
        pytest.raises(EngineError, match=r"no process with the behaviour policy is left.*ckpt_path last"),
    ):
        ask(pool, policy)
    with pytest.raises(EngineError, match="no process with the behaviour policy is left"):
        ask(pool, policy)
    pool.load_weights(policy.weights(), step=3)
    assert len(ask(pool, policy)) == len(TEXTS)


def test_too_many_failures_in_a_sync(policy, pool):
    pool.budget.max_failures, before = 0, pool.budget.max_failures
    pool._workers.running[1].kill()
    with pytest.raises(WeightSyncError, match=r"failed once in one generation or sync \(max_failures is 0\)"):
        pool.load_weights(policy.weights(), step=3)
    pool.load_weights(policy.weights(), step=3)
    pool.budget.max_failures = before
    assert len(ask(pool, policy)) == len(TEXTS)


def test_too_many_failures(policy, pool):
    pool.budget.max_failures, before = 0, pool.budget.max_failures
    pool._workers.running[1].kill()
    with pytest.raises(EngineError, match=r"failed once in one generation or sync \(max_failures is 0\)"):
        ask(pool, policy)
    pool.budget.max_failures = before
    with pytest.warns(UserWarning, match="recovering"):
        assert len(ask(pool, policy)) == len(TEXTS)


def test_non_finite_weights_are_rejected(policy, pool):
    other = build_policy()
    with torch.no_grad():
        other.model.model.norm.weight[3] = float("nan")
    with pytest.raises(WeightSyncError, match=r"model\.norm\.weight is not finite"):
        pool.load_weights(other.weights(), step=7)
    with pytest.raises(NoWeightsError):
        ask(pool, policy)
    pool.load_weights(policy.weights(), step=3)


def test_mismatch_names_the_tensor(policy):
    pool = EnginePool(Distorted())
    with pytest.raises(WeightSyncError, match=r"the engine's model\.norm\.weight differs from the policy's"):
        pool.load_weights(policy.weights(), step=0)
    pool.close()


def test_every_worker_is_verified(policy, pool, monkeypatch):
    checksums = pool._checksums

    def with_another_tensor():
        first, second = checksums()
        return [first, second | {"model.norm.weight": 1}]

    with monkeypatch.context() as patch:
        patch.setattr(pool, "_checksums", with_another_tensor)
        with pytest.raises(WeightSyncError, match=r"the engine's model\.norm\.weight differs from the policy's"):
            pool.load_weights(policy.weights(), step=8)
    with pytest.raises(NoWeightsError):
        ask(pool, policy)
    pool.load_weights(policy.weights(), step=3)


def test_full_run():
    """Lags, samples and weights are the same as without a pool."""
    plain = fit(v=4, rollouts=8, data={"generate_ahead": True})
    pooled = fit(v=4, rollouts=8, data={"generate_ahead": True, "engine": EnginePool(TransformersEngine())})
    assert pooled.recorder.lags == plain.recorder.lags == [0, 1, 2, 3] * 2
    for a, b in zip(plain.recorder.rollouts, pooled.recorder.rollouts, strict=True):
        assert torch.equal(a.tokens, b.tokens)
    assert largest_difference(plain.module.policy.state_dict(), pooled.module.policy.state_dict()) < 1e-5


PARENT = """
import os, time
from lgrpo import TransformersEngine
from lgrpo.engines import EnginePool
from lgrpo.engines.pool.worker_process import WorkerProcess
from lgrpo.weights import PolicyWeights
from tests.engines.conftest import build_policy
pool = EnginePool(TransformersEngine())
pool.load_weights(build_policy().weights(), 0)
print(pool._workers.folder, *[worker.process.pid for worker in pool._workers.running], flush=True)
time.sleep(600)
"""


@pytest.mark.slow("waits for processes to end")
def test_workers_end_with_the_trainer():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    folder, *pids = parent.stdout.readline().split()
    assert len(pids) == 2
    assert all(is_running(pid) for pid in pids)
    (Path(folder) / "weights.safetensors").write_bytes(b"of an unfinished sync")
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 30
    while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(is_running(pid) for pid in pids)
    assert not Path(folder).exists()


@pytest.mark.slow("starts vLLM in two processes")
def test_vllm_in_two_processes(policy):
    pytest.importorskip("vllm")
    pool = EnginePool(StoppedVLLM(max_model_len=32))
    questions = prompts(policy, *TEXTS)
    try:
        pool.load_weights(policy.weights(), step=0)
        assert mismatch(policy, questions, ask(pool, policy)) <= TOLERANCE
        other = build_policy()
        disturb(other)
        pool.load_weights(other.weights(), step=1)
        groups = ask(pool, policy)
        assert mismatch(other, questions, groups) <= TOLERANCE
        check_continued(pool, other, prompts(policy, *TEXTS, "1>", "23>", "456>", "78>"), TOLERANCE)
        check_kept(other, pool, questions, TOLERANCE)
        pool._workers.running[0].kill()
        with pytest.warns(UserWarning, match="recovering"):
            assert as_ids(ask(pool, policy)) == as_ids(groups)
        with pytest.raises(ValueError, match="exceed vLLM's max_model_len of 32"):
            ask(pool, policy, ["0" * 30])
        pool.sleep()
        assert as_ids(ask(pool, policy)) == as_ids(groups)
    finally:
        pool.close()
