"""Rows of files, folders, lists and the hub, and the messages for invalid ones."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict

from lgrpo.rewards import ExactMatch
from lgrpo.tasks import DatasetTask
from lgrpo.tasks.source import open_source

ROWS = [{"question": f"{i} + 1 =", "answer": str(i + 1), "level": i % 3} for i in range(12)]


def lines(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def write(path: Path, data: str | bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return str(path)


def write_rows(path: Path, rows: list[dict]) -> str:
    """Write rows in the format of the file's suffix."""
    if path.suffix == ".parquet":
        Dataset.from_list(rows).to_parquet(str(path))
    elif path.name.endswith(".csv"):
        Dataset.from_list(rows).to_csv(str(path), index=False)
    elif path.suffix == ".json":
        write(path, json.dumps(rows, indent=1))
    else:
        write(path, gzip.compress(lines(*rows).encode()) if path.suffix == ".gz" else lines(*rows))
    return str(path)


def task(train: str | list, **settings) -> DatasetTask:
    return DatasetTask(ExactMatch(), train, **settings)


def rows_of(train: str | list, **settings) -> list[dict]:
    return [dict(row) for row in task(train, **settings).rows("train")]


def streamed(train: str | list, **settings) -> list[dict]:
    stream = task(train, streaming=True, **settings).train_stream()
    return [dict(located.row) for located in stream]


@pytest.mark.parametrize("read", [rows_of, streamed])
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.parquet", "lines.json"])
def test_every_format_preserves_the_rows(name, read, tmp_path):
    path = write(tmp_path / name, lines(*ROWS)) if name == "lines.json" else write_rows(tmp_path / name, ROWS)
    assert read(path) == ROWS


@pytest.mark.parametrize("read", [rows_of, streamed])
def test_csv_cells_stay_strings(read, tmp_path):
    """``load_dataset`` would turn them into numbers, dates and None."""
    path = write(tmp_path / "a.csv", 'question,answer\n"1, then\n2",007\nwho?,None\n\nwhen?,2020-01-01\n')
    assert read(path) == [
        {"question": "1, then\n2", "answer": "007"},
        {"question": "who?", "answer": "None"},
        {"question": "when?", "answer": "2020-01-01"},
    ]


def test_json_lines_are_preserved(tmp_path):
    """Dates stay strings, missing fields stay missing, and null and integers may occur among other values."""
    rows = [
        {"question": "a", "answer": "2020-01-01", "x": 1},
        {"question": "b", "answer": None, "x": 1.5, "y": {"z": 1}},
    ]
    assert rows_of(write(tmp_path / "a.jsonl", "\ufeff" + lines(rows[0]) + "\n  \n" + lines(rows[1]))) == rows


def test_list_of_rows_is_preserved():
    assert rows_of(ROWS) == streamed(ROWS) == ROWS


def test_folder_has_a_split_for_each_file_name(tmp_path):
    write_rows(tmp_path / "train-00000-of-00002.jsonl", ROWS[:7])
    write_rows(tmp_path / "train-00001-of-00002.jsonl", ROWS[7:])
    write_rows(tmp_path / "test.jsonl", ROWS[:5])
    assert rows_of(str(tmp_path)) == streamed(str(tmp_path)) == ROWS
    assert task(str(tmp_path)).rows("validation") == ROWS[:5]
    assert task(str(tmp_path), validation_split=None).rows("validation") == []
    with pytest.raises(ValueError, match=r"has no split 'dev', only \['test', 'train'\].*task\.validation_split"):
        task(str(tmp_path), validation_split="dev").rows("validation")


def test_subset_of_a_folder_is_chosen_by_its_readme(tmp_path):
    """The layout of a dataset on the hub."""
    write_rows(tmp_path / "main" / "train.jsonl", ROWS)
    write_rows(tmp_path / "other" / "train.jsonl", ROWS[:3])
    configs = "".join(f"- config_name: {name}\n  data_files: {name}/*.jsonl\n" for name in ("main", "other"))
    write(tmp_path / "README.md", f"---\nconfigs:\n{configs}---\n")
    assert rows_of(str(tmp_path), subset="main") == ROWS
    assert rows_of(str(tmp_path), subset="other") == ROWS[:3]


