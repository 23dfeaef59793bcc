"""Tests of prompts: sources, order, checks, weights, streams."""

from __future__ import annotations

import gzip
import itertools
import json
from collections import Counter

import pytest
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from lgrpo.data.difficulty import DifficultySampling
from lgrpo.data.prompts import RowRenderer, StreamedPrompts, load_prompts
from lgrpo.engines import TransformersEngine
from lgrpo.policy import character_tokenizer
from lgrpo.rewards import ExactMatch, NumericMatch
from lgrpo.tasks import Arithmetic, DatasetTask, SortDigits, Template
from lgrpo.tasks.rows import LocatedRow, RowStream
from tests.helpers import CHARACTERS

ROWS = [{"question": f"{i:02d}>", "answer": str(i), "level": i % 3} for i in range(12)]


@pytest.fixture
def tokenizer():
    return character_tokenizer(CHARACTERS)


def in_memory(rows=ROWS, template=None, reward=None):
    return DatasetTask(reward or ExactMatch(), train=rows, validation=ROWS, template=template or Template())


def write(path, rows):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    elif path.suffix == ".parquet":
        Dataset.from_list(rows).to_parquet(str(path))
    elif path.suffix == ".csv":
        Dataset.from_list(rows).to_csv(str(path), index=False)
    else:
        path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.parquet"])
def test_local_files(name, tmp_path, tokenizer):
    task = DatasetTask(ExactMatch(), train=write(tmp_path / name, ROWS), validation=write(tmp_path / f"v-{name}", ROWS))
    prompts = load_prompts(task, "train", tokenizer, max_tokens=10)
    assert [prompts.at(i).text for i in range(12)] == [row["question"] for row in ROWS]
    assert prompts.at(3).row["answer"] == "3"
    assert len(task.rows("validation")) == 12


def test_a_folder_loaded_by_name_like_a_hub_dataset(tmp_path, tokenizer):
    """``load_dataset(name, split=…)``, as for the hub, on a folder of data files."""
    write(tmp_path / "train.jsonl", ROWS)
    write(tmp_path / "test.jsonl", ROWS[:5])
    task = DatasetTask(ExactMatch(), train=str(tmp_path))
    assert len(task.rows("train")) == 12
    assert len(task.rows("validation")) == 5


def test_every_pass_has_every_prompt_once_in_another_order(tokenizer):
    prompts = load_prompts(in_memory(), "train", tokenizer, max_tokens=10, shuffle_seed=1)
    passes = [[prompts.at(e * 12 + i).text for i in range(12)] for e in range(3)]
    assert all(Counter(p) == Counter(passes[0]) for p in passes)
    assert passes[0] != passes[1] != passes[2]
    again = load_prompts(in_memory(), "train", tokenizer, max_tokens=10, shuffle_seed=1)
    assert [again.at(i).text for i in (30, 5, 17)] == [passes[2][6], passes[0][5], passes[1][5]]


def test_missing_columns_are_named(tokenizer):
    with pytest.raises(
        ValueError, match=r"template reads \['problem'\], but row 0 of the train set has only \['answer', 'level'"
    ):
        load_prompts(in_memory(template=Template(prompt="{problem}")), "train", tokenizer, max_tokens=10)
    with pytest.raises(ValueError, match=r"reward reads \['gold'\], but"):
        load_prompts(in_memory(reward=ExactMatch("gold")), "train", tokenizer, max_tokens=10)


def test_an_empty_prompt(tokenizer):
    rows = [*ROWS[:2], {"question": "  ", "answer": "", "level": 0}]
    with pytest.raises(ValueError, match="prompt 2 of the train set is empty"):
        load_prompts(in_memory(rows), "train", tokenizer, max_tokens=10)


