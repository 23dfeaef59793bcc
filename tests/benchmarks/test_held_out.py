"""Scores that separate format and length from reasoning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lgrpo import CausalPolicy
from lgrpo.engines import Sampling
from tests.benchmarks import held_out
from tests.benchmarks.held_out import HeldOut, SaveModel, is_answer, judged, scores
from tests.helpers import fit


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("so it is 42", True),
        ("The answer is 42. I checked it with 7 and 6.\nDone in 2 steps", True),
        ("\\[ \\boxed{42} \\]\nwhich took 2 steps", True),
        ("Thus **42 apples**\n\n(see step 3)", True),
        ("#### 42\nHuman: what is 2 + 3?", True),
        ("42 is the number of apples on day 1.\nAfter 2 days there are 41.", False),
        ("no number", False),
        ("", False),
    ],
)
def test_numbers_that_may_be_the_answer(text, expected):
    assert is_answer(text, "42") is expected


def test_answers_that_are_no_number_are_never_forgiven():
    assert not is_answer("it is 2", "\\frac{1}{2}")
    assert is_answer("it costs 1{,}200 dollars", "1,200")


def problem(correct, reasons, texts=("3", "4"), answer="7"):
    """Return a row of an evaluation's file, with two completions."""
    return {
        "row": {"answer": answer},
        "completions": list(texts),
        "correct": list(correct),
        "finish_reasons": list(reasons),
        "final_answers": [None, "4"],
        "num_tokens": [10, 20],
    }


def test_scores_separate_format_and_length():
    found = scores(
        [
            problem([True, False], ["stop", "length"]),
            problem([False, False], ["stop", "stop"], ["**7** of 8", "8"]),
        ]
    )
    assert found["pass@1"] == 0.25
    assert found["forgiving"] == 0.5, "one of the three wrong answers is only misread"
    assert (found["truncated"], found["no_answer"], found["tokens"]) == (0.25, 0.5, 15)
    assert found["finished"] == pytest.approx(1 / 3, abs=1e-4)
    assert found["pass@1_stderr"] == 0.25


def test_a_run_without_files_has_no_scores(tmp_path):
    assert judged(tmp_path) == {}


def test_the_last_evaluation_is_judged(tmp_path):
    (tmp_path / "evaluations").mkdir()
    for step, correct in ((9, True), (10, False)):
        row = problem([correct] * 2, ["stop"] * 2)
        (tmp_path / "evaluations" / f"step={step}.jsonl").write_text(json.dumps(row) + "\n")
    assert judged(tmp_path)["test"]["pass@1"] == 0


def test_the_final_policy_is_evaluated_with_a_higher_limit(tmp_path, monkeypatch):
    """The callback changes nothing in the run, and its completions may be longer than those of training."""
    monkeypatch.setattr(held_out, "MATH_PROMPT", "{question}>")
    rows = [{"question": str(10 + n), "answer": str(n)} for n in range(4)] + [{"question": "1" * 30, "answer": "1"}]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    callback = HeldOut(max_tokens=12, max_model_len=24, math500=str(tmp_path / "test.jsonl"))
    run = fit(rollouts=2, v=2, callbacks=[callback], data={"sampling": Sampling(max_tokens=6), "generate_ahead": True})
    plain = fit(rollouts=2, v=2, data={"sampling": Sampling(max_tokens=6), "generate_ahead": True})
    assert all(run.weights[name].equal(value) for name, value in plain.weights.items())

    folder = Path(run.trainer.default_root_dir) / held_out.FOLDER
    tables = {path.stem: [json.loads(line) for line in path.open()] for path in folder.iterdir()}
    assert {name: len(table) for name, table in tables.items()} == {"task": 20, "math500": 4}, "one prompt is too long"
    assert max(length for table in tables.values() for row in table for length in row["num_tokens"]) > 6
    found = judged(folder.parent)
    assert found.keys() == {"math500", "test_long"}
    assert found["math500"]["problems"] == 4


def test_a_failed_evaluation_does_not_lose_the_run(tmp_path):
    run = fit(rollouts=1, callbacks=[HeldOut(max_tokens=12, max_model_len=24, math500=str(tmp_path / "missing.jsonl"))])
    found = judged(Path(run.trainer.default_root_dir))
    assert found.keys() == {"test_long", "held_out_error"}
    assert "missing.jsonl" in found["held_out_error"]


def test_the_final_policy_is_saved(tmp_path):
    folder = tmp_path / "made" / "teacher"
    trained = fit(rollouts=2, callbacks=[SaveModel(str(folder))]).module.policy
    read = CausalPolicy(str(folder), dtype="float32")
    read.build()
    found, expected = read.model.state_dict(), trained.model.state_dict()
    assert found.keys() == expected.keys()
    assert all(found[name].equal(expected[name].bfloat16().float()) for name in expected)