def test_other_formats_in_a_folder_are_read_by_load_dataset(tmp_path):
    write(tmp_path / "train.txt", "one\ntwo\n")
    assert rows_of(str(tmp_path)) == streamed(str(tmp_path)) == [{"text": "one"}, {"text": "two"}]


def test_folders_of_save_to_disk_are_read(tmp_path):
    Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "alone"))
    DatasetDict(train=Dataset.from_list(ROWS), test=Dataset.from_list(ROWS[:5])).save_to_disk(str(tmp_path / "splits"))
    for name in ("alone", "splits"):
        assert rows_of(str(tmp_path / name)) == streamed(str(tmp_path / name)) == ROWS
    assert task(str(tmp_path / "alone")).rows("validation") == []
    assert len(task(str(tmp_path / "splits")).rows("validation")) == 5
    with pytest.raises(ValueError, match="has no split 'validation'"):
        task(str(tmp_path / "splits"), train_split="validation").rows("train")
    next((tmp_path / "alone").glob("*.arrow")).write_bytes(b"nothing")
    with pytest.raises(ValueError, match="alone is a damaged folder of save_to_disk"):
        rows_of(str(tmp_path / "alone"))


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.csv", "folder/train.parquet", "folder/train.csv"])
def test_changed_file_is_read_again(name, tmp_path):
    """Even if its time and size, which ``load_dataset`` compares, are unchanged."""
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    source = str(path.parent if "folder" in name else path)
    for answer in ("1", "2"):
        write_rows(path, [{"question": "q", "answer": answer}])
        os.utime(path, (1e9, 1e9))
        assert rows_of(source) == [{"question": "q", "answer": answer}]


INVALID = {
    "a line that is not JSON": ("a.jsonl", lines(*ROWS[:3]) + '{"question": "b",\n', r"a\.jsonl, line 4: .* at column"),
    "a line that is not an object": ("a.jsonl", lines(ROWS[0], [1, 2]), r"a\.jsonl, line 2: .* not a list"),
    "an item that is not an object": ("a.json", "[{},\n3]", r"a\.json, row 1: .* not a number"),
    "JSON that ends early": ("a.json", '[{"question": "a"},\n {"question": "b"}', r"a\.json, line 2: "),
    "text that is not UTF-8": ("a.jsonl", lines(ROWS[0]).encode() + '{"a": "é"}'.encode("latin1"), "line 2: .*UTF-8"),
    "a lone surrogate": ("a.jsonl", lines(ROWS[0]) + '{"a": "\\ud83d"}\n', "line 2: a lone surrogate"),
    "JSON with a long integer": (
        "a.jsonl",
        lines(ROWS[0]) + '{"question": "1", "answer": ' + "9" * 5000 + "}\n",
        r"line 2: an integer of more than 4300 digits; write it as text",
    ),
    "JSON with a long integer in a list": (
        "a.json",
        '[{"question": "1",\n"answer": 1},\n{"question": "1", "answer": ' + "9" * 5000 + "}]",
        r"line 3: an integer of more than 4300 digits; write it as text",
    ),
    "JSON nested too deeply": ("a.jsonl", lines(ROWS[0]) + "[" * 100_000 + "\n", "line 2: nested too deeply"),
    "a truncated gzip file": (
        "a.jsonl.gz",
        gzip.compress(lines(*ROWS * 99).encode())[:-30],
        r"a\.jsonl\.gz is .*truncated",
    ),
    "a gzip file that is not one": ("a.jsonl.gz", lines(*ROWS), r"a\.jsonl\.gz is damaged .* Not a gzipped file"),
    "text and numbers": (
        "a.jsonl",
        lines(ROWS[0], {"answer": None}, {"answer": 1}),
        r"field 'answer' is text in .*a\.jsonl, line 1, but a number in .*a\.jsonl, line 3",
    ),
    "numbers and truth values": ("a.jsonl", lines({"a": 1}, {"a": True}), "'a' is a number in .* but a truth value in"),
    "an empty file": ("a.jsonl", "", r"the train set is empty: .*a\.jsonl"),
    "blank lines alone": ("a.jsonl", "\n\n", r"the train set is empty: .*a\.jsonl"),
    "an empty list": ("a.json", "[]", r"the train set is empty: .*a\.json"),
    "an empty CSV": ("a.csv", "", r"the train set is empty: .*a\.csv"),
    "a header alone": ("a.csv", "question,answer\n", r"the train set is empty: .*a\.csv"),
    "a cell too many": ("a.csv", "a,b\n1,2\n3,4,5\n", r"a\.csv, line 3: 3 cells, but the header has 2"),
    "a cell too few": ("a.csv", "a,b\n1,2\n3\n", r"a\.csv, line 3: 1 cells"),
    "an unclosed quote": ("a.csv", 'a,b\n1,"2\n3,4\n', r"a\.csv, line 3: unexpected end of data"),
    "a repeated column name": ("a.csv", "a,a\n1,2\n", r"a\.csv, line 1: a column name is missing or repeated"),
    "CSV that is not UTF-8": ("a.csv", "a\né\n".encode("latin1"), r"a\.csv, line 2: .*UTF-8"),
    "a Parquet file that is not one": ("a.parquet", b"PAR1 and no more", r"a\.parquet is a damaged Parquet file"),
    "an empty Parquet file": ("a.parquet", b"", r"a\.parquet is a damaged Parquet file"),
}