def test_rows_are_checked_one_by_one(tokenizer):
    def prompts(*rows, prompt="{question}>"):
        return load_prompts(in_memory([ROWS[0], *rows], Template(prompt=prompt)), "train", tokenizer, max_tokens=10)

    with pytest.raises(ValueError, match=r"template reads \['question'\], but row 1 of the train set has only"):
        prompts({"answer": "1", "level": 0})
    with pytest.raises(ValueError, match=r"reads \['question'\], which is null in row 1"):
        prompts({"question": None, "answer": "1"})
    with pytest.raises(ValueError, match=r"reward reads \['answer'\], which is null in row 1"):
        prompts({"question": "1", "answer": None})
    with pytest.raises(ValueError, match="prompt 1 of the train set is empty"):
        prompts({"question": " ", "answer": "1"})


def test_a_pad_token_in_a_chat_is_allowed(tokenizer):
    """Some tokenizers pad with the token that ends a turn."""
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}>"
    prompts = load_prompts(in_memory(template=Template(chat=True)), "train", tokenizer, max_tokens=10)
    assert tokenizer.pad_token_id in prompts.at(0).token_ids


def test_an_empty_validation_set_is_not_the_training_set():
    with pytest.raises(ValueError, match="the validation set is empty"):
        DatasetTask(ExactMatch(), train=ROWS, validation=[]).rows("validation")


def test_a_prompt_longer_than_the_context(tokenizer):
    rows = [*ROWS[:3], {"question": "1" * 50, "answer": "", "level": 0}]
    with pytest.raises(ValueError, match=r"prompt 3 of the train set has 50 tokens, but only 10 fit.*drop"):
        load_prompts(in_memory(rows), "train", tokenizer, max_tokens=10)
    with pytest.raises(
        ValueError, match=r"data\.max_prompt_tokens .* data\.sampling\.max_tokens .* data\.overlong_prompts"
    ):
        load_prompts(in_memory(rows), "train", tokenizer, max_tokens=10)
    kept = load_prompts(in_memory(rows), "train", tokenizer, max_tokens=10, overlong="drop")
    assert (len(kept), kept.num_dropped) == (3, 1)
    with pytest.raises(ValueError, match="no prompt of the train set fits"):
        load_prompts(in_memory(rows), "train", tokenizer, max_tokens=1, overlong="drop")


@pytest.fixture
def no_long_text(monkeypatch):
    """Make tokenising a text of more than 1,000 characters an error: with 30 million it would take two minutes."""
    tokenise = PreTrainedTokenizerFast.__call__

    def limited(self, text, **options):
        assert len(text) <= 1000
        return tokenise(self, text, **options)

    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", limited)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_line_of_megabytes_is_not_tokenised(tmp_path, tokenizer, no_long_text, chat, streamed):
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    path = write(tmp_path / "rows.jsonl", [ROWS[0], {"question": "1" * 30_000_000, "answer": "1", "level": 0}, ROWS[1]])
    task = DatasetTask(ExactMatch(), train=path, validation=[], template=Template(chat=chat), streaming=streamed)
    fits = "30000000 characters, but only 10 tokens of up to 5 characters fit: '1111"
    with pytest.raises(ValueError, match=rf"rows\.jsonl, line 2\) of the train set has {fits}"):
        load_prompts(task, "train", tokenizer, max_tokens=10).at(1)
    kept = load_prompts(task, "train", tokenizer, max_tokens=10, overlong="drop")
    assert [kept.at(i).text for i in (0, 1)] == [ROWS[0]["question"], ROWS[1]["question"]]


def test_the_longest_token_bounds_the_characters(tokenizer):
    """A prompt of special tokens has the most characters for its tokens: it fits."""
    row = {"question": "<pad>" * 10, "answer": "", "level": 0}
    assert len(load_prompts(in_memory([row]), "train", tokenizer, max_tokens=10).at(0).token_ids) == 10


def test_characters_the_tokenizer_cannot_encode(tokenizer):
    rows = [{"question": "12x>", "answer": "", "level": 0}]
    with pytest.raises(ValueError, match="prompt 0 of the train set has characters the tokenizer cannot encode"):
        load_prompts(in_memory(rows), "train", tokenizer, max_tokens=10)


@pytest.mark.parametrize("value", [10**5000, [1, 10**5000], {"inner": 10**5000}], ids=["plain", "list", "object"])
def test_an_integer_that_python_does_not_print(tokenizer, value):
    rows = [ROWS[0], ROWS[1] | {"more": value}]
    with pytest.raises(
        ValueError, match=r"row 1 of the train set has in \['more'\] an integer of more than 4300 digits"
    ):
        load_prompts(in_memory(rows), "train", tokenizer, max_tokens=10)


