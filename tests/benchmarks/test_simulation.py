"""The simulated loop follows the real one, its costs agree with measurements, and invalid inputs are rejected."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lgrpo.data.queue import RolloutQueue
from lgrpo.engines import TransformersEngine
from tests.benchmarks.overlap import simulated
from tests.benchmarks.simulation import (
    Costs,
    Layout,
    Loop,
    Machine,
    Measured,
    Schedule,
    Workload,
    decode_seconds,
    parse_layout,
    predict,
    read_measured,
)
from tests.benchmarks.simulation.__main__ import main
from tests.helpers import build

RESULTS = Path(__file__).parent / "results"
STEP = RESULTS / "simulation_h200.json"
STAGES = RESULTS / "vllm_stages.json"
POOL = RESULTS / "step.jsonl"


def pool_rows(note):
    """Return the rows of a command with two engines on an H200, by v; all lengths are equal."""
    rows = [json.loads(line) for line in POOL.read_text().splitlines()]
    own = [row for row in rows if row["model"] == "1.5b" and row.get("note", "").startswith(note)]
    return {row["settings"]["v"]: row for row in own if row["settings"]["workload"] == "fixed"}


def one_gpu(measured: Measured, slots=512, **schedule):
    workload = Workload(
        num_prompts=measured.num_prompts, group_size=measured.group_size, mean_tokens=measured.completion_tokens
    )
    layout = Layout(name="colocated", num_trainers=1)
    costs = Costs(measured=measured, workload=workload, machine=Machine(slots=slots), layout=layout, model_bytes=3.1e9)
    return predict(costs, Schedule(**schedule))


class TestAgainstOneGPU:
    """Predictions from the stages at v = 1, compared with runs on one H200."""

    @pytest.mark.parametrize("path", [STEP, STAGES], ids=lambda path: path.stem)
    def test_v_1_is_reproduced(self, path):
        content = json.loads(path.read_text())
        run = content["runs"][0]
        step = run["step_seconds"] if path == STAGES else run["lgrpo"]["step_seconds"]
        assert one_gpu(read_measured(path), period=1).step_seconds == pytest.approx(step, rel=1e-3)

    def test_v_10_is_predicted(self):
        run = json.loads(STAGES.read_text())["runs"][1]
        found = one_gpu(read_measured(STAGES), period=10, generate_ahead=True)
        assert found.step_seconds == pytest.approx(run["step_seconds"], rel=0.06)
        assert list(found.lags) == run["lags"]

    @pytest.mark.parametrize(
        ("command", "slots", "within"),
        [
            ("G", 640, 0.02),
            ("H", 640, 0.03),
            ("F", 640, 0.02),
            ("A", 640, 0.125),
            ("B", 1024, 0.08),
            ("C", 490, 0.04),
            ("D", 900, 0.02),
        ],
    )
    def test_higher_v_is_predicted_for_two_engines(self, command, slots, within, tmp_path):
        """Each command is predicted from one or two steps at v = 1, so the tolerances differ."""
        by_v = pool_rows(command)
        (tmp_path / "command.jsonl").write_text(json.dumps(by_v[1]) + "\n")
        measured = read_measured(tmp_path / "command.jsonl")
        assert one_gpu(measured, period=1).step_seconds == pytest.approx(by_v[1]["lgrpo"]["step_seconds"], rel=1e-3)
        assert 10 in by_v
        for v in by_v.keys() - {1}:
            found = one_gpu(measured, slots=slots, period=v, generate_ahead=True)
            assert found.step_seconds == pytest.approx(by_v[v]["lgrpo"]["step_seconds"], rel=within)


class TestAgainstTheLoop:
    @pytest.mark.parametrize("case", json.loads((RESULTS / "overlap.json").read_text())["cases"], ids=str)
    def test_measured_with_stages_that_sleep(self, case):
        seconds = json.loads((RESULTS / "overlap.json").read_text())["seconds"]
        assert simulated(*case["case"], seconds) == pytest.approx(case["step_seconds"], rel=0.03)

    @pytest.mark.parametrize("can_overlap", [False, True])
    @pytest.mark.parametrize("generate_ahead", [False, True])
    @pytest.mark.parametrize(("v", "lead"), [(1, 0), (3, 0), (1, 1), (1, 2), (3, 2), (2, 5), (None, 0), (None, 2)])
    def test_order_of_sampling_matches_a_run(self, v, lead, generate_ahead, can_overlap, monkeypatch):
        """A real run asks for the same rollouts, after as many others were handed over; syncs and lags are the same."""
        engine = TransformersEngine()
        data = {"engine": engine, "lead": lead, "generate_ahead": generate_ahead, "overlap": can_overlap}
        run = build(v=v, rollouts=8, data=data)
        asked, ask = [], RolloutQueue.request
        released, release = [], run.data.schedule.release

        def listen(queue, rollouts):
            asked.append((rollouts, len(released)))
            ask(queue, rollouts)

        def count(trainer, rollout):
            released.append(rollout)
            release(trainer, rollout)

        monkeypatch.setattr(RolloutQueue, "request", listen)
        monkeypatch.setattr(run.data.schedule, "release", count)
        run.trainer.fit(run.module, datamodule=run.data)
        schedule = Schedule(period=v, lead=lead, generate_ahead=generate_ahead, can_overlap=can_overlap)
        loop = loop_of(schedule, 8)
        assert [(span.rollouts, span.trained) for span in loop.of("generate")] == asked
        assert [span.trained for span in loop.of("sync")] == [record.step for record in engine.state.ledger]
        assert loop.lags == run.recorder.lags


def loop_of(schedule, rollouts, sync=0.5, overhead=0.25, generate=2.0, update=1.0):
    return Loop(
        schedule,
        rollouts,
        sync=sync,
        overhead=overhead,
        generate=lambda asked: (generate * len(asked), generate * len(asked)),
        update=lambda rollout: (update, update),
    ).run()


schedules = st.builds(
    Schedule,
    period=st.integers(1, 6),
    lead=st.integers(0, 4),
    generate_ahead=st.booleans(),
    can_overlap=st.booleans(),
)
seconds = st.floats(0.01, 10)


class TestProperties:
    @settings(max_examples=200, deadline=None)
    @given(schedules, st.integers(1, 30), seconds, seconds, seconds, seconds)
    def test_every_rollout_is_sampled_once_before_its_update(
        self, schedule, rollouts, sync, overhead, generate, update
    ):
        run = loop_of(schedule, rollouts, sync, overhead, generate, update)
        assert sorted(k for span in run.of("generate") for k in span.rollouts) == list(range(rollouts))
        assert [span.rollouts[0] for span in run.of("update")] == list(range(rollouts))
        sampled = {k: span for span in run.of("generate") for k in span.rollouts}
        for span in run.of("update"):
            own = sampled[span.rollouts[0]]
            number = own.rollouts.index(span.rollouts[0]) + 1 if schedule.can_overlap else len(own.rollouts)
            assert span.start >= own.start + (own.end - own.start) * number / len(own.rollouts) - 1e-9
        for own in ({"generate"}, {"update"}, {"sync", "generate"}, {"sync", "update", "overhead"}):
            spans = sorted((s for s in run.spans if s.stage in own), key=lambda span: span.start)
            assert all(a.end <= b.start + 1e-9 for a, b in pairwise(spans)), own
        o, v = schedule.lead, schedule.period
        assert run.lags == [k - v * max(0, (k - o) // v) for k in range(rollouts)]
        last = max(span.end for span in run.spans)
        totals = {stage: sum(s.end - s.start for s in run.of(stage)) for stage in ("generate", "update", "sync")}
        assert last >= max(totals["generate"], totals["update"]) + totals["sync"] - 1e-6
        if not schedule.can_overlap or (v == 1 and o == 0):
            whole = sum(span.end - span.start for span in run.spans)
            assert last == pytest.approx(whole), "in turn"

    @settings(max_examples=50, deadline=None)
    @given(schedules, st.sampled_from([("colocated", 1), ("colocated", 8), ("1+7", 8), ("nodes:1+1", 16)]))
    def test_idle_shares(self, schedule, layout_and_gpus):
        name, gpus = layout_and_gpus
        layout = parse_layout(name, gpus, 8)
        schedule = Schedule(**vars(schedule) | {"can_overlap": layout.num_servers > 0})
        workload = Workload(num_prompts=56, group_size=4, mean_tokens=300, spread=0.7, cap_tokens=1024)
        costs = Costs(
            measured=read_measured(STEP), workload=workload, machine=Machine(), layout=layout, model_bytes=3.1e9
        )
        found = predict(costs, schedule, 12)
        for share in (found.trainer_idle, found.engine_idle, found.gpu_idle):
            assert 0 <= share < 1
        assert len(found.lags) == schedule.period
        if layout.num_servers:
            waiting = layout.num_servers * found.engine_idle + layout.num_trainers * found.trainer_idle
            assert found.gpu_idle >= waiting / gpus - 1e-9, "waiting for the slowest GPU is added"
        else:
            assert found.gpu_idle >= found.trainer_idle + found.engine_idle - 1 - 1e-9
            assert found.trainer_idle + found.engine_idle >= 1

    @settings(max_examples=100, deadline=None)
    @given(
        st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 8), st.floats(0, 1), st.floats(0.01, 1)
    )
    def test_decoding_token_by_token(self, lengths, slots, floor, each):
        step_seconds = floor + each * np.arange(1, slots + 1)
        waiting, running, clock = list(lengths), [], 0.0
        while waiting or running:
            while waiting and len(running) < slots:
                running.append(waiting.pop(0))
            clock += step_seconds[len(running) - 1]
            running = [left - 1 for left in running if left > 1]
        assert decode_seconds(np.array(lengths, dtype=float), step_seconds) == pytest.approx(clock)


def test_higher_v_is_faster_with_separate_servers():
    """At v = 1 servers and trainer alternate; within a cycle they overlap."""
    steps = [
        predict(
            Costs(
                measured=read_measured(STEP),
                workload=Workload(num_prompts=56, group_size=16, mean_tokens=512),
                machine=Machine(),
                layout=parse_layout("4+4", 8, 8),
                model_bytes=3.1e9,
            ),
            Schedule(period=v, can_overlap=True),
        ).step_seconds
        for v in (1, 2, 4, 10)
    ]
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] < 0.7 * steps[0]


def test_command(tmp_path, capsys):
    out = tmp_path / "picture.png"
    layouts = ["--layouts", "colocated", "1+7", "nodes:1+1", "--gpus", "8", "16", "--v", "1", "2", "--prompts", "112"]
    main([str(STEP), *layouts, "--spread", "0.7", "--cap-tokens", "1024", "--out", str(out)])
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("| 16 ") for line in lines) == 6
    assert sum(line.startswith("| 8 ") for line in lines) == 4
    assert "nodes:1+1 is left out on 8 GPUs: too few nodes of 8" in lines
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layouts", "9+1"], r"9\+1 has 10 GPUs per node, but with --gpus 8 a node has 8: 9 that serve leave 0"),
        (["--layouts", "1+7", "--gpus", "4"], r"a node has 4: 1 that serve leave 3 to train"),
        (["--layouts", "0+8"], "at least 1 must serve"),
        (["--layouts", "apart"], "must be colocated, 1\\+7"),
        (["--layouts", "nodes:1+1"], "no layout is left: .* too few nodes"),
        (["--layouts", "nodes:1+1", "--gpus", "24"], "requires a multiple of 16 GPUs"),
        (["--gpus", "12"], "not a multiple of the 8 GPUs of a node"),
        (["--prompts", "30"], "--prompts 30 is not a multiple of the 8 training GPUs .* Try 4 × 8 prompts"),
        (["--v", "0"], "--v is 0; it must be at least 1"),
        (["--lead", "-1"], "--lead is -1"),
        (["--sync-bandwidth", "0", "1"], "--sync-bandwidth is 0.0; it must be above 0"),
        (["--floor-ms", "90"], "14.1 ms with 448 completions and 90 ms with only 1: --floor-ms 90 is too high"),
        (["--slots", "100"], "--slots 100 is less than the 448 completions"),
        (["--speed", "600:30000"], "--speed 600:… has more completions than --slots 512"),
        (["--speed", "500:40000"], "12.5 ms with 500 completions and 14.1 ms with only 448"),
        (["--out", "picture.nothing"], "must be a .png file"),
        (["--out", "nowhere/picture.png"], "in an existing folder"),
    ],
)
def test_invalid_settings(options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=message):
        main([str(STEP), "--prompts", "56", "--rollouts", "2", *options])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("{", "are not JSON"),
        ("{}", "lacks 'runs'"),
        ('{"runs": []}', "no run at v = 1"),
        (STAGES.read_text(), "does not contain the size of the model: give --model-gb"),
    ],
)
def test_invalid_files(content, message, tmp_path):
    path = tmp_path / "measured.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit, match=message):
        main([str(path), "--gpus", "1"])


def test_decode_steps_are_interpolated():
    costs = Costs(
        measured=Measured(**vars(read_measured(STEP)) | {"decode_steps": ((8, 0.01), (64, 0.02))}),
        workload=Workload(num_prompts=8, group_size=2, mean_tokens=10),
        machine=Machine(floor=0.002, slots=128),
        layout=Layout(name="colocated", num_trainers=1),
        model_bytes=1e9,
    )
    assert costs.decode_steps[[3, 7, 63]] == pytest.approx([0.002 + 0.008 * 3 / 7, 0.01, 0.02])
    assert costs.decode_steps[127] == pytest.approx(0.02 + 64 * 0.01 / 56), "extrapolated beyond the last"
