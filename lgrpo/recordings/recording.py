"""The file format of recorded rollouts: one row per completion, in Parquet, or in JSON lines from other programs.

``RolloutRecorder`` writes such files and ``ReplayEngine`` trains on them. Reading a file executes nothing in it.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, final

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from transformers import PreTrainedTokenizerBase

from lgrpo.contexts import Dropped
from lgrpo.kept import Kept
from lgrpo.recordings.rows import OPTIONAL, read_rows
from lgrpo.rewards import FailedScore, NotedScore
from lgrpo.run.atomic import replaced
from lgrpo.run.resume import chat_template_fingerprint, vocabulary_fingerprint
from lgrpo.tasks.files import is_data_file
from lgrpo.types import RECORDED, Completion, Prompt

SCHEMA = pa.schema(
    [
        ("group", pa.int64()),  # rows with the same number are siblings
        ("sibling", pa.int32()),
        ("position", pa.int64()),  # position of the prompt in the recorded run
        ("rollout", pa.int64()),
        ("prompt", pa.string()),
        ("prompt_token_ids", pa.list_(pa.int32())),
        ("row", pa.string()),  # JSON of the dataset row, which the reward checks the answer against
        ("completion", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("finish_reason", pa.string()),
        ("reward", pa.float32()),
        ("failed", pa.bool_()),  # whether the completion could not be scored
        ("advantage", pa.float32()),
        ("behaviour_step", pa.int64()),
        ("version", pa.int64()),
        # tokens of each behaviour step, if a completion has several; behaviour_step is the first one then
        ("spans", pa.list_(pa.struct([("tokens", pa.int32()), ("step", pa.int64()), ("version", pa.int64())]))),
        # ranges of tokens that an environment wrote, its reward of each turn, and whether its failure ended the episode
        ("observed", pa.list_(pa.struct([("start", pa.int32()), ("stop", pa.int32())]))),
        ("turn_rewards", pa.list_(pa.float32())),
        ("episode_failed", pa.bool_()),
        # observations that later contexts do not have: tokens [start, middle), replaced by [middle, stop) from turn on
        ("dropped", pa.list_(pa.struct([(name, pa.int32()) for name in Dropped._fields]))),
        # of truncated sampling: tokens that could have been drawn, and how many of them belong to each of token_ids
        ("kept_token_ids", pa.list_(pa.int32())),
        ("kept_counts", pa.list_(pa.int32())),
        ("score_notes", pa.string()),  # JSON of what the reward noted about the score, such as a judge's verdict
    ]
)
"""Schema of a recording. Files of other programs need only ``prompt`` and ``completion``."""

_KEY = b"lgrpo"
_FORMAT = 1
_NOTES = "score_notes"
_ADDED = ("spans", *OPTIONAL, _NOTES)
"""Columns that older recordings do not have."""


def write_recording(rows: Sequence[Mapping[str, Any]] | pa.Table, metadata: Mapping[str, Any], path: Path) -> None:
    """Write rows with the names of ``SCHEMA`` to a file, atomically; missing values are null.

    ``metadata`` (task, model, tokenizer and sampling of all rows) is stored as JSON in the file's metadata.
    """
    table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(list(rows), schema=SCHEMA)
    table = table.replace_schema_metadata({_KEY: json.dumps({"format": _FORMAT, **metadata}, default=str).encode()})
    with replaced(path) as unfinished:
        pq.write_table(table, unfinished, compression="zstd")


def with_column(table: pa.Table, name: str, values: list[Any]) -> pa.Table:
    """Return the table with the values of a column replaced."""
    index = table.column_names.index(name)
    return table.set_column(index, table.schema.field(index), pa.array(values, table.schema.field(index).type))


@dataclass(kw_only=True, slots=True)
class RecordedGroup:
    """Completions of one prompt that were recorded together."""

    prompt: str
    position: int | None
    """Position of the prompt in the recorded run."""
    rows: list[int]
    """Row numbers of its completions in the table, in the order of siblings."""


@final
@dataclass(kw_only=True)
class Recording:
    """All completions of some files, in one table, and their groups."""

    name: str
    """Paths of the files, for messages."""
    table: pa.Table
    metadata: list[dict[str, Any]] = field(default_factory=list)
    """Distinct metadata of the files; files of other programs have none."""
    has_unknown_tokenizer: bool = False
    """Whether a file does not say which tokenizer its token ids are from."""

    @classmethod
    def read(cls, path: str | Sequence[str]) -> Recording:
        """Read a file, a folder of Parquet files (as ``RolloutRecorder`` writes it), or several of either.

        An error says what is invalid or missing, and where.
        """
        paths = [path] if isinstance(path, str) else list(path)
        files = [file for one in paths for file in _files(one)]
        tables, metadata, first_group, has_unknown_tokenizer = [], [], 0, False
        for file in files:
            table, own = _read_parquet(file) if file.endswith(".parquet") else (_table_of_rows(file), None)
            groups = table["group"].combine_chunks().dictionary_encode()
            numbers = pc.add(groups.indices.cast(pa.int64()), first_group)
            first_group += len(groups.dictionary)
            tables.append(table.set_column(0, "group", numbers))
            has_unknown_tokenizer |= own is None or "tokenizer" not in own
            if own is not None and own not in metadata:
                metadata.append(own)
        table = pa.concat_tables(tables)
        name = ", ".join(paths)
        if len(table) == 0:
            raise ValueError(f"{name} holds no completion")
        return cls(name=name, table=table, metadata=metadata, has_unknown_tokenizer=has_unknown_tokenizer)

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint of the table without notes."""
        digest = hashlib.sha256()
        unused = [name for name in OPTIONAL if self.table[name].null_count == len(self.table)] + [_NOTES]
        for batch in self.table.drop_columns(unused).combine_chunks().to_batches():  # as before there were such columns
            digest.update(batch.serialize())
        return digest.hexdigest()[:16]

    @cached_property
    def groups(self) -> list[RecordedGroup]:
        """Groups in the order of the files."""
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
        """Return the prompt of a group, with the dataset row it was rendered from as far as recorded."""
        first = self.table.slice(group.rows[0], 1).to_pylist()[0]
        return Prompt(
            token_ids=first["prompt_token_ids"] or tokenizer(group.prompt).input_ids,
            text=group.prompt,
            row=self.row_of(first),
            position=0 if group.position is None else group.position,
        )

    @staticmethod
    def row_of(recorded: Mapping[str, Any]) -> dict[str, Any]:
        """Return the dataset row of a recorded row."""
        return json.loads(recorded["row"]) if recorded["row"] else {}

    def completions(self, rows: Sequence[int], rewards: Literal["recorded", "task"]) -> list[Completion]:
        """Return the completions in some rows of the table, which must have token ids.

        They keep their recorded rewards if ``rewards`` asks for them; otherwise the task is to score them.
        """
        return [_completion(row, rewards == "recorded") for row in self.table.take(rows).to_pylist()]

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise an error if token ids were recorded with another tokenizer, and warn if the chat template differs."""
        own = vocabulary_fingerprint(tokenizer)
        others = [metadata for metadata in self.metadata if metadata.get("tokenizer") not in (None, own)]
        if others and self.table["token_ids"].null_count < len(self.table):
            raise ValueError(
                f"{self.name} was recorded with another tokenizer (that of {_model_of(others[0])}, fingerprint "
                f"{others[0]['tokenizer']}) than the policy's ({own}): its token ids and log-probabilities are not "
                "valid here. Copy only prompt, completion and reward into another file to have the texts tokenised"
            )
        template = chat_template_fingerprint(tokenizer)
        if any(metadata.get("chat_template", template) != template for metadata in self.metadata):
            warnings.warn(
                f"{self.name} was recorded with another chat template than the tokenizer's: training uses the recorded "
                "prompts, while validation and sampled groups use prompts of the current template",
                stacklevel=2,
            )


def _completion(row: Mapping[str, Any], keeps_reward: bool) -> Completion:
    reward: float | None = row["reward"] if keeps_reward else None
    notes = json.loads(row["score_notes"]) if row["score_notes"] else None
    if reward is not None and row["failed"]:
        reward = FailedScore(reward, "errors", "it failed when it was recorded", notes)
    elif reward is not None and notes is not None:
        reward = NotedScore(reward, notes)
    observed = tuple((part["start"], part["stop"]) for part in row["observed"] or [])
    logprobs = row["logprobs"] or [math.nan] * len(row["token_ids"])
    for start, stop in observed:
        logprobs[start:stop] = [0.0] * (stop - start)
    return Completion(
        token_ids=row["token_ids"],
        logprobs=logprobs,
        text=row["completion"],
        finish_reason=row["finish_reason"],
        behaviour_step=RECORDED,
        version=RECORDED,
        reward=reward,
        observed=observed,
        turn_rewards=None if row["turn_rewards"] is None else tuple(row["turn_rewards"]),
        failure=("errors", "its environment failed when it was recorded") if row["episode_failed"] else None,
        dropped=dropped_in(row),
        kept=_kept(row["kept_token_ids"], row["kept_counts"]),
    )


def dropped_in(row: Mapping[str, Any]) -> tuple[Dropped, ...]:
    """Return the dropped observations of a recorded row."""
    return tuple(Dropped(**one) for one in row["dropped"] or [])


def _kept(token_ids: list[int] | None, counts: list[int] | None) -> Kept | None:
    if token_ids is None or counts is None:
        return None
    return Kept(token_ids=array("i", token_ids), counts=array("i", counts))


def _model_of(metadata: Mapping[str, Any]) -> str:
    model = metadata.get("model") or {}
    return model.get("name") or model.get("type") or "an unnamed model"


def _files(path: str) -> list[str]:
    if Path(path).is_dir():
        files = sorted(str(file) for file in Path(path).glob("*.parquet"))
        if not files:
            raise FileNotFoundError(f"there is no .parquet file in {path}: a folder of recorded rollouts was expected")
        return files
    if not Path(path).is_file():
        raise FileNotFoundError(f"there are no recorded rollouts at {path}")
    if not is_data_file(path) or ".csv" in Path(path).suffixes:  # all cells of a CSV file are text, also rewards
        raise ValueError(f"{path} is not a file of rollouts, which ends in .parquet, .jsonl or .json")
    return [path]


def _read_parquet(path: str) -> tuple[pa.Table, dict[str, Any] | None]:
    """Return the table and metadata of a recording, or the rows of a Parquet file of another program."""
    try:
        with pq.ParquetFile(path) as file:
            metadata = file.schema_arrow.metadata or {}
            table = file.read() if _KEY in metadata else None
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a valid Parquet file: {error}") from error
    if table is None:
        return _table_of_rows(path), None
    for name in (name for name in _ADDED if name not in table.column_names):
        table = table.append_column(SCHEMA.field(name), pa.nulls(len(table), SCHEMA.field(name).type))
    if missing := [name for name in SCHEMA.names if name not in table.column_names]:
        raise ValueError(f"{path} is a recording without {missing}; it has {table.column_names}")
    table = table.select(SCHEMA.names).replace_schema_metadata(None).cast(SCHEMA)
    _check_rewards(path, table)
    own = json.loads(metadata[_KEY])
    if own["format"] != _FORMAT:
        raise ValueError(f"{path} is a recording of format {own['format']}; this version of lgrpo reads {_FORMAT}")
    return table, own


def _check_rewards(path: str, table: pa.Table) -> None:
    """Raise an error unless every reward is finite or null."""
    for index, reward in enumerate(table["reward"].to_pylist()):
        if reward is not None and not math.isfinite(reward):
            raise ValueError(
                f"{path}, row {index}: the reward is {reward}; it must be a finite number, or null if not known yet"
            )


def _table_of_rows(path: str) -> pa.Table:
    """Return the table of a file of another program."""
    return pa.Table.from_pylist(read_rows(path, SCHEMA.names), schema=SCHEMA)