def test_an_empty_set(tmp_path):
    with pytest.raises(ValueError, match="the train set is empty"):
        in_memory([]).rows("train")
    with pytest.raises(FileNotFoundError, match=r"there is no data file .*absent\.jsonl"):
        DatasetTask(ExactMatch(), train=str(tmp_path / "absent.jsonl"), validation=[]).rows("train")


def test_a_file_has_no_split_to_validate_on(tmp_path):
    assert DatasetTask(ExactMatch(), train=write(tmp_path / "rows.jsonl", ROWS)).rows("validation") == []


def test_chat_templates(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '0' if m['role'] == 'system' else '1' }}{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    text, ids = Template(prompt="{question}", system="99", chat=True).render({"question": "42"}, tokenizer)
    assert text == "099142>"
    assert tokenizer.decode(ids) == text
    with pytest.raises(ValueError, match=r"set template\.chat"):
        Template(system="x")
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        Template(chat=True).render({"question": "1"}, tokenizer)


def test_generated_tasks_hold_out_their_validation_set():
    for task in (SortDigits(3, num_held_out=100), Arithmetic(1, ["+", "-", "*"], num_held_out=50)):
        train = {row["question"] for row in task.rows("train")}
        held_out = {row["question"] for row in task.rows("validation")}
        assert not train & held_out
    assert all(row["answer"] == "".join(sorted(row["question"])) for row in SortDigits(3).rows("train"))
    assert len(SortDigits(3, num_held_out=100).rows("train")) == 900
    for row in Arithmetic(2, ["-", "*"]).rows("validation"):
        a, op, b = row["question"].partition("*" if "*" in row["question"] else "-")
        assert int(row["answer"]) == (int(a) * int(b) if op == "*" else int(a) - int(b))
    with pytest.raises(ValueError, match="num_digits is 9"):
        SortDigits(9)
    with pytest.raises(ValueError, match="num_held_out is 0"):
        SortDigits(2, num_held_out=0)


def test_rewards():
    from lgrpo import Completion, Prompt

    def score(reward, text, answer):
        prompt = Prompt(token_ids=[1], text="?", row={"answer": answer}, position=0)
        completion = Completion(token_ids=[1], logprobs=[0.0], text=text, finish_reason="stop", behaviour_step=0)
        return reward([prompt], [completion])[0]

    assert score(ExactMatch(), " 12 ", "12") == 1.0
    assert score(ExactMatch(), "12.0", "12") == 0.0
    assert score(NumericMatch(), "so it is 1,200.0", "1200") == 1.0
    assert score(NumericMatch(), "12 or 13", "12") == 0.0
    assert score(NumericMatch(), "no idea", "12") == 0.0
    with pytest.raises(ValueError, match="holds no number: 'twelve'"):
        score(NumericMatch(), "12", "twelve")


def test_a_row_whose_answer_cannot_be_scored(tokenizer):
    task = in_memory([ROWS[0], {**ROWS[1], "answer": "none"}], reward=NumericMatch())
    with pytest.raises(
        ValueError, match=r"no answer to row 1 of the train set can be scored: .*holds no number: 'none'"
    ):
        load_prompts(task, "train", tokenizer, max_tokens=10)


def test_copies_of_a_prompt_have_different_positions(tokenizer):
    prompts = load_prompts(in_memory([ROWS[0], ROWS[1], ROWS[0]]), "train", tokenizer, max_tokens=10)
    assert [(prompts.at(i).text, prompts.at(i).position) for i in range(3)] == [("00>", 0), ("01>", 1), ("00>", 2)]


# Rows drawn by weight


def by_level(tokenizer, rows=ROWS, seed=0, **settings):
    difficulty = DifficultySampling(field="level", **settings)
    return load_prompts(in_memory(rows), "train", tokenizer, max_tokens=10, shuffle_seed=seed, difficulty=difficulty)


def test_rows_are_drawn_by_weight(tokenizer):
    prompts = by_level(tokenizer, weights={"0": 3.0, "1": 1.0})
    assert len(prompts) == 8  # a pass: the rows that can be drawn
    drawn = Counter(prompts.at(i).row["level"] for i in range(8000))
    assert set(drawn) == {0, 1}
    assert drawn[0] / 8000 == pytest.approx(0.75, abs=0.02)
    of_one_level = Counter(prompts.at(i).text for i in range(8000) if prompts.at(i).row["level"] == 0)
    assert min(of_one_level.values()) > 1300
    assert len(of_one_level) == 4
    rest = by_level(tokenizer, weights={"0": 0.0}, rest=2.0)
    assert {rest.at(i).row["level"] for i in range(100)} == {1, 2}


def test_a_draw_depends_only_on_seed_and_position(tokenizer):
    prompts, again = (by_level(tokenizer, weights={"0": 3.0, "1": 1.0}) for _ in range(2))
    in_order = [prompts.at(i).text for i in range(40)]
    assert [again.at(i).text for i in reversed(range(40))] == in_order[::-1]
    assert in_order[:8] != in_order[8:16]
    other = by_level(tokenizer, seed=1, weights={"0": 3.0, "1": 1.0})
    assert [other.at(i).text for i in range(40)] != in_order
    assert prompts.at(2**40 + 15).text == again.at(2**40 + 15).text


def test_invalid_weights(tokenizer):
    with pytest.raises(
        ValueError,
        match=r"no row of the train set has a weight .*: level is one of \['0', '1', '2'\], .* \['7'\]",
    ):
        by_level(tokenizer, weights={"7": 1.0})
    with pytest.raises(ValueError, match=r"row 1 of the train set: difficulty\.field is 'level', but the row has only"):
        by_level(tokenizer, rows=[ROWS[0], {"question": "1", "answer": "1"}], weights={"0": 1.0})
    for weight in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="the weight of 0 is"):
            DifficultySampling(field="level", weights={"0": weight}).check(TransformersEngine(), False)
        with pytest.raises(ValueError, match="the weight of rest is"):
            DifficultySampling(field="level", weights={}, rest=weight).check(TransformersEngine(), False)
    with pytest.raises(ValueError, match=r"data\.difficulty draws rows at random: it needs data\.shuffle"):
        by_level(tokenizer, seed=None, weights={"0": 1.0})


