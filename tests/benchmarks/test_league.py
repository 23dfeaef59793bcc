"""The league: plan, selection by validation, statistics, report, and one real run."""

from __future__ import annotations

import contextlib
import json
import statistics

import pytest
import yaml

from lgrpo import WeightSync
from lgrpo.commands.fit import LGRPOCLI
from tests.benchmarks import league, league_arm, league_report, league_statistics
from tests.benchmarks.league import BASELINE, LAGS, LOWER_RATE, RATES, SELECT_SEEDS, TEST_SEEDS
from tests.benchmarks.league_arm import Job

LAG = LAGS[0]


def row(job, validation=0.5, test=0.5, **others):
    scores = {"start": {"validation": 0.3, "test": 0.3}, "validation": validation, "test": test}
    lengths = {str(length): test for length in league_arm.LENGTHS}
    origin = {"commit": "abc", "versions": {"torch": "2.11.0", "transformers": "5.17.0"}}
    return vars(job) | scores | {"test_by_length": lengths, "cpu_seconds": 12.0, "seconds": 13.0} | origin | others


def selecting(method, validation, lag=LAG):
    """Return the rows that select a rate, with the validation pass@1 of each rate."""
    return [
        row(Job("select", method, lag, rate, seed), validation[rate], 1 - validation[rate])
        for rate in RATES
        for seed in SELECT_SEEDS
    ]


def final_rows(method, scores, lag=LAG, rate=RATES[1]):
    return [row(Job("test", method, lag, rate, seed), test=s) for seed, s in zip(TEST_SEEDS, scores, strict=False)]


def test_runs_of_a_seed_must_begin_with_the_same_model():
    first = row(Job("select", "grpo", LAG, 1e-4, 0))
    league.check_start(first, [first, row(Job("select", "grpo", LAG, 1e-4, 1), start={"checksum": "other"})])
    with pytest.raises(RuntimeError, match="the start model of seed 0 is"):
        league.check_start(first | {"start": {"checksum": "other"}}, [first])


MIDDLE = {RATES[0]: 0.4, RATES[1]: 0.6, RATES[2]: 0.5}
SPREAD = [0.01 * (seed % 5) for seed in range(len(TEST_SEEDS))]


