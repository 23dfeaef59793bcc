"""Runs with a judge: what recordings, tables and metrics say, resume, validation, late scores and several ranks."""

from __future__ import annotations

import itertools
import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lgrpo import Evaluation, ReplayEngine, RolloutRecorder
from lgrpo.callbacks import ExactResume, RolloutLog
from lgrpo.cli import main
from lgrpo.engines import JudgeModel
from lgrpo.recordings import Recording, rescore
from lgrpo.report.names import metric_names
from lgrpo.report.page_data import page_data
from lgrpo.report.record import read_runs
from lgrpo.rewards import (
    NOT_YET,
    JudgeReward,
    Pairwise,
    Question,
    Reward,
    Scoring,
    WeightedSum,
    read_verdicts,
    verdict_statistics,
)
from lgrpo.tasks import SortDigits
from tests.helpers import LowDigits, fit, largest_difference, tiny_policy
from tests.report.made_up import write_run
from tests.rewards.judge.scripted import Script
from tests.rewards.judge.test_real_server import save_judge

TINY = Path(__file__).parents[3] / "configs" / "tiny.yaml"
SCORING = Scoring(num_workers=1, timeout=60)
TEMPLATE = Question("{prompt}|{completion}", r"Rating: (0\.\d)")


def low_digits(body):
    """Rate a completion by its share of low digits; say nothing about one without a low digit."""
    text = body["messages"][0]["content"].partition("|")[2]
    rating = sum(character in "012" for character in text)
    return f"It is {text!r}. Rating: 0.{rating or 'x'}"


def judged(server, folder=None, template=TEMPLATE, **settings):
    url = server if isinstance(server, str) else server.url
    settings = {"model": "judge", "retry_delay": 0.0, "verdicts": folder and str(folder)} | settings
    return JudgeReward(url, template, **settings)