def test_weights_from_yaml(tokenizer):
    """YAML reads a key that looks like a number as a number."""
    assert DifficultySampling(field="level", weights={0: 1.0}).weight(ROWS[0]) == 1.0


# Streamed rows


class Counted(RowStream):
    """Rows that count how often they are read."""

    def __init__(self, rows):
        self.rows = rows
        self.num_read = self.num_passes = 0

    def __iter__(self):
        self.num_passes += 1
        for index, row in enumerate(self.rows):
            self.num_read += 1
            yield LocatedRow(f"line {index}", row)


def stream(tokenizer, rows=ROWS, source=None, **settings):
    limits = {"max_tokens": 10} | {name: settings.pop(name) for name in ("max_tokens", "overlong") if name in settings}
    render = RowRenderer(task=in_memory(), split="train", tokenizer=tokenizer, **limits)
    return StreamedPrompts(render, source or Counted(rows), **settings)


def texts(prompts, positions):
    return [prompts.at(i).text for i in positions]


def test_a_streaming_task_has_streamed_prompts(tmp_path, tokenizer):
    task = DatasetTask(ExactMatch(), train=write(tmp_path / "a.jsonl", ROWS), validation=ROWS, streaming=True)
    prompts = load_prompts(task, "train", tokenizer, max_tokens=10)
    assert prompts.is_streamed
    assert texts(prompts, range(30)) == [row["question"] for row in (ROWS * 3)[:30]]
    assert prompts.at(25).position == 25
    assert prompts.at(25).row == ROWS[1]
    assert not load_prompts(task, "validation", tokenizer, max_tokens=10).is_streamed
    assert not load_prompts(in_memory(), "train", tokenizer, max_tokens=10).is_streamed
    with pytest.raises(ValueError, match=r"set data\.num_rollouts"):
        len(prompts)
    with pytest.raises(ValueError, match=r"data\.difficulty draws from all rows"):
        load_prompts(
            task,
            "train",
            tokenizer,
            max_tokens=10,
            shuffle_seed=0,
            difficulty=DifficultySampling(field="x", weights={}),
        )


