"""Tests of ``lgrpo score``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from lgrpo import ReplayEngine, RolloutRecorder
from lgrpo.cli import main
from lgrpo.losses import ComposedLoss
from lgrpo.recordings import RecordedPrompts, Recording, rescore
from lgrpo.recordings.recording import write_recording
from lgrpo.rewards import NOT_YET, EnvironmentReward, ExactMatch, Reward, Scoring, WeightedSum
from lgrpo.tasks import SortDigits
from tests.engines.test_environment import Failing, data_of
from tests.helpers import LowDigits, fit, tiny_policy

TINY = Path(__file__).parent.parent.parent / "configs" / "tiny.yaml"


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded") / "rollouts"
    task = SortDigits(num_digits=3, num_held_out=128, reward=LowDigits())
    fit(callbacks=[RolloutRecorder(path=str(folder))], data={"task": task}, rollouts=2)
    return folder


def test_a_recording_scored_by_another_reward(recorded, tmp_path, capsys):
    """Only rewards change, and advantages, which become null."""
    out = tmp_path / "scored.parquet"
    main(["score", str(recorded), f"--config={TINY}", f"--out={out}"])
    output = capsys.readouterr().out
    assert output.startswith("32 completions scored, mean reward ")
    before, after = Recording.read(str(recorded)), Recording.read(str(out))
    for name in before.table.column_names:
        if name not in ("reward", "advantage", "group"):
            assert after.table[name].equals(before.table[name]), name
    for one in after.table.to_pylist():
        assert one["reward"] == float(one["completion"] == "".join(sorted(one["prompt"].removesuffix(">"))))
        assert one["advantage"] is None
    assert after.metadata[0]["tokenizer"] == before.metadata[0]["tokenizer"]
    assert after.metadata[0]["scored_by"] == "lgrpo.tasks.generated.SortDigits"
    with pytest.raises(SystemExit, match="exists already, and nothing is overwritten"):
        main(["score", str(recorded), f"--config={TINY}", f"--out={out}"])


def test_files_of_different_sampling(recorded, tmp_path):
    """Common settings stay. The temperature must be one of them, because log-probabilities are of one."""
    task, tokenizer = SortDigits(num_digits=3, num_held_out=128, reward=LowDigits()), tiny_policy().tokenizer
    recording = Recording.read(str(recorded))
    metadata, out = recording.metadata[0], tmp_path / "scored.parquet"
    common = {name: value for name, value in metadata["sampling"].items() if name != "max_tokens"}
    for name, sampling in {"a": metadata["sampling"], "b": common | {"max_tokens": 99}}.items():
        write_recording(recording.table, metadata | {"sampling": sampling}, tmp_path / "files" / f"{name}.parquet")
    rescore(str(tmp_path / "files"), out, task, None, tokenizer)
    assert Recording.read(str(out)).metadata[0]["sampling"] == common
    hotter = metadata | {"sampling": common | {"temperature": 2.0}}
    write_recording(recording.table, hotter, tmp_path / "files" / "c.parquet")
    with pytest.raises(ValueError, match=r"sampled at the temperatures 1\.0, 2\.0, .*: score its files one by one"):
        rescore(str(tmp_path / "files"), out, task, None, tokenizer)


def test_the_same_reward_gives_the_same_scores(recorded, tmp_path):
    task = SortDigits(num_digits=3, num_held_out=128, reward=LowDigits())
    out = tmp_path / "scored.parquet"
    done = rescore(str(recorded), out, task, Scoring(), tiny_policy().tokenizer)
    before, after = (Recording.read(str(path)).table["reward"] for path in (recorded, out))
    assert before.to_pylist() == after.to_pylist()
    assert done.before == pytest.approx(done.after)
    assert (done.num_failed, done.num_waiting) == (0, 0)


def test_texts_without_rewards_can_be_scored_and_trained_on(tmp_path, capsys):
    """Fields that the reward reads come from the file, or from the task's row of that prompt."""
    rows = [{"prompt": prompt, "completions": ["012", "210", "120", "102"]} for prompt in ("210>", "120>")]
    path = lines(tmp_path / "texts.jsonl", rows)

    def train(path):
        task = RecordedPrompts(path, SortDigits(num_digits=3, num_held_out=128))
        data = {"task": task, "engine": ReplayEngine(path), "num_prompts": 2}
        return fit(v=None, rollouts=1, loss=ComposedLoss(), data=data)

    with pytest.raises(ValueError, match=r"8 of 8 recorded completions .* have no reward: add them \(lgrpo score"):
        train(path)
    main(["score", path, f"--config={TINY}"])
    assert "8 completions scored, mean reward 0.2500 (before: none)" in capsys.readouterr().out
    out = tmp_path / "texts-scored.parquet"
    assert Recording.read(str(out)).table["token_ids"].null_count == 8  # the file still has no token ids
    run = train(str(out))
    assert run.recorder.rollouts[0].rewards.tolist() == [1, 0, 0, 0] * 2


