"""Recorded rollouts on disk: a row for each completion, in Parquet, or as somebody else wrote them.

``RolloutRecorder`` writes them and ``ReplayEngine`` trains on them. Nothing in a file is executed when it is read.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, final

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from transformers import PreTrainedTokenizerBase

from lgrpo.tasks.files import is_data_file, read_file
from lgrpo.types import Prompt

SCHEMA = pa.schema(
    [
        ("group", pa.int64()),  # rows with one number are siblings
        ("sibling", pa.int32()),
        ("position", pa.int64()),  # of the prompt in the recorded run
        ("rollout", pa.int64()),
        ("prompt", pa.string()),
        ("prompt_token_ids", pa.list_(pa.int32())),
        ("row", pa.string()),  # JSON: what a reward checks the answer against
        ("completion", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("finish_reason", pa.string()),
        ("reward", pa.float32()),
        ("failed", pa.bool_()),  # the reward is the one of a completion that could not be scored
        ("advantage", pa.float32()),
        ("behaviour_step", pa.int64()),
        ("version", pa.int64()),
    ]
)
"""Of a recording. In one from elsewhere only ``prompt`` and ``completion`` must be there."""

_KEY = b"lgrpo"
_FORMAT = 1
_LISTS = {"completions": "completion", "rewards": "reward", "finish_reasons": "finish_reason"}
"""Columns that hold all siblings of a prompt in one row, and what they are called for one completion."""


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Equal for tokenizers whose token ids mean the same."""
    tokens = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=False)
    return hashlib.sha256(tokens.encode()).hexdigest()[:16]


def write_recording(rows: Sequence[Mapping[str, Any]] | pa.Table, facts: Mapping[str, Any], path: Path) -> None:
    """Writes a file whole or not at all; one of the same name is replaced.

    Args:
        rows: By the names of ``SCHEMA``; what a row does not have is null.
        facts: About all of them: task, model, tokenizer, sampling. Kept in the file's metadata, as JSON.
        path: Of the file.
    """
    table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(list(rows), schema=SCHEMA)
    table = table.replace_schema_metadata({_KEY: json.dumps({"format": _FORMAT, **facts}, default=str).encode()})
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        pq.write_table(table, unfinished, compression="zstd")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


@dataclass(kw_only=True, slots=True)
class RecordedGroup:
    """Completions of one prompt that were recorded together."""

    prompt: str
    position: int | None
    """Of the prompt in the recorded run."""
    rows: list[int]
    """Where its completions stand in the table, siblings in their order."""