@pytest.mark.parametrize("read", [rows_of, streamed])
@pytest.mark.parametrize("case", INVALID)
def test_invalid_files_are_rejected(case, read, tmp_path):
    name, content, message = INVALID[case]
    path = write(tmp_path / name, content)
    with pytest.raises(ValueError, match=message):
        read(path)


def test_damaged_page_of_a_parquet_file_is_located(tmp_path):
    path = Path(write_rows(tmp_path / "a.parquet", [{"question": "x" * 50 + str(i)} for i in range(5000)]))
    content = bytearray(path.read_bytes())
    content[100:4000] = b"\xff" * 3900
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.parquet is a damaged Parquet file, after row 0"):
        rows_of(str(path))


def test_invalid_file_in_a_folder_is_named(tmp_path):
    write_rows(tmp_path / "train-0.jsonl", ROWS)
    write(tmp_path / "train-1.jsonl", lines(*ROWS, {"answer": 3}))
    with pytest.raises(ValueError, match=r"train-0\.jsonl, line 1, but a number in .*train-1\.jsonl, line 13"):
        rows_of(str(tmp_path))


def test_mixed_kinds_in_a_list_are_rejected():
    with pytest.raises(ValueError, match="field 'answer' is text in row 0, but a number in row 1"):
        rows_of([{"answer": "1"}, {"answer": 1}])


def test_missing_files_raise_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no data file .*absent\.jsonl"):
        rows_of(str(tmp_path / "absent.jsonl"))
    with pytest.raises(FileNotFoundError, match=r"there is no file or folder .*absent"):
        rows_of(str(tmp_path / "absent"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"there are no data files in the folder .*empty"):
        rows_of(str(tmp_path / "empty"))
    with pytest.raises(ValueError, match=r"a\.xml has none of the formats \.jsonl"):
        rows_of(write(tmp_path / "a.xml", "<a/>"))


def test_duplicate_rows_are_kept(tmp_path):
    rows = [ROWS[0], ROWS[1], ROWS[0]]
    assert rows_of(write_rows(tmp_path / "a.jsonl", rows)) == rows


def test_home_folder_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_rows(tmp_path / "a.jsonl", ROWS)
    assert rows_of("~/a.jsonl") == ROWS
    assert open_source("~", None, "train").name == str(tmp_path)


@pytest.mark.parametrize("read", [rows_of, streamed])
def test_unreachable_hub_raises_an_error(read):
    """``HF_HUB_OFFLINE`` is set for all tests."""
    with pytest.raises(
        ConnectionError, match=r"dataset 'openai/gsm8k' cannot be loaded from .*set a local file or folder"
    ):
        read("openai/gsm8k", subset="main")
    with pytest.raises(ConnectionError, match="dataset 'openai/gsm8k' cannot be loaded from"):
        task("openai/gsm8k", subset="main").rows("validation")
