"""The benchmarks: prescribed lengths, timing by stage, the check of ratios, the pages."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import signal
import statistics
import string
import subprocess
import sys
import time
from argparse import Namespace
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers.decoders import DecodeStream
from transformers import AutoTokenizer

from lgrpo.policy import character_tokenizer
from tests.benchmarks import answers, check, demo, page, step, streaming, studies, trl_search
from tests.benchmarks.isolated import IsolatedPart
from tests.benchmarks.stages import Stages, used_memory
from tests.benchmarks.step import PEER, arguments, parse, read_rows, table
from tests.benchmarks.systems import Work
from tests.benchmarks.workload import lengths, make_model, prompt_texts, word_tokenizer
from tests.processes.alive import until_all_ended

pytestmark = pytest.mark.slow("starts the benchmarks, most of them beside TRL")

KEPT = read_rows(page.ROWS)
GROUPS = page.shown(KEPT)
SIZE = "--prompts 2 --group 4 --prompt-tokens 4 --completion-tokens 6 --mean-tokens 5 --cap-tokens 12 --steps 1"
RUN = {"peak_flops": 1e12, "memory_before": 0}
STEP = [sys.executable, "-m", "tests.benchmarks.step", "--device", "cpu", "--threads", "1", *SIZE.split()]


def test_realistic_lengths_are_the_same_in_every_process():
    drawn = lengths("realistic", 2000, 0, 19, 64)
    assert drawn == lengths("realistic", 2000, 0, 19, 64)
    assert min(drawn) >= 1
    assert max(drawn) == 64
    assert 17 < sum(drawn) / len(drawn) < 20


def test_a_run_with_other_lengths_is_rejected(tmp_path):
    make_model(tmp_path, "demo", 64)
    assert [len(text) for text in prompt_texts(tmp_path, 6, 3)] == [6, 6, 6]
    given = {"folder": tmp_path, "prompts": 2, "group": 2, "prompt_tokens": 6, "completion_tokens": 5}
    phases = [
        {"workload": "fixed", "v": 1, "warm_up": 1, "steps": 1},
        {"workload": "fixed", "v": 2, "warm_up": 0, "steps": 4},
    ]
    work = Work(Namespace(**given, phases=phases, mean_tokens=0, cap_tokens=0))
    assert work.phase_of == [None, 0, 1, 1, 1, 1]
    assert work.periods == [1, 1, 2, 2]
    assert work.tokens(1) == [(20, 44, 44)] * 4
    work.shares_prompts = True
    assert work.tokens(1) == [(20, 44, 32)] * 4
    work.check(1, [5, 5, 5, 5], [11, 11, 11, 11])
    with pytest.raises(RuntimeError, match="rollout 1 has completions of"):
        work.check(1, [5, 5, 4, 5])
    work.check_policy(3, {2})
    with pytest.raises(RuntimeError, match=r"rollout 3 was sampled by the policy of steps \[3\], not 2"):
        work.check_policy(3, {3})
    with pytest.raises(RuntimeError, match="tokens long"):
        work.check(1, [5, 5, 5, 5], [11, 11, 12, 11])
    with pytest.raises(RuntimeError, match="rollout 1 has the prompt"):
        work.check_prompts(1, [work.prompt_ids[2], *[work.prompt_ids[3]] * 3])


def test_a_failure_keeps_the_results_of_earlier_phases(tmp_path):
    make_model(tmp_path, "demo", 64)
    phases = [{"workload": "fixed", "v": 1, "warm_up": 1, "steps": 1}] * 2
    given = {"folder": tmp_path, "prompts": 1, "group": 2, "prompt_tokens": 6, "completion_tokens": 5, "mean_tokens": 0}
    work = Work(Namespace(**given, phases=phases, cap_tokens=0, **RUN, results=tmp_path / "results.json"))
    stages, model = Stages(work.phase_of, "wall"), torch.nn.Linear(2, 2)

    def train():
        for number in (1, 2, 3):
            stages.inside("overhead", time.sleep, 0.01)
            stages.end_step(number)
        assert "step_seconds" in json.loads((tmp_path / "results.json").read_text())[0]
        raise RuntimeError("no memory")

    first, second = work.run(train, stages, lambda: work.results(stages, model))
    assert first["step_seconds"] >= 0.01
    assert second == {"error": "RuntimeError: no memory"}


def test_time_is_counted_once_in_the_stage_it_belongs_to():
    """Waking and sleeping are part of generation and listed separately; within a sync they count as sync."""

    class Engine:
        def free_memory(self):
            time.sleep(0.02)

        def generate(self):
            self.free_memory()
            time.sleep(0.04)

        def receive(self):
            self.free_memory()
            time.sleep(0.08)

    engine, stages = Engine(), Stages([0], "wall")
    stages.wrap(engine, "free_memory", "turn", outside="sync")
    stages.wrap(engine, "generate", "generate")
    stages.wrap(engine, "receive", "sync")
    engine.receive()
    engine.generate()
    stages.inside("overhead", time.sleep, 0.01)
    stages.end_step(1)
    summary = stages.summary(0, [(1, 1, 1)], 1, parameters=1, peak_flops=1)
    assert 0.02 <= summary["turn_seconds"] < summary["stages"]["generate"] - 0.04 + 1e-6
    assert summary["stages"]["sync"] >= 0.1
    assert summary["step_seconds"] == pytest.approx(summary["steps"][0], abs=1e-4)
    assert f"| – – wake, sleep, free memory | {summary['turn_seconds']:.3g} |" in table({"lgrpo": summary})


def test_the_median_cycle_counts():
    """Cycles of two steps with 10, 30 and 20 ms per token; the stages are those of the median one."""
    stages = Stages([0] * 6, "wall")
    stages.steps[0] = [{"generate": 3 * s, "arithmetic": s} for s in (0.01, 0.01, 0.03, 0.03, 0.04, 0.04)]
    stages.peaks[0] = 0
    summary = stages.summary(0, [(2, 4, 3)] * 4 + [(4, 8, 6)] * 2, 2, parameters=1, peak_flops=1)
    assert summary["per_token"] == pytest.approx([0.01, 0.03, 0.02])
    assert (summary["step_seconds"], summary["trained_tokens"]) == (pytest.approx(0.16), 8)
    assert summary["stages"]["generate"] == pytest.approx(0.12)
    assert summary["update_mfu"] == pytest.approx(6 * 6 / 0.04)  # of the tokens that were read


def test_memory_counts_child_processes():
    before = used_memory()
    hold = "held = bytearray(200_000_000); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        assert 190e6 < used_memory() - before < 300e6
        child.communicate(b"\n")


def test_every_id_of_a_random_model_has_a_text(tmp_path):
    """Ids without a text would make vLLM's detokenizer, which only TRL uses, several times as slow."""
    make_model(tmp_path, "tiny", 64)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    texts = [tokenizer.decode([i]) for i in range(512)]
    assert len(tokenizer) == len(set(texts)) == 512
    large = word_tokenizer(151_936)
    stream = DecodeStream(skip_special_tokens=True)
    pieces = [stream.step(large._tokenizer, i) for i in range(2, 151_936, 97)]
    assert all(pieces), "every token is decoded at once"
    assert large("".join(pieces)).input_ids == [*range(2, 151_936, 97)]