@final
@dataclass(kw_only=True)
class Recording:
    """All completions of some files, and who stands with whom."""

    name: str
    """Of the files, for messages."""
    table: pa.Table
    facts: list[dict[str, Any]] = field(default_factory=list)
    """What each file says about itself; nothing about one from elsewhere."""
    has_strangers: bool = False
    """Whether a file is from elsewhere, so that nobody says which tokenizer its token ids are of."""

    @classmethod
    def read(cls, path: str | Sequence[str]) -> Recording:
        """Reads a file, a folder of Parquet files (as ``RolloutRecorder`` leaves it), or several of either.

        Raises:
            FileNotFoundError: there is nothing of that name.
            ValueError: something in it is broken or missing; says what, and where.
        """
        paths = [path] if isinstance(path, str) else list(path)
        files = [file for one in paths for file in _files(one)]
        tables, facts, first_group, has_strangers = [], [], 0, False
        for file in files:
            table, fact = _read_parquet(file) if file.endswith(".parquet") else (_read_rows(file), None)
            groups = table["group"].combine_chunks().dictionary_encode()
            numbers = pc.add(groups.indices.cast(pa.int64()), first_group)
            first_group += len(groups.dictionary)
            tables.append(table.set_column(0, "group", numbers))
            has_strangers |= fact is None or "tokenizer" not in fact
            if fact is not None and fact not in facts:
                facts.append(fact)
        table = pa.concat_tables(tables)
        name = ", ".join(paths)
        if len(table) == 0:
            raise ValueError(f"{name} holds no completion")
        return cls(name=name, table=table, facts=facts, has_strangers=has_strangers)

    @cached_property
    def fingerprint(self) -> str:
        """Of all that is in it."""
        digest = hashlib.sha256()
        for batch in self.table.combine_chunks().to_batches():
            digest.update(batch.serialize())
        return digest.hexdigest()[:16]

    @cached_property
    def groups(self) -> list[RecordedGroup]:
        """In the order of the files."""
        found: dict[int, RecordedGroup] = {}
        columns = (self.table[name].to_pylist() for name in ("group", "prompt", "position"))
        for row, (number, prompt, position) in enumerate(zip(*columns, strict=True)):
            group = found.setdefault(number, RecordedGroup(prompt=prompt, position=position, rows=[]))
            if group.prompt != prompt:
                raise ValueError(
                    f"{self.name}: group {number} has two prompts, {group.prompt[:60]!r} and {prompt[:60]!r}"
                )
            group.rows.append(row)
        siblings = self.table["sibling"].to_pylist()
        for group in found.values():
            group.rows.sort(key=lambda row: siblings[row] or 0)
        return list(found.values())

    def prompt_of(self, group: RecordedGroup, tokenizer: PreTrainedTokenizerBase) -> Prompt:
        """The prompt of a group, with the row of data it was made from as far as that was recorded."""
        one = self.table.slice(group.rows[0], 1).to_pylist()[0]
        return Prompt(
            token_ids=one["prompt_token_ids"] or tokenizer(group.prompt).input_ids,
            text=group.prompt,
            row=self.row_of(one),
            position=0 if group.position is None else group.position,
        )

    @staticmethod
    def row_of(one: Mapping[str, Any]) -> dict[str, Any]:
        """The row of data behind a recorded row."""
        return json.loads(one["row"]) if one["row"] else {}

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Refuses token ids that mean other tokens here."""
        own = tokenizer_fingerprint(tokenizer)
        others = [fact for fact in self.facts if fact.get("tokenizer") not in (None, own)]
        if others and self.table["token_ids"].null_count < len(self.table):
            raise ValueError(
                f"{self.name} was recorded with another tokenizer (that of {_model_of(others[0])}, fingerprint "
                f"{others[0]['tokenizer']}) than the policy's ({own}): its token ids and log-probabilities mean "
                "nothing here. Take prompt, completion and reward into a file of their own to have the texts tokenised"
            )


def _model_of(fact: Mapping[str, Any]) -> str:
    model = fact.get("model") or {}
    return model.get("name") or model.get("type") or "an unnamed model"


def _files(path: str) -> list[str]:
    if Path(path).is_dir():
        files = sorted(str(file) for file in Path(path).glob("*.parquet"))
        if not files:
            raise FileNotFoundError(f"there is no .parquet file in {path}: a folder of recorded rollouts was expected")
        return files
    if not Path(path).is_file():
        raise FileNotFoundError(f"there are no recorded rollouts at {path}")
    if not is_data_file(path) or ".csv" in Path(path).suffixes:  # whose cells are all text, rewards too
        raise ValueError(f"{path} is no file of rollouts: these are .parquet, .jsonl or .json")
    return [path]


def _read_parquet(path: str) -> tuple[pa.Table, dict[str, Any] | None]:
    """A recording of ours, columns as they are; or rows from elsewhere."""
    try:
        with pq.ParquetFile(path) as file:
            metadata = file.schema_arrow.metadata or {}
            table = file.read() if _KEY in metadata else None
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} is broken as a Parquet file: {error}") from error
    if table is None:
        return _read_rows(path), None
    if missing := [name for name in SCHEMA.names if name not in table.column_names]:
        raise ValueError(f"{path} is a recording without {missing}; it has {table.column_names}")
    table = table.select(SCHEMA.names).replace_schema_metadata(None).cast(SCHEMA)
    _check_rewards(path, table)
    facts = json.loads(metadata[_KEY])
    if facts["format"] != _FORMAT:
        raise ValueError(f"{path} is a recording of format {facts['format']}; this version of lgrpo reads {_FORMAT}")
    return table, facts


def _check_rewards(path: str, table: pa.Table) -> None:
    """A reward is a finite number, or null where it is not known."""
    for index, reward in enumerate(table["reward"].to_pylist()):
        if reward is not None and not math.isfinite(reward):
            raise ValueError(
                f"{path}, row {index}: the reward is {reward}; a reward is a finite number, or null where it is not "
                "known yet"
            )


def _read_rows(path: str) -> pa.Table:
    """Rows from elsewhere: one for each completion, or one for each prompt with lists of completions and rewards."""
    rows: list[dict[str, Any]] = []
    numbers: dict[object, int] = {}
    members: dict[int, int] = {}
    for place, given in read_file(path):
        for one in _completions_in(place, given):
            key = given.get("group", (one["prompt"],))  # without a number, a prompt's completions are one group
            one["group"] = numbers.setdefault(key, len(numbers))
            one["sibling"] = members[one["group"]] = members.get(one["group"], -1) + 1
            rows.append(one)
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def _completions_in(place: str, given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The completions of a row, by the names of ``SCHEMA``, checked."""
    lists = {own: given[theirs] for theirs, own in _LISTS.items() if given.get(theirs) is not None}
    if "prompt" not in given or ("completion" not in given and "completion" not in lists):
        raise ValueError(
            f"{place}: a recorded row has a prompt, and a completion (or completions, a list); this one has "
            f"{sorted(given)}"
        )
    shared = {name: given[name] for name in ("prompt", "position", "rollout") if name in given}
    known = {*SCHEMA.names, *_LISTS}
    others = {name: value for name, value in given.items() if name not in known}
    row = given.get("row") or others
    shared["row"] = row if isinstance(row, str) else json.dumps(row, ensure_ascii=False, default=str)
    own = ("completion", "token_ids", "logprobs", "finish_reason", "reward")
    if "completion" not in lists:
        found = [{name: given.get(name) for name in own}]
    else:
        if wrong := [name for name, values in lists.items() if not isinstance(values, list)]:
            raise ValueError(f"{place}: {wrong[0]}s is not a list")
        if len({len(values) for values in lists.values()}) > 1:
            counts = ", ".join(f"{len(values)} {name}s" for name, values in lists.items())
            raise ValueError(f"{place}: {counts}: one of each belongs to every completion")
        found = [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]
    return [_checked(place, shared | one) for one in found]


def _checked(place: str, one: dict[str, Any]) -> dict[str, Any]:
    for name in ("prompt", "completion"):
        if not isinstance(one[name], str):
            raise ValueError(f"{place}: {name} is {one[name]!r}, not a text")
    reward = one.get("reward")
    if reward is not None:
        is_number = isinstance(reward, int | float)
        if not is_number or not math.isfinite(reward):
            raise ValueError(
                f"{place}: the reward is {reward!r}; a reward is a finite number, or null where it is not known yet"
            )
        one["reward"] = float(reward)
    one["finish_reason"] = one.get("finish_reason") or "stop"
    if one["finish_reason"] not in ("stop", "length"):
        raise ValueError(f"{place}: finish_reason is {one['finish_reason']!r}; it is stop or length")
    ids, logprobs = one.get("token_ids"), one.get("logprobs")
    if logprobs is not None and (ids is None or len(ids) != len(logprobs)):
        raise ValueError(f"{place}: logprobs has one number for each of token_ids, and these do not fit together")
    if wrong := [number for number in logprobs or [] if not isinstance(number, int | float)]:
        raise ValueError(f"{place}: logprobs has {wrong[0]!r} in it; where one is not known, leave all of them out")
    return one
