"""Replay by absolute advantage, with a limit of age."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from lgrpo import ReplayEngine, RolloutRecorder
from lgrpo.recordings import Recording
from lgrpo.recordings.priority import MIN_PRIORITY, draw, recent_groups, recorded_priorities
from lgrpo.recordings.recording import with_column, write_recording
from lgrpo.tasks import SortDigits
from tests.helpers import LowDigits, fit


def task():
    """Return a task with eight training prompts, so that each is recorded more than once."""
    return SortDigits(num_digits=2, num_held_out=92, reward=LowDigits())


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("recorded"))
    fit(rollouts=6, v=2, data={"task": task()}, callbacks=[RolloutRecorder(path=folder)])
    return folder


def replayed(folder, **engine):
    """Return the completions that a run trains on."""
    run = fit(rollouts=8, data={"task": task(), "engine": ReplayEngine(folder, **engine)})
    return [
        tuple(batch.tokens[row][batch.attention_mask[row]].tolist())
        for batch in run.recorder.rollouts
        for row in range(len(batch))
    ]


def test_chances_are_proportional_to_the_weights():
    generator, weights = random.Random(0), [1.0, 2.0, 5.0, 2.0]
    first = Counter(draw(range(4), weights, 1, generator)[0] for _ in range(20_000))
    assert [first[i] / 20_000 for i in range(4)] == pytest.approx([0.1, 0.2, 0.5, 0.2], abs=0.015)
    pairs = Counter(tuple(draw(range(4), weights, 2, generator)) for _ in range(20_000))
    assert all(a != b for a, b in pairs)
    assert pairs[2, 0] / 20_000 == pytest.approx(0.5 * 1 / 5, abs=0.015)  # of what is left after the first


def test_priorities_are_absolute_advantages(recorded):
    recording = Recording.read(recorded)
    found = recorded_priorities(recording, range(len(recording.table)))
    expected = [abs(a or 0.0) + MIN_PRIORITY for a in recording.table["advantage"].to_pylist()]
    assert found == expected
    assert min(found) < 0.5 < max(found)


def test_completions_with_large_advantages_are_replayed(recorded):
    recording = Recording.read(recorded)
    rows = recording.table.to_pylist()
    sizes = {}
    for row in rows:
        key = (*row["prompt_token_ids"], *row["token_ids"])
        sizes[key] = max(sizes.get(key, 0.0), abs(row["advantage"]))
    means = {}
    for power in (0.0, 1.0, 20.0):
        used = replayed(recorded, priority=power)
        means[power] = sum(sizes[tokens] for tokens in used) / len(used)
    assert means[0.0] < means[1.0] < means[20.0]
    assert replayed(recorded, priority=1.0) == replayed(recorded, priority=1.0)


def test_old_rollouts_are_left_out(recorded):
    recording = Recording.read(recorded)
    rollouts = recording.table["rollout"].to_pylist()
    for age, kept in ((None, range(6)), (2, range(3, 6)), (0, [5])):
        groups = recent_groups(recording, age)
        assert {rollouts[row] for group in groups for row in group.rows} == set(kept)
    rows = recording.table.to_pylist()
    recent = {(*row["prompt_token_ids"], *row["token_ids"]) for row in rows if row["rollout"] >= 3}
    assert set(replayed(recorded, max_age=2)) <= recent


@pytest.mark.parametrize("name", ["logprobs", "reward", "advantage"])
def test_what_old_rollouts_lack_is_not_missed(recorded, tmp_path, name):
    recording = Recording.read(recorded)
    rows = recording.table.to_pylist()
    values = [None if row["rollout"] < 3 else row[name] for row in rows]
    write_recording(with_column(recording.table, name, values), recording.metadata[0], tmp_path / "old.parquet")
    path = str(tmp_path / "old.parquet")
    assert replayed(path, priority=1.0, max_age=2) == replayed(recorded, priority=1.0, max_age=2)
    number = sum(row["rollout"] == 2 for row in rows)
    with pytest.raises(ValueError, match=rf"\b{number} (of \d+ )?(recorded )?completions"):
        replayed(path, priority=1.0, max_age=3)


def test_bad_settings(recorded, tmp_path):
    with pytest.raises(ValueError, match=r"data.engine.priority is -1"):
        ReplayEngine(recorded, priority=-1)
    with pytest.raises(ValueError, match=r"data.engine.max_age is -1"):
        ReplayEngine(recorded, max_age=-1)
    with pytest.raises(ValueError, match=r"older ones than data.engine.max_age \(0\) do not count"):
        replayed(recorded, max_age=0)
    recording = Recording.read(recorded)
    for name, message in (("advantage", "needs the advantages of the recorded run"), ("rollout", "does not say in")):
        path = tmp_path / f"{name}.parquet"
        table = with_column(recording.table, name, [None] * len(recording.table))
        write_recording(table, recording.metadata[0], path)
        with pytest.raises(ValueError, match=message):
            replayed(str(path), priority=1.0, max_age=3)