def test_real_prompts(tmp_path):
    """Both systems, started together, render the same prompts; completions end where the model ends them."""
    make_model(tmp_path / "model", "tiny", 512)
    tokenizer = character_tokenizer(string.printable)
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}> "
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [{"question": f"1 + {n}?", "answer": f"It is <<1+{n}>>.\n#### {n + 1}"} for n in range(8)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-m", "tests.benchmarks.step", "--device", "cpu", "--threads", "1", "--workload", "real"]
    command += ["--model", str(tmp_path / "model"), "--data", str(tmp_path), "--prompts", "2", "--warm-up", "1"]
    command += ["--early-start", "--share-prompts", "--micro-batch-tokens", "400"]
    done = subprocess.run([*command, "--steps", "3", "--out", str(tmp_path / "new.jsonl")], capture_output=True)
    (row,) = read_rows(tmp_path / "new.jsonl")
    assert done.returncode == 0, (row, done.stderr[-2000:])
    for system in ("lgrpo", "trl"):
        assert row[system]["sampled_tokens"] <= 2 * 4 * 16
        assert len(row[system]["steps"]) == len(row[system]["per_token"]) == 3
    assert row["ratio_range"][0] <= row["ratio"] <= row["ratio_range"][1]
    assert row["lgrpo"]["read_tokens"] < row["lgrpo"]["trained_tokens"]
    assert row["trl"]["read_tokens"] == row["trl"]["trained_tokens"]
    assert "prompts of GSM8K" in page.describe([row])
    assert "micro-batches of up to 400 tokens, shared prompts" in page.describe([row])


def test_search_of_settings(tmp_path, monkeypatch, capsys):
    """Failed candidates have a row, the two best are measured twice, others once, and the best is found."""
    monkeypatch.setattr(trl_search, "MOVES", [{}, {"attention": "none such"}, {"rows": 4}])
    monkeypatch.setattr(trl_search, "ROWS", tmp_path / "rows.jsonl")
    options = ["--device", "cpu", *SIZE.split(), "--model", "tiny", "--threads", "1"]
    monkeypatch.setattr(sys, "argv", ["trl_search", *options])
    for _ in range(2):
        trl_search.main()
        rows = read_rows(tmp_path / "rows.jsonl")
        assert ["error" in row["trl"] for row in rows] == [False, True, False, False, False]
        assert [row["settings"]["peer"]["rows"] for row in rows[:3]] == [8, 8, 4]
        assert {row["settings"]["peer"]["rows"] for row in rows[3:]} == {8, 4}
    succeeded = [row for row in rows if "error" not in row["trl"]]
    each = {n: [row for row in succeeded if row["settings"]["peer"]["rows"] == n] for n in (8, 4)}
    best, *_ = min(each.values(), key=lambda rows: statistics.median(map(trl_search.seconds_per_token, rows)))
    monkeypatch.setattr(sys, "argv", ["step", *options, "--workload", "fixed", "--peer", "best"])
    assert parse(arguments()).peer == best["settings"]["peer"]
    assert PEER.keys() == best["settings"]["peer"].keys()
    assert "| tiny | fixed | 1 | rows 8, attention none such | 1 | failed: " in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--machine", "another"])
    with pytest.raises(SystemExit, match="--peer best requires"):
        parse(arguments())


def test_both_systems_in_one_run(tmp_path):
    """Equal lengths, realistic ones, and a cycle of two: each system checks the length of every completion."""
    out = tmp_path / "new.jsonl"
    command = [*STEP, "--also-v", "2", "--warm-up", "1", "--machine", "a machine", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    runs = read_rows(out)
    assert done.returncode == 0, (runs, done.stderr[-2000:])
    assert done.stdout.splitlines()[-1] == f"ratio to TRL {min(run['ratio'] for run in runs):.2f}"
    assert [(run["settings"]["workload"], run["settings"]["v"], run["sweep"]) for run in runs] == [
        ("fixed", 1, None),
        ("realistic", 1, None),
        ("fixed", 2, "also v"),
        ("realistic", 2, "also v"),
    ]
    for run, system in product(runs, ("lgrpo", "trl")):
        times = run[system]
        assert sum(times["stages"].values()) == pytest.approx(times["step_seconds"])
        assert times["stages"]["generate"] > 0
        assert times["stages"]["update"] > 0
        assert 0 < times["own_share"] < 1
        if run is not runs[3]:
            assert times["sampled_tokens"] == run["lgrpo"]["sampled_tokens"]
    per_token = [runs[3][system]["step_seconds"] / runs[3][system]["trained_tokens"] for system in ("trl", "lgrpo")]
    assert runs[3]["ratio"] == per_token[0] / per_token[1], "per token"
    assert runs[0]["lgrpo"]["sampled_tokens"] == 2 * 4 * 6
    assert [len(run["lgrpo"]["steps"]) for run in runs] == [1, 1, 2, 2]
    assert [len(run["lgrpo"]["sync_each"]) for run in runs] == [1, 1, 1, 1]
    assert [run["trl"] for run in runs[2:]] == [run["trl"] for run in runs[:2]], "TRL at v = 1"
    assert page.describe(runs).count("steps: 1 after 1") == 2
    assert {(row["machine"], row["command"]) for row in runs} == {("a machine", runs[0]["command"])}
    page.mark(runs, [runs[0]["command"]])
    out.write_text("".join(json.dumps(row) + "\n" for row in runs))
    assert check.main([str(out), str(out)]) == 0


def parts_of(benchmark):
    """Return the process ids of a benchmark's parts by their names."""
    found = {}
    for pid in Path(f"/proc/{benchmark}/task/{benchmark}/children").read_text().split():
        with contextlib.suppress(OSError):  # the process has ended
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if "--inside" in words:
                found[words[words.index("--inside") + 1]] = int(pid)
    return found


def test_a_waiting_system_ends_with_the_benchmark(tmp_path):
    """Both processes are started together; the benchmark is killed while the second one waits."""
    benchmark = subprocess.Popen(
        [*STEP, "--early-start", "--out", str(tmp_path / "new.jsonl")],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    running: dict[str, int] = {}
    try:
        while len(running) < 2:
            assert benchmark.poll() is None, "the benchmark ended without starting both systems together"
            time.sleep(0.1)
            running = parts_of(benchmark.pid)
    finally:
        benchmark.kill()
        benchmark.wait()
    os.kill(running["lgrpo"], signal.SIGKILL)  # it would run to its end
    assert until_all_ended(lambda stat: int(stat[0]) == running["trl"], seconds=90)


def test_a_system_that_is_never_started_measures_nothing():
    with IsolatedPart("tests.benchmarks.step", "lgrpo", Namespace(early_start=True)) as waiting:
        _, errors = waiting.process.communicate(timeout=90)
        assert errors.splitlines()[-1] == "the benchmark that started this process has ended"
        assert waiting.process.returncode == 1


def test_update_benchmark(tmp_path):
    rows, out = ["qwen3-0.6b, 16k", "1.5b, groups", "1.5b, groups, shared prompts"], tmp_path / "update.json"
    command = [sys.executable, "-m", "tests.benchmarks.update", "--shape", "tiny", "--steps", "1", "--warm-up", "1"]
    done = subprocess.run([*command, "--out", str(out), "--rows", *rows], capture_output=True, text=True)
    result = json.loads(out.read_text())
    assert done.returncode == 0, (result, done.stderr[-2000:])
    assert list(result["rows"]) == rows
    for name, row in result["rows"].items():
        assert f"| {name} | {row['step_seconds']:.3g} |" in done.stdout
        for metric in ("step_seconds", "tokens_per_second", "mfu", "peak_gib", "state_gib", "gradient_norm"):
            assert row[metric] > 0
        assert row["mfu_with_attention"] > row["mfu"]
        assert row["packed"]
        assert row["state_gib"] == pytest.approx(16 * row["parameters"] / 2**30, rel=1e-3)
    alone, shared = (result["rows"][name] for name in rows[1:])
    assert shared["gradient_norm"] == pytest.approx(alone["gradient_norm"], rel=1e-5)
    assert alone["tokens_read"] - shared["tokens_read"] == 7 * (32 - 2) * 8, "each group of 16 reads its prompt once"


def test_sync_benchmark(tmp_path):
    out, profile = tmp_path / "sync.json", tmp_path / "profile.txt"
    command = [sys.executable, "-m", "tests.benchmarks.sync", "--shape", "demo", "--processes", "0", "1"]
    command += ["--syncs", "2", "--out", str(out), "--profile", str(profile)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    in_trainer, in_pool = json.loads(out.read_text())["runs"]
    assert (in_trainer["processes"], in_pool["processes"]) == (0, 1)
    assert in_trainer["num_bytes"] == in_pool["num_bytes"] > 500_000
    assert len(in_trainer["seconds"]) == len(in_pool["seconds"]) == 2
    assert "the trainer's process: " in done.stdout
    assert "tensor_checksum" in profile.read_text()


@pytest.mark.parametrize(
    ("engine", "processes", "names", "profiled"),
    [("embedded", [0, 2], ["| in the trainer", "| 2"], "_decode"), ("vllm", [1], ["| 1"], "schedule")],
)
def test_engines_benchmark(engine, processes, names, profiled, tmp_path):
    if engine == "vllm":
        pytest.importorskip("vllm")
    out, profiles = tmp_path / "engines.json", tmp_path / "profiles"
    command = [sys.executable, "-m", "tests.benchmarks.engines", "--shape", "tiny", "--engine", engine]
    command += ["--processes", *map(str, processes)]
    command += ["--prompts", "3", "--group", "2", "--prompt-tokens", "4", "--completion-tokens", "5", "--rollouts", "2"]
    command += ["--ahead", "3", "--out", str(out), "--profile", str(profiles)]
    done = subprocess.run(command, capture_output=True)
    assert done.returncode == 0, done.stderr[-2000:]
    runs = json.loads(out.read_text())["runs"]
    assert [run["processes"] for run in runs] == processes
    for run in runs:
        assert len(run["rollouts"]) == 2
        assert all(set(row) == {"wake", "sync", "generate", "rest"} for row in (*run["rollouts"], run["ahead"]))
        assert all(row["generate"] > 0 < row["sync"] for row in (*run["rollouts"], run["ahead"]))
    assert len(list(profiles.iterdir())) == sum(max(1, count) for count in processes), "one profile per engine"
    assert all(profiled in path.read_text() for path in profiles.iterdir())
    rows = done.stdout.decode().splitlines()[-1 - len(runs) : -1]
    assert [line.split(" | ")[0] for line in rows] == names


def test_random_models_are_reproducible(tmp_path):
    """Several threads initialise the weights."""
    for name in ("a", "b"):
        make_model(tmp_path / name, "tiny", 64)
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("a", "b"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    matrices = {name: tensor for name, tensor in first.items() if tensor.dim() > 1}
    assert all(tensor.std().item() == pytest.approx(0.02, rel=0.1) for tensor in matrices.values())
    assert all((first[name] == 1).all() for name in first.keys() - matrices.keys())
    assert len({tensor.flatten()[0].item() for tensor in matrices.values()}) == len(matrices), "every matrix differs"


class TestCheck:
    def measured(self, path, rows):
        """Write the rows as if one command had measured them."""
        path.write_text("".join(json.dumps(row | {"command": "now"}) + "\n" for row in rows))
        return str(path)

    @pytest.mark.parametrize("name", sorted(GROUPS))
    def test_a_result_that_is_slower_in_both_systems(self, name, tmp_path, capsys):
        """Only on a GPU, whose speed does not depend on other load, seconds are compared."""
        slower = copy.deepcopy(GROUPS[name])
        for row in slower:
            for system in {"lgrpo", "trl"} & row.keys():
                row[system]["step_seconds"] *= 3
        is_gpu = slower[0]["device"] == "cuda"
        assert check.main([self.measured(tmp_path / "new.jsonl", slower)]) == is_gpu
        assert ("seconds per million tokens on" in capsys.readouterr().out) == is_gpu

    @pytest.mark.parametrize("name", sorted(GROUPS))
    def test_a_slower_or_larger_lgrpo_fails(self, name, tmp_path, capsys):
        if not page.main_rows(GROUPS[name]):
            pytest.skip("all rows have a handicap")
        path = tmp_path / "new.jsonl"
        metrics = {"step_seconds": "time of a step over TRL's", "peak_gib": "memory over TRL's"}
        if any("memory" in row for row in GROUPS[name]):
            del metrics["peak_gib"]  # not that of all processes
        for metric, words in metrics.items():
            worse = copy.deepcopy(GROUPS[name])
            for row in worse:
                if "trl" in row:
                    row["lgrpo"][metric] *= 1.2
            assert check.main([self.measured(path, worse)]) == 1
            assert words in capsys.readouterr().out
            assert check.main([str(path), "--tolerance", "0.25"]) == 0

    def made_up(self, seconds, own_share=0.1, model="demo"):
        shared = {"command": "then", "device": "cpu", "model": model, "sweep": "group", "shown": True}
        settings = {"workload": "fixed", "v": 1}
        return [
            shared | {"settings": settings | {"group": g}, "lgrpo": {"step_seconds": s, "own_share": own_share}}
            for g, s in seconds.items()
        ]

    def test_growth_along_a_sweep_and_own_share(self):
        kept = check.ratios(self.made_up({4: 1.0, 8: 2.0}))
        assert check.worse(check.ratios(self.made_up({4: 5.0, 8: 10.0})), kept, 0.15) == []
        assert len(check.worse(check.ratios(self.made_up({4: 1.0, 8: 4.0})), kept, 0.15)) == 1
        assert len(check.worse(check.ratios(self.made_up({4: 1.0, 8: 2.0}, own_share=0.2)), kept, 0.15)) == 2
        two = check.ratios(self.made_up({4: 1.0, 8: 2.0}) + self.made_up({4: 100.0, 8: 200.0}, model="large"))
        assert sorted(value for name, value in two.items() if "over the first" in name) == [2.0, 2.0]

    def test_nothing_to_compare(self, tmp_path, capsys):
        first = self.measured(tmp_path / "a.jsonl", self.made_up({4: 1.0}))
        second = self.measured(tmp_path / "b.jsonl", self.made_up({16: 1.0}))
        assert check.main([first, second]) == 2
        assert "no run in common" in capsys.readouterr().out
        assert check.main([first, str(tmp_path / "c.jsonl")]) == 2
        assert "there is no " in capsys.readouterr().out
        assert check.main([self.measured(tmp_path / "d.jsonl", []), first]) == 2
        assert "has no rows" in capsys.readouterr().out


def test_speed_page_shows_the_kept_results():
    text = page.PAGE.read_text()
    assert page.filled(text, KEPT) == text, "run python -m tests.benchmarks.page"
    for name in GROUPS:
        assert f"<!-- {name} -->" in text


def test_a_shown_command_replaces_earlier_ones():
    kept = next(row for row in KEPT if row["settings"]["workload"] == "real")
    other = kept | {"settings": kept["settings"] | {"prompts": 8}, "command": "other"}
    rows = copy.deepcopy([kept, other, kept | {"command": "later", "shown": False}])
    rows[1]["shown"] = True
    page.mark(rows, ["later"])
    assert [row["shown"] for row in rows] == [False, True, True], "the second has other prompts"
    with pytest.raises(SystemExit, match="no rows of the commands"):
        page.mark(rows, ["tomorrow"])


def test_results_do_not_change_the_commit_of_rows(tmp_path, monkeypatch):
    results = tmp_path / "tests" / "benchmarks" / "results"
    results.mkdir(parents=True)
    monkeypatch.setattr(step, "RESULTS", results)
    assert step.commit() == "unknown"
    for path in (tmp_path / "code.py", results / "rows.jsonl"):
        path.write_text("1")
    as_one = ["-c", "user.name=a", "-c", "user.email=b"]
    for command in (["init"], ["add", "."], [*as_one, "commit", "--message", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True, capture_output=True)
    name = step.commit()
    (results / "rows.jsonl").write_text("2")
    assert (len(name), step.commit()) == (12, name)
    (tmp_path / "code.py").write_text("2")
    assert step.commit() == f"{name}-dirty"


def test_overlap_is_compared_within_a_command():
    shared = {"commit": "a", "settings": {}, "device": "one", "model": "m"}
    shared |= {"tokens_per_second": 1, "wait": 0.2, "generate": 0.5}
    rows = [
        shared | {"arm": arm, "seconds_per_rollout": seconds} | other
        for arm, seconds, other in (("v=1", 4.0, {}), ("v=1", 1.0, {"device": "two"}), ("v=10", 2.0, {}))
    ]
    assert streaming.table(rows).splitlines()[-1] == "| v=10 | 2.00 | 0.50 | 1 | 0.10 | 0.75 |"
    ahead = rows[-1] | {"arm": "ahead", "lead": 1, "seconds": [3.0, 5.0, 1.0], "tokens": 8}
    assert streaming.table([rows[0], ahead]).splitlines()[-1] == "| ahead | 4.00 | 1.00 | 2 |  |  |"
    assert "| 2.00 |" in streaming.table([ahead | {"has_tail": False}]), "a row that does not count the last rollouts"


def test_a_measurement_has_one_row():
    seconds = [row["lgrpo"]["step_seconds"] for row in KEPT if "step_seconds" in row.get("lgrpo", {})]
    assert len(seconds) == len(set(seconds))


def test_rewards_page_shows_the_kept_rows():
    text = answers.PAGE.read_text(encoding="utf-8")
    assert answers.filled(text) == text, "run python -m tests.benchmarks.answers --report"
    exact = {"GSM8K", "MATH500", "AIME24", "Countdown"}
    rows = [row for row in answers.read() if row["name"] in exact]
    assert {row["name"] for row in rows} == exact
    assert all(row["right"]["one"] == row["wrong"]["zero"] == row["rows"] for row in rows)


def test_answers_benchmark(tmp_path, monkeypatch):
    """Answers that are not wrong are noticed, and files that have a row are not scored again."""
    folder = tmp_path / "gsm8k"
    folder.mkdir()
    rows = [{"question": f"1 + {n}?", "answer": str(1 + n), "solution": "A sum."} for n in range(4)]
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(answers, "ROWS", tmp_path / "rows.jsonl")
    monkeypatch.setattr(sys, "argv", ["answers", "--data", str(tmp_path)])
    for _ in range(2):
        answers.main()
        (row,) = answers.read()
        assert (row["name"], row["split"], row["rows"]) == ("GSM8K", "test", 4)
        assert row["right"] == {"one": 4, "zero": 0, "failed": 0}
        assert row["wrong"] == {"one": 0, "zero": 4, "failed": 0}
    monkeypatch.setattr(answers, "with_other_digit", lambda text: text)
    assert answers.measure("GSM8K", folder / "test.jsonl")["wrong"]["one"] == 4


def test_demo_with_several_seeds(tmp_path, monkeypatch, capsys):
    short = ["data.num_rollouts=2", "trainer.max_epochs=1", "data.evaluation.num_problems=8", "trainer.callbacks=[]"]
    kept = {"seed": 1, "pass@1": [[0, 0.5], [2, 0.75]], "pass@1_stderr": 0.01, "steps": 2, "seconds": 3}
    kept |= {"cpu_seconds": 2, "busy": 1, "load": [0.1, 1.2]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(kept) + "\n")
    monkeypatch.setattr(demo, "ROWS", tmp_path / "rows.jsonl")
    options = ["--seeds", "1", "7", "--busy", "1", "--folder", str(tmp_path / "runs"), "--set", *short]
    monkeypatch.setattr(sys, "argv", ["demo", *options])
    demo.main()
    first, new = demo.read()
    assert first == kept
    assert (new["seed"], new["steps"], new["busy"]) == (7, 2, 1)
    assert 0 < new["cpu_seconds"] < 2 * new["seconds"] * (os.cpu_count() or 1)
    assert len(list((tmp_path / "runs").iterdir())) == 1
    assert "| 1 | 0.500 | 0.750 | 0.010 | 2 | 3 | 2 | 1 | 0.1 to 1.2 |" in capsys.readouterr().out


def test_rows_of_another_study_have_the_same_settings():
    for study in studies.STUDIES.values():
        for arm, (other, name) in study.rows_of.items():
            assert study.arms[arm] == studies.STUDIES[other].arms[name]


def test_a_computed_verdict_follows_the_rows(monkeypatch, tmp_path):
    def finals(**arms):
        rows = [
            {
                "study": "zero_variance",
                "arm": arm,
                "seed": seed,
                "pass@1": [0.3, value + 0.01 * seed],
                "reward_spread": 0.1,
            }
            for arm, value in arms.items()
            for seed in range(4)
        ]
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))

    monkeypatch.setattr(studies, "ROWS", tmp_path / "rows.jsonl")
    for value, found in ((0.9, "0.100 ± 0.000"), (0.7, "-0.100 ± 0.000"), (0.8, "0.000 ± 0.000")):
        finals(mask=value, neither=0.8)
        judged = "higher" if value > 0.8 else "lower" if value < 0.8 else "not distinguished"
        line = studies.compared("zero_variance", "mask", "neither", count=7)
        assert line == f"`mask` less `neither`: {found}, 4 seeds: **{judged}**"
    assert "`sampled again` and `neither`: fewer than 3 seeds" in " ".join(studies.verdict("zero_variance").split())


def test_comparisons_name_arms_of_their_study():
    for study in studies.STUDIES.values():
        assert study.comparisons
        assert {arm for pair in study.comparisons for arm in pair} <= study.arms.keys()
        assert len(set(study.comparisons)) == len(study.comparisons)


def test_results_page_shows_the_kept_rows():
    assert studies.PAGE.read_text(encoding="utf-8") == studies.page()


@pytest.mark.parametrize(
    ("v", "max_sequences", "cached"), [(1, 512, 4), (10, 512, 40), (400, 512, 1024), (400, 320, 640)]
)
@pytest.mark.parametrize("also", [[], [{"workload": "realistic", "v": 1, "steps": 2, "warm_up": 1}]])
def test_cache_holds_all_sequences_that_are_decoded_together(v, max_sequences, cached, also, tmp_path):
    """With a smaller cache, a cycle in one call would be no faster than its rollouts one by one."""
    make_model(tmp_path, "demo", 64)
    phases = [*also, {"workload": "fixed", "v": v, "steps": v, "warm_up": 0}]
    sizes = {"prompts": 2, "group": 2, "prompt_tokens": 4, "completion_tokens": 6, "mean_tokens": 1.0, "cap_tokens": 3}
    sizes |= {"sequences": max_sequences, "cache_gib": None}
    work = Work(Namespace(folder=tmp_path, processes=2, phases=phases, **sizes))
    each = (4 + 6) * 2 * 2 * 96 * 2 / 2**30  # tokens, layers, keys and values, width, bytes
    assert work.cache_gib == pytest.approx(1.1 * cached * each)