def cell(method, mean, noise=0.002, count=len(TEST_SEEDS), lag=LAG):
    """Return all rows of a method at a lag; seeds have a common effect and a small one of the method."""
    scores = [mean + SPREAD[i] + noise * (-1) ** (i // 2) for i in range(count)]
    return [*selecting(method, MIDDLE, lag), *final_rows(method, scores, lag)]


def test_every_method_is_planned_at_every_lag_with_every_rate_and_seed():
    names = league.in_order(league_arm.methods())
    jobs = list(league.planned([], names, LAGS))
    assert set(jobs) == {
        Job("select", method, lag, rate, seed)
        for method in league_arm.methods()
        for lag in league_arm.PERIODS
        for rate in RATES
        for seed in SELECT_SEEDS
    }
    assert len(jobs) == len(set(jobs))
    assert jobs[0].method == BASELINE
    assert {job.method for job in jobs[: league.BLOCK * 9]} == set(league.FIRST[: league.BLOCK])
    assert not set(SELECT_SEEDS) & set(TEST_SEEDS)


def test_the_first_block_is_tested_before_the_second_is_selected():
    names, rows = league.in_order(league_arm.methods()), []
    for name in names[: league.BLOCK]:
        rows += selecting(name, MIDDLE)
    done = {league.job_of(other) for other in rows}
    left = [job for job in league.planned(rows, names, [LAG]) if job not in done]
    block = left[: league.BLOCK * len(TEST_SEEDS)]
    assert {job.stage for job in block} == {"test"}
    assert {job.seed for job in block[: league.BLOCK]} == {TEST_SEEDS[0]}
    assert left[len(block)].stage == "select"


def lower(method, validation):
    """Return the rows of the rate below the others."""
    return [row(Job("select", method, LAG, LOWER_RATE, seed), validation) for seed in SELECT_SEEDS]


def test_the_rate_is_selected_by_validation_alone():
    rows = selecting("grpo", {RATES[0]: 0.5, RATES[1]: 0.7, RATES[2]: 0.6})  # the order by test is the opposite
    assert league.best_rate(rows, "grpo", LAG) == RATES[1]
    assert league.best_rate(rows[:-1], "grpo", LAG) is None
    assert league.best_rate(rows, "grpo", LAGS[1]) is None
    rows[3] = vars(league.job_of(rows[3])) | {"error": "ValueError: NaN"}
    assert league.best_rate(rows, "grpo", LAG) == RATES[2]


def test_a_lower_rate_is_tried_where_the_lowest_is_the_best():
    rows = selecting("grpo", {RATES[0]: 0.7, RATES[1]: 0.6, RATES[2]: 0.5})
    missing = {league.job_of(other) for other in lower("grpo", 0.0)}
    assert league.rates_to_try(rows[:-1], "grpo", LAG) == RATES
    assert missing < set(league.planned(rows, ["grpo"], [LAG]))
    assert league.best_rate(rows, "grpo", LAG) is None
    assert league.best_rate([*rows, *lower("grpo", 0.69)], "grpo", LAG) == RATES[0]
    rows += [*lower("grpo", 0.71), *final_rows("grpo", [0.1] * 10, rate=RATES[0])]
    assert league.best_rate(rows, "grpo", LAG) == LOWER_RATE
    left = set(league.planned(rows, ["grpo"], [LAG])) - {league.job_of(other) for other in rows}
    assert {(job.stage, job.lr) for job in left} == {("test", LOWER_RATE)}
    all_cells = league_report.League(rows)
    assert all_cells.num_finished == 12  # the test runs at another rate do not count
    assert all_cells.num_planned == len(league_arm.methods()) * 4 * 19 + 3


def test_finished_runs_are_not_repeated_and_failed_ones_are(tmp_path, monkeypatch):
    path, ran = tmp_path / "rows.jsonl", []
    rows = selecting("grpo", MIDDLE)
    failed = vars(league.job_of(rows[4])) | {"error": "RuntimeError: out of memory"}
    path.write_text("".join(json.dumps(r) + "\n" for r in [*rows[:4], failed, *rows[6:]]))

    class InThisProcess(contextlib.AbstractContextManager):
        def __init__(self, *_):
            pass

        def __exit__(self, *_):
            pass

        def submit(self, function, job, cache, shared):
            ran.append(job)
            future = league.Future()
            future.set_result(row(job, MIDDLE[job.lr], **shared))
            return future

    monkeypatch.setattr(league, "ProcessPoolExecutor", InThisProcess)
    league.launch(path, ["grpo"], [LAG], workers=2, minutes=None)
    assert ran[:2] == sorted((league.job_of(rows[4]), league.job_of(rows[5])), key=lambda job: (job.seed, job.lr))
    assert [job.seed for job in ran[2:]] == list(TEST_SEEDS)
    assert {(job.stage, job.lr) for job in ran[2:]} == {("test", RATES[1])}
    assert not any("error" in other for other in league.read(path))
    assert {"commit", "versions"} <= league.read(path)[-1].keys()
    ran.clear()
    league.launch(path, ["grpo"], [LAG], workers=1, minutes=None)
    assert ran == []
    league.launch(path, ["grpo", "reinforce"], [LAG], workers=1, minutes=0)
    assert ran == []


def test_holm_and_the_paired_test():
    p_values = {"a": 0.001, "b": 0.02, "c": 0.013, "d": 0.2}
    assert league_statistics.holm(p_values, 4) == pytest.approx({"a": 0.004, "c": 0.039, "b": 0.04, "d": 0.2})
    assert league_statistics.holm({"a": 0.001, "b": 0.5}, 100) == pytest.approx({"a": 0.1, "b": 1.0})
    # sleep of ten patients with two drugs (Student, 1908): t = 4.0621, p = 0.002833
    sleep = [1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4]
    assert league_statistics.paired_p_value(sleep) == pytest.approx(0.002833, abs=1e-6)
    assert league_statistics.paired_p_value([0.0, 0.0]) == 1
    assert league_statistics.paired_p_value([0.1, 0.1]) == 0


def test_power_against_published_values():
    # R: power.t.test(n = 10, delta = 1, type = "paired") has 0.8031; n = 20, delta = 0.5 has 0.5645
    assert league_statistics.power(1.0, 10, 0.05) == pytest.approx(0.8031, abs=2e-4)
    assert league_statistics.power(0.5, 20, 0.05) == pytest.approx(0.5645, abs=2e-4)
    assert league_statistics.power(0.0, 10, 0.01) == pytest.approx(0.01, abs=1e-5)
    corrected = league_statistics.detectable_effect(10, 0.05 / 212)
    assert league_statistics.power(corrected, 10, 0.05 / 212) == pytest.approx(0.8, abs=1e-6)
    assert corrected > 2 * league_statistics.detectable_effect(10, 0.05)


def test_differences_that_the_rows_show():
    better, equal, partial = "reinforce", "vespo", "sapo"
    rows = [*cell(BASELINE, 0.5, 0.0), *cell(better, 0.6), *cell(equal, 0.501), *cell(partial, 0.9, count=4)]
    all_cells = league_report.League(rows)
    assert all_cells.compared.keys() == {(better, LAG), (equal, LAG)}
    assert all_cells.compared[better, LAG].mean == pytest.approx(0.1, abs=0.001)
    assert [all_cells.mark(name, LAG) for name in (better, equal, partial)] == [league_report.HIGHER, "", ""]
    assert all_cells.num_finished == 4 * 9 + 3 * 10 + 4
    assert all_cells.num_planned == len(league_arm.methods()) * 4 * 19
    differences = [all_cells.differences(all_cells.cells[name, LAG]) for name in (better, equal, partial)]
    pooled = statistics.fmean(statistics.variance(d) * (len(d) - 1) for d in differences) * 3 / (9 + 9 + 3)
    assert all_cells.deviation == pytest.approx(pooled**0.5)
    sentence = league_report.verdict(all_cells, LAG)
    assert f"higher: `{better}` (+0.10); lower: none; not distinguished: `{equal}` (+0.00)" in sentence
    assert f"`{BASELINE}` has 0 of 10 runs" in league_report.verdict(all_cells, LAGS[1])


def test_a_difference_must_be_detectable_by_its_own_deviation():
    """With ten seeds and 220 comparisons the first needs a mean of about 2.3 deviations; noisy others do not matter."""
    noise = [0.01, -0.01] * 5
    rows = [*selecting(BASELINE, MIDDLE), *final_rows(BASELINE, [0.5] * 10), *cell("reinforce", 0.6, 0.3)]
    for name, size in (("vespo", 2.0), ("sapo", 2.6)):  # in deviations
        deviation = statistics.stdev(noise)
        rows += [*selecting(name, MIDDLE), *final_rows(name, [0.5 + size * deviation + x for x in noise])]
    all_cells = league_report.League(rows)
    assert all_cells.adjusted["vespo", LAG] < 0.05
    assert (all_cells.mark("vespo", LAG), all_cells.mark("sapo", LAG)) == ("", league_report.HIGHER)
    assert 2.0 < all_cells.effect < 2.6


@pytest.mark.parametrize("rows", [[], [*cell(BASELINE, 0.5), *cell("reinforce", 0.3), *cell("sapo", 0.4, count=1)]])
def test_the_report_of_few_rows(rows, tmp_path):
    text = league_report.page(rows)
    assert f"{len(rows)} of {len(league_arm.methods()) * 76:,} planned runs exist" in " ".join(text.split())
    assert "nothing can be said" in text
    assert max(len(line) for line in text.splitlines() if not line.startswith("|")) <= 120
    league_report.draw(rows, tmp_path / "map.png")
    assert (tmp_path / "map.png").stat().st_size > 10_000
    if rows:
        lines = league_report.table(rows).splitlines()
        assert len(lines) == 2 + 3
        column = list(league_arm.PERIODS).index(LAG) + 2
        assert [line.split("|")[column].strip() for line in lines if "`sapo`" in line] == [
            "0.402 [1 of 10 seeds], 3e-4"
        ]
        assert all(line.count("|  |") for line in lines[2:])  # lags without runs
        assert "lower: `reinforce` (-0.20)" in " ".join(text.split())
        assert "reinforce" in league_report.comparison(rows, [])


def test_a_lower_method_at_the_lowest_rate_may_have_a_better_one():
    lowest = {RATES[0]: 0.6, RATES[1]: 0.5, RATES[2]: 0.4}
    rows = [*cell(BASELINE, 0.5), *cell("sapo", 0.3), *selecting("reinforce", lowest), *lower("reinforce", 0.7)]
    rows += final_rows("reinforce", [0.3 + 0.001 * seed for seed in range(10)], rate=LOWER_RATE)
    sentence = league_report.verdict(league_report.League(rows), LAG)
    assert sentence.endswith(
        "Of the lower ones, `reinforce` selected the lowest rate, 3e-5, so an even lower one may be better for them."
    )


def test_versions_and_repeated_runs():
    job, other = Job("test", "sapo", LAG, RATES[1], 100), Job("test", "sapo", LAG, RATES[1], 101)
    newer = {"commit": "def", "versions": {"torch": "2.13.0", "transformers": "5.19.0"}}
    rows = [row(job), row(other), row(Job("test", "sapo", LAG, RATES[1], 102), **newer)]
    text = league_report.versions_text(
        rows, [row(job, **newer), row(other, test=0.51), row(Job("test", "gac", LAG, 1e-3, 1))]
    )
    assert "2 commits, and from torch 2.11.0 with transformers 5.17.0 (2 runs) and torch 2.13.0" in text
    assert "2 runs were repeated later, 1 of them with the other packages" in text
    assert text.endswith(": 1 have exactly the same pass@1.")


def test_failed_runs_are_listed():
    failed = vars(Job("select", "m2po", LAG, RATES[0], 0)) | {"error": "ValueError: it needs a reference"}
    assert "- `m2po` (1×): ValueError: it needs a reference" in league_report.page([failed])


def test_the_page_is_up_to_date():
    """After new rows or methods: ``python -m tests.benchmarks.league --report``."""
    assert league_report.PAGE.read_text(encoding="utf-8") == league_report.page(league.read(league.ROWS))


def test_the_sets_of_problems_are_disjoint_and_graded():
    sets = league_arm.problems()
    assert {name: len(rows) for name, rows in sets.items()} == league_arm.SIZES
    questions = [other["question"] for rows in sets.values() for other in rows]
    assert len(questions) == len(set(questions))
    for rows in sets.values():
        lengths = [len(other["question"]) for other in rows]
        assert {lengths.count(length) for length in league_arm.LENGTHS} == {len(rows) // len(league_arm.LENGTHS)}
        assert all("".join(sorted(other["question"])) == other["answer"] for other in rows)


def test_a_run_of_two_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(league_arm, "START", 0.0)
    monkeypatch.setattr(league_arm, "SIZES", {"validation": 8, "test": 8, "train": 64})
    job = Job("select", "grpo", "64", 1e-3, 3)
    result = league_arm.run(job, tmp_path, ("--data.num_rollouts=2",))
    assert league.job_of(result) == job
    assert result["steps"] == 2
    assert result["kl_behaviour_max"] >= 0
    assert 0 <= result["validation"] <= 1
    assert 0 <= result["test"] <= 1
    assert result["test_by_length"].keys() == {"5", "6", "7", "8"}
    assert league_arm.start_folder(tmp_path, 3).is_dir()
    assert "error" in league_arm.attempt(Job("select", "grpo", "64", -1.0, 3), tmp_path, {})


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    """Return the folder of a start model that has not been trained, and that of the data."""
    folder = tmp_path_factory.mktemp("league")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(league_arm, "START", 0.0)
        patch.setattr(league_arm, "SIZES", {"validation": 8, "test": 8, "train": 64})
        return league_arm.make_start(folder, 0), folder / "data"


@pytest.mark.slow("builds every method")
@pytest.mark.parametrize("method", league_arm.methods())
def test_every_method_is_built(method, untrained, tmp_path, monkeypatch):
    """The method is that of the file, and what the job sets has priority. ``tests/test_methods.py`` trains each one."""
    folder, data = untrained
    monkeypatch.chdir(data)
    given = league_arm.arguments_of(Job("select", method, "64", 3e-4, 0), folder)
    cli = LGRPOCLI([f"--config={league_arm.BASE}", *given, f"--run={tmp_path}", "--log=csv"], run=False)
    overlay = yaml.safe_load((league_arm.ROOT / "configs" / "algorithms" / f"{method}.yaml").read_text())
    assert names_of(cli.model.loss, cli.datamodule.advantage) == [
        overlay[section][name]["class_path"].rpartition(".")[2]
        for section, name in (("model", "loss"), ("data", "advantage"))
    ]
    (sync,) = (callback for callback in cli.trainer.callbacks if isinstance(callback, WeightSync))
    assert sync.period == 64
    assert cli.config.model.optimizer.init_args.lr == 3e-4
    assert cli.config.model.policy.name == str(folder)


def names_of(*objects):
    return [type(one).__name__ for one in objects]


@pytest.mark.slow("runs three methods")
def test_methods_of_several_kinds_run(tmp_path, monkeypatch):
    """Three steps at the largest lag, from a model that solves some of the problems.

    The methods have a reference, sample groups again, and scale the step.
    """
    monkeypatch.setattr(league_arm, "SIZES", {"validation": 64, "test": 8, "train": 512})
    for method in ("off_policy_grpo", "dapo", "vcpo"):
        result = league_arm.run(Job("select", method, "64", 3e-4, 0), tmp_path, ("--data.num_rollouts=3",))
        assert result["steps"] == 3, method
        assert result["start"]["validation"] > 0.1
