"""Rows that a task trains on, validates on and shows as examples."""

from __future__ import annotations

import pytest

from lgrpo.rewards import ExactMatch, NumericMatch
from lgrpo.tasks import DatasetTask, SortDigits, Task, Template

ROWS = [{"question": f"q{i}", "answer": str(i), "solution": f"s{i}"} for i in range(40)]


def task(train=ROWS, **settings) -> DatasetTask:
    return DatasetTask(ExactMatch(), train, **settings)


def questions(some_task: Task, split="train") -> list[str]:
    return [row["question"] for row in some_task.rows(split)]


def test_all_rows_are_taken_in_order_by_default():
    assert questions(task(validation=ROWS[:3])) == [row["question"] for row in ROWS]
    assert questions(task(validation=ROWS[:3]), "validation") == ["q0", "q1", "q2"]


def test_rows_are_chosen_by_the_seed():
    chosen = questions(task(num_train=10))
    assert len(chosen) == 10
    assert chosen == questions(task(num_train=10)) == sorted(chosen, key=lambda q: int(q[1:]))
    assert chosen != questions(task(num_train=10, subset_seed=1))
    assert chosen != questions(task(ROWS[:12], num_train=10))
    some = task(validation=ROWS, num_train=10, num_validation=10)
    assert questions(some) == chosen != questions(some, "validation")
    assert len(questions(some, "validation")) == 10
    with pytest.raises(ValueError, match=r"task\.num_train is 41, but there are only 40 rows"):
        task(num_train=41).rows("train")
    with pytest.raises(ValueError, match=r"task\.num_validation is 4, but there are only 3 rows"):
        task(validation=ROWS[:3], num_validation=4).rows("validation")
    with pytest.raises(ValueError, match=r"task\.num_train is -1; it must be at least 1"):
        task(num_train=-1)


def test_validation_rows_are_empty_without_a_validation_set():
    assert task().rows("validation") == []


def test_held_out_rows_are_not_trained_on():
    some = task(num_held_out=10)
    train, held_out = questions(some), questions(some, "validation")
    assert (len(train), len(held_out)) == (30, 10)
    assert set(train) | set(held_out) == {row["question"] for row in ROWS}
    assert questions(task(num_held_out=10, num_train=5)) != train[:5]
    assert questions(task(num_held_out=10, num_train=5), "validation") == held_out
    assert questions(task(num_held_out=10, subset_seed=1), "validation") != held_out
    with pytest.raises(ValueError, match=r"task\.num_held_out takes the validation set from the training set"):
        task(validation=ROWS, num_held_out=10)
    with pytest.raises(ValueError, match=r"set is left: .* has none except 40 examples and held-out rows"):
        task(num_held_out=40).rows("train")
    assert len(task(num_held_out=10, template=Template(prompt="{problem}")).rows("train")) == 30, "reported later"


def test_copies_of_examples_and_held_out_rows_are_not_trained_on():
    some = task([*ROWS, *ROWS], num_held_out=10, num_examples=5)
    shown = {row["question"] for row in some.template.examples}
    held_out, train = set(questions(some, "validation")), questions(some)
    assert len(shown | held_out | set(train)) == len(shown) + len(held_out) + len(set(train)) == 40
    assert len(train) == 2 * len(set(train))  # copies within the training set stay


def test_examples_are_in_no_other_set():
    some = task(num_examples=3, validation=ROWS)
    shown = some.template.examples
    assert len(shown) == 3
    assert shown == task(num_examples=3).template.examples != task(num_examples=3, subset_seed=1).template.examples
    for split in ("train", "validation"):
        assert questions(some, split) == [row["question"] for row in ROWS if row not in shown]
    both = task(num_examples=3, num_held_out=5)
    parts = [row["question"] for row in both.template.examples], questions(both, "validation"), questions(both)
    assert [len(part) for part in parts] == [3, 5, 32]
    assert len(set().union(*parts)) == 40


def test_given_examples_are_kept():
    own = {"question": "own", "answer": "0", "solution": "0"}
    shown = task(num_examples=2, template=Template(examples=[own])).template.examples
    assert (len(shown), shown[0]) == (3, own)


def test_examples_without_an_answer_are_rejected():
    rows = [{"question": f"q{i}", "answer": str(i)} for i in range(5)]
    with pytest.raises(ValueError, match=r"example 0 of the template has no \['solution'\]"):
        task(rows, num_examples=1).template
    rows = [{**row, "solution": ""} for row in rows]
    with pytest.raises(ValueError, match=r"example 0 has an empty answer: check template\.example_answer"):
        task(rows, num_examples=1).template
    assert task(rows, num_examples=1, template=Template(example_answer="{answer}")).template.examples


def test_fields_are_renamed(tmp_path):
    rows = [{"problem": f"p{i}", "gold": str(i), "level": 1} for i in range(3)]
    (row, *_) = task(rows, fields={"question": "problem", "answer": "gold"}).rows("train")
    assert (row["question"], row["answer"], row["level"]) == ("p0", "0", 1)
    swapped = task(ROWS, fields={"answer": "solution", "solution": "answer"}).rows("train")
    assert (swapped[3]["answer"], swapped[3]["solution"]) == ("s3", "3")
    path = tmp_path / "a.jsonl"
    path.write_text('{"problem": "p"}\n{"question": "p"}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: task\.fields reads \['problem'\], but the row has only"):
        task(str(path), fields={"question": "problem"}).rows("train")


def test_stream_restarts_and_rejects_settings_that_need_all_rows():
    some = task(streaming=True, validation=ROWS[:2])
    stream = some.train_stream()
    assert [row["question"] for _, row in stream] == [row["question"] for _, row in stream] == questions(task())
    assert questions(some, "validation") == ["q0", "q1"]
    with pytest.raises(ValueError, match=r"task\.streaming is set"):
        some.rows("train")
    for setting in ("num_train", "num_held_out", "num_examples"):
        with pytest.raises(ValueError, match=r"which a stream does not know"):
            task(streaming=True, **{setting: 3})
    assert task().train_stream() is None


def test_final_answer_is_read_by_the_reward():
    assert DatasetTask(NumericMatch(), ROWS).final_answer("it is 1,200.0 in all") == "1200"
    assert SortDigits(2, num_held_out=10).final_answer("no number ") == "no number"


def test_missing_training_set_raises_an_error():
    with pytest.raises(ValueError, match=r"neither task\.train nor task\.validation"):
        task(None)
    with pytest.raises(ValueError, match="DatasetTask has no training set"):
        task(None, validation=ROWS).rows("train")
