"""The seeds of the environments' configs: the stored rows, the tables on the page, the verdicts, and one real run."""

import json

import pytest

from tests.benchmarks import environments


def test_the_tables_on_the_page_are_those_of_the_rows():
    text = environments.PAGE.read_text(encoding="utf-8")
    assert environments.with_tables(text, environments.read(environments.ROWS)) == text, (
        "run the benchmark with --report"
    )
    rows = [json.loads(line) for line in environments.ROWS.read_text(encoding="utf-8").splitlines()]
    runs = [(row["arm"], row["seed"]) for row in rows]
    assert len(runs) == len(set(runs))
    assert {arm for arm, _ in runs} <= set(environments.ARMS)
    assert not any("settings" in row or "error" in row for row in rows)


def test_the_results_say_what_the_page_says():
    """The game and the calculator's task are learnt from every stored seed, the latter not without the tool."""
    ends = {
        arm: [row["pass@1"] for row in environments.read(environments.ROWS) if row["arm"] == arm]
        for arm in environments.ARMS
    }
    for arm in "guess_number", "calculator":
        assert all(curve[-1][1] > curve[0][1] + 0.1 for curve in ends[arm])
    assert all(curve[-1][1] < 0.1 for curve in ends["no_tool"])
    assert all(curve[-1][1] > 0.4 for curve in ends["calculator"])


def rows_of(arm, finals):
    shared = {"turns": [2.0, 3.0], "reward": [0.25, 0.75], "cpu_seconds": 9.0}
    return [{"arm": arm, "seed": n, "pass@1": [[0, 0.1], [9, final]], **shared} for n, final in enumerate(finals)]


def test_a_verdict_pairs_seeds_and_requires_all_of_them():
    plain = rows_of("guess_number", [0.5, 0.7, 0.6, 0.8, 0.4])
    better = rows_of("guess_number_turns", [0.6, 0.82, 0.69, 0.9, 0.51])  # by 0.1 for each seed, more than it varies
    unclear = rows_of("guess_number_turns", [0.8, 0.4, 0.9, 0.5, 0.8])
    arms = ("guess_number_turns",)
    assert "+0.104 ±" in environments.verdicts([*plain, *better], arms)
    assert "**above** `guess_number.yaml`." in environments.verdicts([*plain, *better], arms)
    assert "do not separate it" in environments.verdicts([*plain, *unclear], arms)
    assert "no verdict yet" in environments.verdicts([*plain[:4], *better], arms)
    line = environments.table(better).splitlines()[-1]
    assert line.endswith("| 5 | 0.10 | 0.70 | 0.51, 0.90 | +0.60 ± 0.20 | 2.00 to 3.00 | 0.25 to 0.75 | 9 |")


def test_rows_of_another_machine_replace_stored_ones_and_unfit_ones_are_refused(tmp_path):
    stored, added = tmp_path / "stored.jsonl", tmp_path / "added.jsonl"

    def write(path, *rows):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    write(stored, *rows_of("calculator", [0.5, 0.6]))
    write(added, *rows_of("calculator", [0.7]))
    environments.merge(added, stored)
    assert [row["pass@1"][-1][1] for row in environments.read(stored)] == [0.7, 0.6]
    write(added, {"arm": "calculator", "seed": 0, "error": "out of memory"})
    with pytest.raises(SystemExit, match="rows that failed or have other settings: calculator 0"):
        environments.merge(added, stored)


@pytest.mark.slow("starts runs of lgrpo fit")
def test_a_run_that_failed_is_repeated_and_the_others_are_not(tmp_path):
    rows, folder = tmp_path / "rows.jsonl", tmp_path / "runs"

    def launch(*settings):
        small = ["data.num_prompts=2", "data.num_rollouts=1", "trainer.max_epochs=1", "data.evaluation.num_samples=1"]
        shared = environments.origin("abc")
        environments.launch(rows, ["guess_number_turns"], [3], 2, folder, shared, [*small, *settings])
        return [json.loads(line) for line in rows.read_text().splitlines()]

    assert "data.num_rollots" in launch("data.num_rollots=1")[0]["error"]
    failed, done = launch()
    assert "error" in failed
    assert (done["commit"], done["steps"], done["pass@1"][-1][0]) == ("abc", 1, 1)
    assert all([done["machine"], done["seconds"], *done["versions"].values()])
    assert len(done["turns"]) == len(done["reward"]) == 2
    assert launch() == [failed, done]