def task(reward):
    return SortDigits(num_digits=2, num_held_out=20, reward=reward)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A run of two rollouts, its folder, and the verdicts."""
    folder = tmp_path_factory.mktemp("run")
    with Script(low_digits) as server:
        run = fit(
            rollouts=2,
            callbacks=[RolloutRecorder(path=str(folder / "rollouts")), RolloutLog(every=1, num_groups=4)],
            data={"task": task(judged(server, folder / "verdicts")), "scoring": SCORING},
            trainer={"default_root_dir": str(folder)},
        )
    return run, folder


@pytest.mark.filterwarnings("ignore:the reward failed on")
class TestAudit:
    def test_from_a_recorded_completion_to_its_verdict(self, recorded):
        """Also if the verdict cannot be read."""
        _, folder = recorded
        verdicts = {verdict["key"]: verdict for verdict in read_verdicts(folder / "verdicts")}
        rows = Recording.read(str(folder / "rollouts")).table.to_pylist()
        assert len(rows) == 32
        for row in rows:
            notes = json.loads(row["score_notes"])
            verdict = verdicts[notes["verdict"]]
            assert verdict["questions"] == [[{"role": "user", "content": f"{row['prompt']}|{row['completion']}"}]]
            assert verdict["answers"] == notes["answers"]
            assert verdict["scores"] == notes["scores"]
            assert row["failed"] == (verdict["scores"] == [None])
            assert row["reward"] == pytest.approx(verdict["scores"][0] or 0.0)
        assert 0 < sum(row["failed"] for row in rows) < 32

    def test_the_table_of_completions(self, recorded, tmp_path):
        _, folder = recorded
        rows = [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]
        assert len(rows) == 32
        for row in rows:
            text = row["completion"].replace("<pad>", "").removesuffix("<eos>")
            assert f"answers: It is {text!r}. Rating: 0." in row["notes"]
        page = page_data(read_runs([write_run(tmp_path / "run", table=rows)]))
        columns = page["completions"]["columns"]
        assert columns["notes"] == [row["notes"] for row in rows]

    def test_metrics(self, recorded):
        run, _ = recorded
        failed = [float(batch.failed.float().mean()) for batch in run.recorder.rollouts]
        assert [row["judge/unreadable_fraction"] for row in run.logged] == pytest.approx(failed)
        assert {name for name in run.logged[0] if name.startswith("judge/")} <= set(metric_names({}))
        assert run.logged[0]["reward/errors"] == sum(run.recorder.rollouts[0].failed.tolist())

    def test_scoring_a_recording_again(self, recorded, tmp_path):
        """By the same judge, without its server, then by another one."""
        _, folder = recorded
        before = Recording.read(str(folder / "rollouts")).table.to_pylist()

        def again(reward, name):
            path = tmp_path / name
            done = rescore(str(folder / "rollouts"), path, task(reward), SCORING, tiny_policy().tokenizer)
            return done, Recording.read(str(path)).table.to_pylist()

        shutil.copytree(folder / "verdicts", tmp_path / "verdicts")
        with Script("Rating: 0.x") as server:
            _, same = again(judged(server, tmp_path / "verdicts"), "same.parquet")
            assert len(server.requests) == len({row["prompt"] + row["completion"] for row in before if row["failed"]})
        for old, new in zip(before, same, strict=True):
            notes = json.loads(new["score_notes"])
            assert (old["reward"], old["failed"]) == (new["reward"], new["failed"])
            assert notes["verdict"] == json.loads(old["score_notes"])["verdict"]
            assert notes["is_cached"] == (not new["failed"])
        with Script("Rating: 0.3") as server:
            done, other = again(judged(server, model="another"), "other.parquet")
        assert [row["reward"] for row in other] == [pytest.approx(0.3)] * 32
        assert (done.num_failed, {len(json.loads(row["score_notes"])["answers"]) for row in other}) == (0, {1})

    def test_a_replayed_recording_keeps_its_notes(self, recorded, tmp_path):
        run, folder = recorded
        data = {"task": task(LowDigits()), "engine": ReplayEngine(str(folder / "rollouts"))}
        again = fit(rollouts=2, data=data, callbacks=[RolloutRecorder(path=str(tmp_path))])
        old, new = (Recording.read(str(path)).table for path in (folder / "rollouts", tmp_path))
        assert old["score_notes"].null_count == 0
        assert old["score_notes"].to_pylist() == new["score_notes"].to_pylist()
        assert [batch.notes for batch in again.recorder.rollouts] == [batch.notes for batch in run.recorder.rollouts]

    def test_notes_are_not_in_the_fingerprint_of_a_recording(self, recorded, tmp_path):
        """Training does not depend on them, and older recordings have no such column."""
        _, folder = recorded
        whole = Recording.read(str(folder / "rollouts"))
        without = tmp_path / "without.parquet"
        metadata = pq.read_schema(next((folder / "rollouts").glob("*.parquet"))).metadata
        pq.write_table(whole.table.drop_columns(["score_notes"]).replace_schema_metadata(metadata), without)
        assert Recording.read(str(without)).fingerprint == whole.fingerprint

    def test_the_programs_of_the_page(self, recorded, tmp_path, monkeypatch, capsys):
        """The least certain verdicts, and agreement with known answers, of another run with votes."""
        _, folder = recorded
        page = (TINY.parents[1] / "tutorials" / "pages" / "rewards.md").read_text(encoding="utf-8")
        programs = re.findall(r"```python\n(.*?)```", page[page.index("## A judge") :], re.DOTALL)[:2]
        shutil.copytree(folder / "rollouts", tmp_path / "runs" / "gsm8k" / "rollouts")
        monkeypatch.chdir(tmp_path)
        with Script(lambda body: f"Rating: 0.{len(str(body)) * (body['seed'] + 1) % 10}") as server:
            reward = judged(server, "verdicts", votes=2, temperature=1.0)
            scored = tmp_path / "judged.parquet"
            rescore("runs/gsm8k/rollouts", scored, task(reward), SCORING, tiny_policy().tokenizer)
        (tmp_path / "runs" / "first" / "rollouts").mkdir(parents=True)
        shutil.copy(scored, tmp_path / "runs" / "first" / "rollouts")
        names = {}
        exec(programs[0], names)
        spreads = [abs(first - second) for first, second in (row["votes"] for row in names["unsure"])]
        assert len(spreads) == 10
        assert spreads == sorted(spreads, reverse=True)
        assert spreads[0] > 0
        capsys.readouterr()
        exec(programs[1], names)
        found = eval(capsys.readouterr().out, {"nan": None})
        assert found["labelled"] == found["verdicts"] == len(names["labels"])
        assert found["unanimous"] < 1

    def test_agreement_with_known_answers(self, recorded, tmp_path):
        """The labels are rewards of another recording of the same completions."""
        _, folder = recorded
        rows = Recording.read(str(folder / "rollouts")).table.to_pylist()
        keys = [json.loads(row["score_notes"])["verdict"] for row in rows]
        labels = {key: float(row["reward"] >= 0.5) for key, row in zip(keys, rows, strict=True)}
        found = verdict_statistics(folder / "verdicts", labels)
        assert (found["accuracy"], found["auc"]) == (1, 1)
        assert found["labelled"] == len({key for key, row in zip(keys, rows, strict=True) if not row["failed"]})


@pytest.mark.slow("starts the command")
def test_the_command(tmp_path):
    """``lgrpo score`` with the settings of ``configs/judge.yaml``."""
    texts = tmp_path / "texts.jsonl"
    texts.write_text(json.dumps({"prompt": "210>", "completions": ["012", "210", "120", "102"]}) + "\n")
    with Script("Fine. Rating: 4") as server:
        settings = [f"--data.task.reward.url={server.url}", "--data.task.reward.model=judge"]
        settings += [f"--data.task.reward.verdicts={tmp_path / 'verdicts'}"]
        main(["score", str(texts), f"--config={TINY}", "--config=configs/judge.yaml", *settings])
    rows = Recording.read(str(tmp_path / "texts-scored.parquet")).table.to_pylist()
    assert [row["reward"] for row in rows] == [pytest.approx(0.4)] * 4
    assert verdict_statistics(tmp_path / "verdicts")["verdicts"] == 4


def test_both_orders_and_votes():
    with Script("Better: A") as server:
        reward = judged(server, template=Pairwise(), votes=2, temperature=1.0)
        run = fit(rollouts=1, data={"task": task(reward), "scoring": SCORING})
    (row,) = run.logged
    assert row["judge/order_change_fraction"] == 1
    assert row["judge/unanimous_fraction"] == 1
    assert row["judge/vote_std"] == 0


@pytest.mark.slow("resumes a run from each of its checkpoints")
def test_resume(tmp_path):
    """With kept verdicts it is exact, also if the judge would answer otherwise."""

    def settings(name, server, save=False):
        callbacks = [ExactResume(), RolloutRecorder(path=str(tmp_path / name / "rollouts"))]
        if save:
            callbacks.append(ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1))
        trainer = {"enable_checkpointing": save, "default_root_dir": str(tmp_path / name)}
        data = {"task": task(judged(server, tmp_path / "verdicts")), "scoring": SCORING, "reuse": 2}
        options = {"rollouts": 3, "v": 3, "i": 2, "learning_rate": 0.5, "callbacks": callbacks}
        return options | {"trainer": trainer, "data": data | {"generate_ahead": True}}

    with Script(lambda _: f"Rating: 0.{random.randrange(10)}") as server:
        straight = fit(**settings("straight", server, save=True))
        for step in range(1, 6):
            checkpoint = tmp_path / f"step={step}.ckpt"
            run = fit(**settings(str(step), server), ckpt_path=str(checkpoint))
            assert largest_difference(straight.weights, run.weights) == 0, f"from step {step}"
            for file in (tmp_path / str(step) / "rollouts").glob("*.parquet"):
                notes = [
                    [json.loads(row["score_notes"])["verdict"] for row in Recording.read(str(path)).table.to_pylist()]
                    for path in (file, tmp_path / "straight" / "rollouts" / file.name)
                ]
                assert notes[0] == notes[1]


class Late(Reward):
    """Has a score at the second request only."""

    is_inline = True

    def __init__(self):
        self.asked = set()

    def score(self, prompt, completion):
        key = prompt.position, tuple(completion.token_ids)
        is_new = key not in self.asked
        self.asked.add(key)
        return NOT_YET if is_new else 0.0


def test_beside_a_late_score(tmp_path):
    """The group is scored again, and the judge is not asked again."""
    with Script(lambda body: f"Rating: 0.{random.randrange(10)}") as server:
        reward = WeightedSum({"judge": judged(server, tmp_path), "late": Late()})
        run = fit(rollouts=3, data={"task": task(reward), "scoring": SCORING})
        assert len(server.requests) == len(list(read_verdicts(tmp_path)))
    verdicts = {verdict["key"]: verdict for verdict in read_verdicts(tmp_path)}
    known = [batch for batch in run.recorder.rollouts if bool(batch.is_known.any())]
    assert known
    for batch in known:
        for row in batch.is_known.nonzero().flatten().tolist():
            key = batch.notes[row]["judge"]["verdict"]
            assert float(batch.rewards[row]) == pytest.approx(verdicts[key]["scores"][0])


def test_validation(tmp_path):
    """It is judged, too; its verdicts are in no metric of a rollout."""
    with Script(lambda body: "Rating: 0.9" if "|" in str(body) else "?") as server:
        data = {"task": task(judged(server, tmp_path)), "scoring": SCORING}
        data["evaluation"] = Evaluation(num_samples=2, num_problems=3, success_reward=0.9, results="jsonl")
        trainer = {"limit_val_batches": 1.0, "default_root_dir": str(tmp_path / "run")}
        run = fit(rollouts=1, data=data, trainer=trainer)
    assert float(run.trainer.callback_metrics["val/pass@1"]) == 1
    assert float(run.trainer.callback_metrics["val/reward_failures"]) == 0
    (file,) = (tmp_path / "run" / "evaluations").glob("*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    keys = {verdict["key"] for verdict in read_verdicts(tmp_path)}
    assert all(notes["verdict"] in keys for row in rows for notes in row["notes"])


@pytest.mark.filterwarnings("ignore:the reward failed on")
@pytest.mark.parametrize("scoring", [SCORING, None])
def test_a_model_in_the_trainer(tmp_path, scoring):
    """Verdicts that cannot be read are failures, as those of a server."""
    model = JudgeModel(str(save_judge(tmp_path / "judge")), dtype="float32")
    template = Question("{completion}", r"^([0-4])")
    reward = JudgeReward(template=template, engine=model, max_tokens=4, verdicts=str(tmp_path / "verdicts"))
    data = {"task": task(WeightedSum({"judge": reward})), "scoring": scoring}
    run = fit(rollouts=2, data=data, callbacks=[RolloutRecorder(path=str(tmp_path / "rollouts"))])
    failed = torch.cat([batch.failed for batch in run.recorder.rollouts])
    assert 0 < failed.sum() < len(failed)
    assert run.logged[0]["reward/errors"] == run.recorder.rollouts[0].failed.sum()
    assert run.logged[0]["judge/unreadable_fraction"] > 0
    rows = Recording.read(str(tmp_path / "rollouts")).table.to_pylist()
    assert all("answers" in json.loads(row["score_notes"])["judge"] for row in rows)
    assert model._model is None, "its memory is released with the fit"


@pytest.mark.slow("starts two processes")
def test_two_ranks(tmp_path):
    """Ranks share the folder, train as one process does, and log the mean of their metrics."""
    found = {}
    with Script(low_digits) as server:
        for devices in (1, 2):
            folder = tmp_path / str(devices)
            command = [sys.executable, "-m", "tests.processes.two_judges", str(devices), server.url, str(folder)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, done.stderr[-3000:]
            found[devices] = torch.load(folder / "state", weights_only=True)
    assert largest_difference(found[1]["weights"], found[2]["weights"]) < 1e-6
    for one, two in zip(found[1]["logged"], found[2]["logged"], strict=True):
        assert one["judge/unreadable_fraction"] == pytest.approx(two["judge/unreadable_fraction"])
    rows = {
        devices: {
            (row["position"], row["sibling"]): json.loads(row["score_notes"])["verdict"]
            for row in Recording.read(str(tmp_path / str(devices) / "rollouts")).table.to_pylist()
        }
        for devices in (1, 2)
    }
    assert rows[1] == rows[2]
    assert len(rows[1]) == len(list(itertools.product(range(8), range(4))))