def test_the_config_of_a_run_on_a_gpu_scores_anywhere(recorded, tmp_path, capsys):
    """It has an accelerator that is not there, and the checkpoint that the run resumed from."""
    config, out = tmp_path / "config.yaml", tmp_path / "scored.parquet"
    config.write_text(yaml.safe_dump({"trainer": {"accelerator": "gpu"}, "ckpt_path": "last", "weights_only": None}))
    main(["score", str(recorded), f"--config={TINY}", f"--config={config}", f"--out={out}"])
    assert "completions scored" in capsys.readouterr().out


class Unreliable(Reward):
    """Raises for one completion and is late for another."""

    def score(self, prompt, completion):
        if completion.text == "1":
            raise RuntimeError("cannot say")
        return NOT_YET if completion.text == "2" else len(completion.token_ids)


@pytest.mark.slow("starts the command for each case")
def test_scores_that_fail_or_are_late(tmp_path):
    path = lines(tmp_path / "texts.jsonl", [{"prompt": "12>", "completions": ["1", "2", "3", "33"]}])
    out = tmp_path / "scored.parquet"
    task = SortDigits(num_digits=2, num_held_out=20, reward=Unreliable())
    with pytest.warns(UserWarning, match="the reward failed on 1 of 4 completions"):
        done = rescore(path, out, task, Scoring(num_workers=1, failure_score=-1.0), tiny_policy().tokenizer)
    table = Recording.read(str(out)).table
    assert table["reward"].to_pylist() == [-1, None, 2, 3]
    assert table["failed"].to_pylist() == [True, False, False, False]
    assert (done.num_failed, done.num_waiting) == (1, 1)


def test_recordings_that_cannot_be_scored(recorded, tmp_path):
    foreign = lines(tmp_path / "foreign.jsonl", [{"prompt": "what?>", "completion": "1"}])
    with pytest.raises(SystemExit, match=r"lgrpo: the reward reads \['answer'\], but the recorded row of prompt 'what"):
        main(["score", foreign, f"--config={TINY}"])
    assert not (tmp_path / "foreign-scored.parquet").exists()
    with pytest.raises(SystemExit, match="no task is given: name the config"):
        main(["score", foreign])
    with pytest.raises(SystemExit, match="no recorded rollouts at"):
        main(["score", str(tmp_path / "nowhere"), f"--config={TINY}"])
    with pytest.raises(SystemExit, match=r"must be a \.parquet file"):
        main(["score", foreign, f"--config={TINY}", "--out=scored.jsonl"])
    with pytest.raises(SystemExit, match="recorded with another tokenizer"):
        main(["score", str(recorded), f"--config={TINY}", "--model.policy.characters=9876543210>"])
    truncated = tmp_path / "truncated.parquet"
    truncated.write_bytes(next(recorded.iterdir()).read_bytes()[:200])
    with pytest.raises(SystemExit, match="is not a valid Parquet file"):
        main(["score", str(truncated), f"--config={TINY}"])
    task = SortDigits(num_digits=2, num_held_out=20, reward=ExactMatch(field="nowhere"))
    with pytest.raises(ValueError, match=r"the reward reads \['nowhere'\]"):
        rescore(str(recorded), tmp_path / "no.parquet", task, None, tiny_policy().tokenizer)


@pytest.mark.filterwarnings("ignore:.*second turn")
def test_failed_episodes_stay_failed(tmp_path):
    """An environment cannot be asked again, whatever scores its episodes: here, and in a run that replays them."""
    folder, out = tmp_path / "rollouts", tmp_path / "scored.parquet"
    first = fit(v=1, rollouts=2, data=data_of(Failing()), callbacks=[RolloutRecorder(path=str(folder))])
    before = Recording.read(str(folder)).table.to_pylist()
    assert 0 < sum(row["episode_failed"] for row in before) < len(before)
    for reward, expected in ((EnvironmentReward(failure_score=-5.0), -5.0), (LowDigits(), None)):
        task = SortDigits(num_digits=2, num_held_out=20, reward=reward)
        done = rescore(str(folder), out, task, Scoring(), tiny_policy().tokenizer)
        after = Recording.read(str(out)).table.to_pylist()
        assert [row["failed"] for row in after] == [row["episode_failed"] for row in before]
        assert done.num_failed == sum(row["failed"] for row in after)
        assert all(row["reward"] == expected for row in after if row["failed"] and expected is not None)
        out.unlink()
    settings = data_of(reward=WeightedSum({"game": EnvironmentReward(), "low": LowDigits()}))
    again = fit(v=1, rollouts=2, data=settings | {"engine": ReplayEngine(str(folder), rewards="task")})
    for one, other in zip(first.recorder.rollouts, again.recorder.rollouts, strict=True):
        assert other.failed.tolist() == one.failed.tolist() == other.episode_failed.tolist()