@pytest.mark.parametrize("overlong", ["error", "drop"])
@pytest.mark.parametrize("buffer_size", [1, 5, 100])
def test_every_pass_over_a_stream_has_every_prompt_once(buffer_size, overlong, tokenizer):
    settings = {"shuffle_seed": 1, "buffer_size": buffer_size, "overlong": overlong}
    prompts = stream(tokenizer, **settings)
    passes = [texts(prompts, range(e * 12, e * 12 + 12)) for e in range(3)]
    assert all(Counter(one) == Counter(row["question"] for row in ROWS) for one in passes)
    if buffer_size > 1:
        assert passes[0] != passes[1] != passes[2]
    every = list(itertools.chain(*passes))
    again = stream(tokenizer, **settings)
    assert texts(again, (30, 5, 17, 35, 0)) == [every[i] for i in (30, 5, 17, 35, 0)]
    if buffer_size == 100:
        assert texts(stream(tokenizer, **settings | {"shuffle_seed": 2}), range(12)) != passes[0]


def test_a_stream_is_read_forward_and_only_as_far_as_needed(tokenizer):
    source = Counted([{"question": f"{i:05d}", "answer": ""} for i in range(5000)])
    prompts = stream(tokenizer, source=source)
    assert source.num_read == 1
    texts(prompts, range(0, 3000, 2))
    assert (source.num_read, source.num_passes) == (2999, 1)
    texts(prompts, range(2000, 3000, 2))  # still in the cache
    assert source.num_passes == 1
    assert prompts.at(1).text == "00001"  # no longer in the cache
    assert (source.num_read, source.num_passes) == (3001, 2)
    assert len(prompts._cache) <= 1024


def test_overlong_prompts_of_a_stream(tokenizer):
    rows = [ROWS[0], {"question": "1" * 50, "answer": ""}, ROWS[1]]
    prompts = stream(tokenizer, rows)
    with pytest.raises(ValueError, match=r"prompt \(line 1\) of the train set has 50 tokens, but only 10 fit.*drop"):
        prompts.at(1)
    kept = stream(tokenizer, rows, overlong="drop")
    assert texts(kept, range(4)) == ["00>", "01>", "00>", "01>"]
    assert kept.num_dropped == 2
    assert stream(tokenizer, rows, overlong="drop").at(3).text == "01>"  # rows dropped before it are counted too
    assert texts(kept, (3, 2, 1)) == ["01>", "00>", "01>"]
    with pytest.raises(ValueError, match="no prompt of the train set fits into 1 tokens"):
        stream(tokenizer, rows, overlong="drop", max_tokens=1)


def test_a_stream_that_cannot_be_read_fails_at_once(tmp_path, tokenizer):
    def prompts(content):
        (tmp_path / "a.jsonl").write_text(content)
        task = DatasetTask(NumericMatch(), train=str(tmp_path / "a.jsonl"), streaming=True)
        return load_prompts(task, "train", tokenizer, max_tokens=10)

    with pytest.raises(ValueError, match="the train set is empty"):
        prompts("")
    with pytest.raises(ValueError, match=r"a\.jsonl, line 1: "):
        prompts("{")
    with pytest.raises(
        ValueError, match=r"reward reads \['answer'\], but row \(.*a\.jsonl, line 1\) of the train set has"
    ):
        prompts('{"question": "1"}\n')
    with pytest.raises(ValueError, match=r"no answer to row \(.*line 1\) of the train set can be scored"):
        prompts('{"question": "1", "answer": "x"}\n')
    with pytest.raises(FileNotFoundError, match="there is no data file"):
        load_prompts(DatasetTask(ExactMatch(), "absent.jsonl", streaming=True), "train", tokenizer, max_tokens=10)
