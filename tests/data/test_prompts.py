"""Prompts: where they come from, their order, and what is wrong with them."""

from __future__ import annotations

import gzip
import json
from collections import Counter

import pytest
from datasets import Dataset

from lgrpo.data import PromptSet
from lgrpo.policy import character_tokenizer
from lgrpo.rewards import ExactMatch, NumericMatch
from lgrpo.tasks import Arithmetic, DatasetTask, SortDigits, Template
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
    prompts = PromptSet(task, "train", tokenizer, max_tokens=10)
    assert [prompts.at(i).text for i in range(12)] == [row["question"] for row in ROWS]
    assert prompts.at(3).row["answer"] == "3"
    assert len(task.rows("validation")) == 12


def test_a_folder_by_name_as_the_hub_would_give_it(tmp_path, tokenizer):
    """``load_dataset(name, split=…)``, the hub's own path, on a folder of data files."""
    write(tmp_path / "train.jsonl", ROWS)
    write(tmp_path / "test.jsonl", ROWS[:5])
    task = DatasetTask(ExactMatch(), train=str(tmp_path))
    assert len(task.rows("train")) == 12
    assert len(task.rows("validation")) == 5


def test_every_pass_has_every_prompt_once_in_an_order_of_its_own(tokenizer):
    prompts = PromptSet(in_memory(), "train", tokenizer, max_tokens=10, shuffle_seed=1)
    passes = [[prompts.at(e * 12 + i).text for i in range(12)] for e in range(3)]
    assert all(Counter(p) == Counter(passes[0]) for p in passes)
    assert passes[0] != passes[1] != passes[2]
    again = PromptSet(in_memory(), "train", tokenizer, max_tokens=10, shuffle_seed=1)
    assert [again.at(i).text for i in (30, 5, 17)] == [passes[2][6], passes[0][5], passes[1][5]]


def test_missing_columns_are_named(tokenizer):
    with pytest.raises(
        ValueError, match=r"template reads \['problem'\], but row 0 of the train set has only \['answer', 'level'"
    ):
        PromptSet(in_memory(template=Template(prompt="{problem}")), "train", tokenizer, max_tokens=10)
    with pytest.raises(ValueError, match=r"reward reads \['gold'\], but"):
        PromptSet(in_memory(reward=ExactMatch("gold")), "train", tokenizer, max_tokens=10)


def test_an_empty_prompt(tokenizer):
    rows = [*ROWS[:2], {"question": "  ", "answer": "", "level": 0}]
    with pytest.raises(ValueError, match="prompt 2 of the train set is empty"):
        PromptSet(in_memory(rows), "train", tokenizer, max_tokens=10)


def test_rows_are_checked_one_by_one(tokenizer):
    def prompts(*rows, prompt="{question}>"):
        return PromptSet(in_memory([ROWS[0], *rows], Template(prompt=prompt)), "train", tokenizer, max_tokens=10)

    with pytest.raises(ValueError, match=r"template reads \['question'\], but row 1 of the train set has only"):
        prompts({"answer": "1", "level": 0})
    with pytest.raises(ValueError, match=r"reads \['question'\], but there is nothing in row 1"):
        prompts({"question": None, "answer": "1"})
    with pytest.raises(ValueError, match=r"reward reads \['answer'\], but there is nothing in row 1"):
        prompts({"question": "1", "answer": None})
    with pytest.raises(ValueError, match="prompt 1 of the train set is empty"):
        prompts({"question": " ", "answer": "1"})


def test_a_pad_token_in_a_chat_is_no_harm(tokenizer):
    """Some tokenizers pad with the token that ends a turn."""
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}>"
    prompts = PromptSet(in_memory(template=Template(chat=True)), "train", tokenizer, max_tokens=10)
    assert tokenizer.pad_token_id in prompts.at(0).token_ids


def test_an_empty_validation_set_is_not_the_training_set():
    with pytest.raises(ValueError, match="the validation set is empty"):
        DatasetTask(ExactMatch(), train=ROWS, validation=[]).rows("validation")


def test_a_prompt_longer_than_the_context(tokenizer):
    rows = [*ROWS[:3], {"question": "1" * 50, "answer": "", "level": 0}]
    with pytest.raises(ValueError, match=r"prompt 3 of the train set has 50 tokens, but only 10 fit.*drop"):
        PromptSet(in_memory(rows), "train", tokenizer, max_tokens=10)
    kept = PromptSet(in_memory(rows), "train", tokenizer, max_tokens=10, overlong="drop")
    assert (len(kept), kept.num_dropped) == (3, 1)
    with pytest.raises(ValueError, match="no prompt of the train set fits"):
        PromptSet(in_memory(rows), "train", tokenizer, max_tokens=1, overlong="drop")


def test_characters_the_tokenizer_cannot_spell(tokenizer):
    rows = [{"question": "12x>", "answer": "", "level": 0}]
    with pytest.raises(ValueError, match="prompt 0 of the train set has characters the tokenizer cannot spell"):
        PromptSet(in_memory(rows), "train", tokenizer, max_tokens=10)


def test_an_empty_set(tmp_path):
    with pytest.raises(ValueError, match="the train set is empty"):
        in_memory([]).rows("train")
    with pytest.raises(FileNotFoundError, match=r"there is no data file .*absent\.jsonl"):
        DatasetTask(ExactMatch(), train=str(tmp_path / "absent.jsonl"), validation=[]).rows("train")


def test_a_file_has_no_split_to_validate_on(tmp_path):
    with pytest.raises(ValueError, match=r"task\.validation is missing"):
        DatasetTask(ExactMatch(), train=str(tmp_path / "rows.jsonl"))


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


def test_generated_tasks_hold_out_what_they_validate_on():
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
