"""Tests of recording and replaying: the same run, data of other policies, mixed with sampled completions."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lgrpo import ClippedLoss, ReplayEngine, RolloutRecorder, Sampling, ZeroVarianceMask
from lgrpo.advantages import DropNegatives
from lgrpo.callbacks import ExactResume, ImprovementMonitor, RolloutLog
from lgrpo.losses import (
    BehaviourForwardKL,
    ComposedLoss,
    DivergenceMask,
    OneSide,
    PolicyLogprobs,
    PolicyLoss,
    SuffixVeto,
    TokenRatio,
    TrustRegionMask,
)
from lgrpo.recordings import RecordedPrompts, Recording
from lgrpo.recordings.recording import with_column, write_recording
from lgrpo.report import read_series
from lgrpo.rewards import BatchReward, Reward, Scoring
from lgrpo.tasks import SortDigits
from lgrpo.types import RECORDED, StepTotals
from tests.helpers import LowDigits, a_batch, fit, largest_difference, tiny_policy

CONFIGS = Path(__file__).parent.parent.parent / "configs"
RUN = {"v": 2, "i": 2, "rollouts": 5, "learning_rate": 0.5}


def task(reward=None):
    """Return a task with eight training prompts, so that each is recorded more than once."""
    return SortDigits(num_digits=2, num_held_out=92, reward=reward or LowDigits())


def settings(**more):
    data = {"task": task()} | more.pop("data", {})
    return RUN | {"loss": ClippedLoss(0.05, 0.05, kl_coef=0.1), "data": data} | more


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Return a short off-policy run and the folder of its rollouts."""
    folder = tmp_path_factory.mktemp("recorded")
    run = fit(**settings(callbacks=[ZeroVarianceMask(0.3), RolloutRecorder(path=str(folder))]))
    return run, str(folder)


def replay(folder, *, engine=None, data=None, **more):
    engine = ReplayEngine(folder, **(engine or {}))
    return fit(**settings(data={"engine": engine} | (data or {}), **more))


def test_a_replayed_run_ends_with_the_same_weights_bit_for_bit(recorded):
    run, folder = recorded
    again = replay(folder, callbacks=[ZeroVarianceMask(0.3)])
    assert largest_difference(run.weights, again.weights) == 0
    assert [row["train/loss"] for row in again.logged] == [row["train/loss"] for row in run.logged]
    assert any(row["train/clip_fraction_low"] > 0 for row in run.logged)  # log-probabilities matter
    for a, b in zip(run.recorder.rollouts, again.recorder.rollouts, strict=True):
        assert torch.equal(a.tokens, b.tokens)
        assert torch.equal(a.behaviour_logprobs, b.behaviour_logprobs)
        assert torch.equal(a.advantages, b.advantages)
    other = replay(folder, callbacks=[ZeroVarianceMask(0.3)], data={"seed": 1}, engine={"missing": "sample"})
    assert largest_difference(run.weights, other.weights) > 0


def test_contents_of_a_recording(recorded):
    run, folder = recorded
    files = sorted(path.name for path in Path(folder).iterdir())
    assert files == [f"{k:08}-rank0.parquet" for k in range(5)]
    recording = Recording.read(folder)
    table = recording.table.to_pylist()
    assert len(table) == 5 * 16
    batch = run.recorder.rollouts[3]
    rows = [row for row in table if row["rollout"] == 3]
    assert [row["sibling"] for row in rows] == [0, 1, 2, 3] * 4
    assert [row["position"] for row in rows] == batch.positions.tolist()
    for i, row in enumerate(rows):
        sampled = batch.completion_mask[i]
        assert row["token_ids"] == batch.tokens[i][sampled].tolist()
        assert row["logprobs"] == batch.behaviour_logprobs[i][sampled].tolist()
        assert row["reward"] == float(batch.rewards[i])
        assert row["advantage"] == float(batch.advantages[i][sampled][0])
        assert row["behaviour_step"] == int(batch.behaviour_step[i]) == 4
        assert row["version"] == 1
        assert json.loads(row["row"]) == dict(run.data.train_prompts.at(row["position"]).row)
        assert row["finish_reason"] == ("length" if batch.truncated[i] else "stop")
    metadata = recording.metadata[0]
    assert metadata["task"] == "lgrpo.tasks.generated.SortDigits"
    assert metadata["model"]["type"] == "qwen2"
    assert metadata["sampling"]["temperature"] == 1.0
    assert metadata["syncs"][0]["checksum"] == run.data.engine.state.ledger[0].checksum


def test_recorded_completions_have_no_lag(recorded, tmp_path):
    """Neither metrics nor tables have one, and max_lag does not apply."""
    _, folder = recorded
    again = replay(folder, callbacks=[RolloutLog(every=1)], trainer={"default_root_dir": str(tmp_path)})
    assert not any("train/lag" in row or "train/engine_mismatch_mean" in row for row in again.logged)
    assert all(row["rollout/recorded_fraction"] == 1 for row in again.logged)
    assert all(bool((batch.behaviour_step == RECORDED).all()) for batch in again.recorder.rollouts)
    table = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    assert {(row["behaviour_step"], row["lag"]) for row in table} == {(None, None)}
    limited = replay(folder, data={"max_lag": 1})
    assert largest_difference(again.weights, limited.weights) == 0
    mixed = replay(folder, engine={"share": 0.5}, v=5)
    assert [row["train/lag"] for row in mixed.logged] == list(range(10))


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, [0] * 5), (0.25, [1] * 5), (0.5, [2] * 5), (0.3, [1, 1, 1, 1, 2])]
)
def test_a_share_of_the_groups(recorded, share, expected):
    run, folder = recorded
    mixed = replay(folder, engine={"share": share})
    counts = [int(batch.is_recorded[::4].sum()) for batch in mixed.recorder.rollouts]
    assert counts == expected
    first, sampled = mixed.recorder.rollouts[0], run.recorder.rollouts[0]
    assert torch.equal(first.tokens, sampled.tokens)  # recorded or sampled, weights and random streams are the same
    assert bool((first.is_recorded.view(4, 4).sum(1) % 4 == 0).all())


def test_a_group_with_recorded_and_sampled_completions(recorded):
    run, folder = recorded
    mixed = replay(folder, engine={"siblings": 1})
    for batch in mixed.recorder.rollouts:
        assert batch.is_recorded.view(4, 4).tolist() == [[False, False, False, True]] * 4
    first, alone = mixed.recorder.rollouts[0], run.recorder.rollouts[0]
    for group in range(4):
        for sibling in range(3):  # each draws from its random stream, independent of its siblings
            row = 4 * group + sibling
            assert first.tokens[row][first.attention_mask[row]].tolist() == (
                alone.tokens[row][alone.attention_mask[row]].tolist()
            )
    assert all(row["rollout/recorded_fraction"] == 0.25 for row in mixed.logged)


class WholeGroups(BatchReward):
    def __call__(self, prompts, completions):
        return [sum(c in "01234" for c in completion.text) / 6 for completion in completions]


def test_recorded_siblings_with_notes_and_failures_are_seen_by_workers(recorded, tmp_path):
    """Workers receive whole groups, because a reward may compare siblings."""
    recording = Recording.read(recorded[1])
    rows = range(len(recording.table))
    table = with_column(recording.table, "score_notes", [json.dumps({"row": row}) if row % 2 else None for row in rows])
    table = with_column(table, "failed", [row % 4 == 2 for row in rows])
    write_recording(table, recording.metadata[0], tmp_path / "noted.parquet")
    expected = replay(recorded[1], engine={"siblings": 2})
    data = {"task": task(WholeGroups()), "scoring": Scoring(num_workers=1)}
    run = replay(str(tmp_path / "noted.parquet"), engine={"siblings": 2}, data=data)
    for batch, own in zip(run.recorder.rollouts, expected.recorder.rollouts, strict=True):
        assert torch.equal(batch.rewards, own.rewards)
        assert not batch.failed[~batch.is_recorded].any()
    assert any(batch.notes is not None for batch in run.recorder.rollouts)


class Scored(Reward):
    is_inline = True
    calls = 0

    def score(self, prompt, completion):
        Scored.calls += 1
        return float(len(completion.token_ids))


def test_rewards_of_the_recording_or_the_task(recorded):
    run, folder = recorded
    other = task(Scored())
    Scored.calls = 0
    kept = replay(folder, data={"task": other})
    assert Scored.calls == 0
    assert torch.equal(kept.recorder.rollouts[0].rewards, run.recorder.rollouts[0].rewards)
    again = replay(folder, data={"task": other}, engine={"rewards": "task"})
    lengths = again.recorder.rollouts[0].completion_mask.sum(1)
    assert torch.equal(again.recorder.rollouts[0].rewards, lengths.float())


def test_validation_samples_the_policy(recorded):
    """Metrics equal those of a run without a recording."""
    _, folder = recorded

    def own():
        return {"trainer": {"limit_val_batches": 1.0}, "callbacks": [ZeroVarianceMask(0.3)]}

    run, again = fit(**settings(**own())), replay(folder, **own())
    assert run.trainer.callback_metrics["val/pass@1"] == again.trainer.callback_metrics["val/pass@1"]


@pytest.mark.parametrize("step", [3, 4])
def test_a_mixed_run_resumes_exactly(recorded, tmp_path, step):
    _, folder = recorded

    def parts(save):
        saved = [ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)] if save else []
        own = {"enable_checkpointing": save}
        return {"callbacks": [ExactResume(), *saved], "trainer": own, "engine": {"share": 0.5, "siblings": 2}}

    straight = replay(folder, **parts(True))
    own = parts(False)
    engine = ReplayEngine(folder, **own.pop("engine"))
    path = str(tmp_path / f"step={step}.ckpt")
    run = fit(**settings(data={"engine": engine}, ckpt_path=path, **own))
    assert largest_difference(straight.weights, run.weights) == 0
    less = tmp_path / "less"
    less.mkdir()
    for file in sorted(Path(folder).iterdir())[:-1]:
        (less / file.name).write_bytes(file.read_bytes())
    engine = ReplayEngine(str(less), share=0.5, siblings=2, missing="sample")
    with pytest.raises(ValueError, match="are not those this run started with"):
        fit(**settings(data={"engine": engine}, ckpt_path=path, **own))


def test_a_resumed_recorder_duplicates_nothing(recorded, tmp_path):
    _, folder = recorded
    rollouts, checkpoints = tmp_path / "rollouts", tmp_path / "checkpoints"
    save = ModelCheckpoint(checkpoints, filename="{step}", every_n_train_steps=1, save_top_k=-1)

    def parts():
        return [ZeroVarianceMask(0.3), RolloutRecorder(path=str(rollouts)), ExactResume()]

    fit(**settings(callbacks=[*parts(), save], trainer={"enable_checkpointing": True}))
    names = sorted(path.name for path in rollouts.iterdir())
    with pytest.raises(ValueError, match="already holds rollouts of another run"):
        fit(**settings(callbacks=parts()))
    (rollouts / names[1]).touch()
    stopped = {"max_steps": 6, "max_epochs": -1}
    fit(**settings(callbacks=parts(), trainer=stopped, ckpt_path=str(checkpoints / "step=3.ckpt")))
    assert sorted(path.name for path in rollouts.iterdir()) == names[:3]  # 3 and 4 are after the checkpoint
    fit(**settings(callbacks=parts(), ckpt_path=str(checkpoints / "step=5.ckpt")))
    again, straight = Recording.read(str(rollouts)).table, Recording.read(folder).table
    assert again.equals(straight)


# Methods and log-probabilities

WITHOUT = {
    "reinforce",
    "red_drop",
    "red_weight",
    "red_weight_adaptive",
    "opmd",
    "opmd_log_mean_exp",
    "asymre",
    "opo",
    "gpg",
}


def without_logprobs(folder, out):
    table = Recording.read(folder).table
    write_recording(with_column(table, "logprobs", [None] * len(table)), {}, Path(out))
    return str(out)


def value_and_gradient(loss, knows_behaviour):
    batch = a_batch(seed=3)
    batch.totals = StepTotals(all_tokens=40, live_tokens=40, all_sequences=8, live_sequences=8)
    batch.zero_variance = torch.zeros(len(batch), dtype=torch.bool)
    noise = 0.3 * torch.randn(batch.tokens.shape, generator=torch.Generator().manual_seed(1))
    noise[0] = 0.1  # the proximal policy equals α there, so that no method rejects this completion
    policy = torch.where(batch.completion_mask, batch.behaviour_logprobs + noise, 0.0).requires_grad_()
    if not knows_behaviour:
        batch.behaviour_logprobs[batch.completion_mask] = torch.nan
    fixed = policy.detach() - 0.1 * batch.completion_mask
    output = loss(batch, PolicyLogprobs(policy=policy, entropy=-policy, proximal=fixed, reference=fixed))
    output.loss.backward()
    return torch.cat([output.loss.detach().view(1), policy.grad.flatten()])


def test_which_methods_need_log_probabilities():
    """A loss needs them exactly if its value or gradient changes without them."""
    parser = ArgumentParser()
    parser.add_subclass_arguments(PolicyLoss, "loss")
    independent = set()
    for path in (CONFIGS / "algorithms").glob("*.yaml"):
        given = {"loss": yaml.safe_load(path.read_text())["model"]["loss"]}
        loss = parser.instantiate_classes(parser.parse_object(given)).loss
        is_independent = torch.equal(value_and_gradient(loss, True), value_and_gradient(loss, False))
        assert loss.needs_behaviour == (not is_independent), path.name
        independent |= {path.stem} if is_independent else set()
    assert independent == WITHOUT


def test_data_without_log_probabilities(recorded, tmp_path):
    _, folder = recorded
    path = without_logprobs(folder, tmp_path / "texts.parquet")
    with pytest.raises(ValueError, match=r"80 recorded completions have no log-probabilities, and model\.loss \(Clipp"):
        replay(path)
    with pytest.raises(ValueError, match=r"red_drop\.yaml.*asymre\.yaml.*proximal"):
        replay(path, loss=ComposedLoss(gate=OneSide()))
    for gate in (DivergenceMask(), TrustRegionMask(), SuffixVeto()):  # they read α, whatever the ratio
        message = rf"80 recorded completions have no log-probabilities, and model\.loss \(gate {type(gate).__name__}\)"
        with pytest.raises(ValueError, match=message):
            replay(path, loss=ComposedLoss(TokenRatio("proximal"), gate))
    for loss in (ComposedLoss(regularisers=[BehaviourForwardKL()]), ComposedLoss(TokenRatio("proximal"), OneSide())):
        run = replay(path, loss=loss, data={"advantage": DropNegatives()})
        known = replay(folder, loss=loss, data={"advantage": DropNegatives()})
        assert largest_difference(run.weights, known.weights) == 0
        assert not any("train/kl_behaviour" in row for row in run.logged)
        assert all(math.isfinite(value) for row in run.logged for value in row.values())


def test_recorded_log_probabilities_cannot_be_recomputed(recorded):
    with pytest.raises(ValueError, match="which cannot know their log π_α"):
        replay(recorded[1], data={"behaviour_logprobs": "policy"}, v=1, i=1)


# Data of other programs

TEXTS = [
    {"prompt": "12>", "completions": ["12", "21", "2", "01"], "rewards": [1, 0, 0.0, 0.5], "answer": "12"},
    {"prompt": "90>", "completions": ["09", "90", "99", "00", "0"], "rewards": [1, 0, 0, 0, 0], "answer": "09"},
]
LONG = [
    {"prompt": row["prompt"], "completion": text, "reward": reward, "answer": row["answer"]}
    for row in TEXTS
    for text, reward in zip(row["completions"], row["rewards"], strict=True)
]
PLAIN = ComposedLoss()


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def train_on(path, *, group_size=4, engine=None, min_completions=1, loss=PLAIN, **more):
    data = {
        "task": RecordedPrompts(path, task(), min_completions),
        "engine": ReplayEngine(path, **(engine or {})),
        "num_prompts": 2,
        "group_size": group_size,
        **more.pop("data", {}),
    }
    return fit(v=None, rollouts=4, loss=loss, data=data, **more)


@pytest.mark.parametrize("form", ["lists.jsonl", "rows.jsonl", "rows.parquet"])
def test_texts_and_rewards_of_other_programs(tmp_path, form):
    path = tmp_path / form
    if form.endswith("jsonl"):
        lines(path, TEXTS if form.startswith("lists") else LONG)
    else:
        pq.write_table(pa.Table.from_pylist(LONG), path)
    run = train_on(str(path), callbacks=[RolloutRecorder(path=str(tmp_path / "again"))])
    tokenizer = run.data.tokenizer
    seen = {row["prompt"]: row for row in TEXTS}
    for batch in run.recorder.rollouts:
        prompts = set()
        for i in range(len(batch)):
            ids = batch.tokens[i][batch.attention_mask[i]]
            prompt, _, rest = tokenizer.decode(ids).partition(">")
            text = rest.removesuffix("<eos>")
            assert rest.endswith("<eos>")
            row = seen[prompt + ">"]
            assert batch.rewards[i] == row["rewards"][row["completions"].index(text)]
            prompts.add(prompt)
        assert prompts == {"12", "90"}
        texts = [tokenizer.decode(batch.tokens[i]) for i in range(8)]
        assert len(set(texts)) == 8  # no completion is used twice
    again = Recording.read(str(tmp_path / "again"))
    assert json.loads(again.table["row"][0].as_py())["answer"] in ("12", "09")
    assert again.table["logprobs"].null_count == len(again.table)


def test_fields_of_the_reward_are_required_only_for_new_scores(tmp_path):
    """Recorded rewards need no answer; a sampled sibling does; validation uses the task's rows."""
    rows = [{name: value for name, value in row.items() if name != "answer"} for row in TEXTS]
    path = lines(tmp_path / "bare.jsonl", rows)
    own = {"task": RecordedPrompts(path, SortDigits(num_digits=2, num_held_out=92))}
    run = train_on(path, data=own, trainer={"limit_val_batches": 1.0})
    assert "val/pass@1" in run.trainer.callback_metrics
    with pytest.raises(ValueError, match=r"reads \['answer'\], but the recorded prompt .* has only \[\]"):
        train_on(path, data=own, engine={"siblings": 2})


def test_groups_given_by_number(tmp_path):
    rows = [row | {"group": index // 2} for index, row in enumerate(LONG[:4])]
    path = lines(tmp_path / "named.jsonl", rows)
    run = train_on(path, group_size=2, data={"num_prompts": 1})
    pairs = {tuple(batch.rewards.tolist()) for batch in run.recorder.rollouts}
    assert pairs <= {(1.0, 0.0), (0.0, 0.5)}
    pooled = train_on(path, group_size=4, data={"num_prompts": 1})  # no group is large enough: all groups of the prompt
    assert pooled.recorder.rollouts[0].rewards.tolist() == [1.0, 0.0, 0.0, 0.5]


# Errors


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def without_column(path):
    table = pq.read_table(path)
    pq.write_table(table.drop_columns(["token_ids"]), path)


def with_nan(path):
    table = pq.read_table(path)
    rewards = pa.array([math.nan, *table["reward"].to_pylist()[1:]], pa.float32())
    pq.write_table(table.set_column(table.column_names.index("reward"), "reward", rewards), path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, r"00000000-rank0\.parquet is not a valid Parquet file"),
        (without_column, r"a recording without \['token_ids'\]; it has \['group'"),
        (with_nan, r"row 0: the reward is nan; it must be a finite number"),
    ],
)
def test_broken_recordings(recorded, tmp_path, damage, message):
    for file in Path(recorded[1]).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    damage(tmp_path / "00000000-rank0.parquet")
    with pytest.raises(ValueError, match=message):
        replay(str(tmp_path))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{"prompt": "1>", "answer": "1"}],
            r"line 1: a recorded row needs a prompt, and a completion .* \['answer', 'pr",
        ),
        ([{"prompt": "1>", "completion": "1", "reward": math.nan}], "line 1: the reward is nan"),
        ([{"prompt": "1>", "completion": "1", "reward": "good"}], "line 1: the reward is 'good'"),
        ([{"prompt": "1>", "completions": ["1", "2"], "rewards": [1]}], "2 completions, 1 rewards"),
        ([{"prompt": "1>", "completion": None, "reward": 1}], "completion is None, not a string"),
        ([{"prompt": "1>", "completion": "x", "reward": 1}] * 4, "characters the tokenizer cannot encode: 'x'"),
        ([{"prompt": "1>", "completion": "1234567", "reward": 1}] * 4, r"has 8 tokens, but data\.sampling\.max_tokens"),
        (
            [{"prompt": "1>", "completion": "1" * 31, "reward": 1}] * 4,
            r"has 31 characters, but data\.sampling",
        ),
        ([{"prompt": "1>", "completion": "", "finish_reason": "length", "reward": 1}] * 4, "is empty"),
        ([{"prompt": "1>", "completion": "1", "finish_reason": "eos", "reward": 1}], "it must be stop or length"),
        (
            [{"prompt": "1>", "completion": "1", "reward": 1}],
            r"has fewer than 4 completions of 1 of 1 prompts, such as '1>'",
        ),
        (
            [{"prompt": "1>", "completion": "1"}] * 4,
            "4 of 4 recorded completions .* have no reward: add them .lgrpo sc",
        ),
        (
            [{"prompt": "1>", "completion": "1", "logprobs": [0.1], "reward": 1}],
            "must have one number for each",
        ),
        (
            [{"prompt": "1>", "completion": "1", "token_ids": [3, 1], "logprobs": [-0.5, None], "reward": 1}],
            "logprobs contains None; if one is not known, leave all",
        ),
        (
            [{"prompt": "1>", "completion": "1", "token_ids": [5], "reward": 1}] * 4,
            "does not decode .* to its text '1'",
        ),
        (
            [{"prompt": "1>", "completion": "1", "token_ids": [5], "observed": None, "kept_counts": [2], "reward": 1}],
            "line 1: kept_counts can be read only from a Parquet file with lgrpo's metadata",
        ),
        ([], "holds no completion"),
    ],
)
def test_invalid_rows(tmp_path, rows, message):
    path = lines(tmp_path / "bad.jsonl", rows)
    with pytest.raises(ValueError, match=message):
        train_on(path, data={"num_prompts": 1})


def test_prompts_with_few_completions_can_be_left_out(tmp_path):
    path = lines(tmp_path / "some.jsonl", [*TEXTS, {"prompt": "3>", "completion": "3", "reward": 1}])
    with pytest.raises(ValueError, match=r"1 of 3 prompts, such as '3>'.*lgrpo\.recordings\.RecordedPrompts"):
        train_on(path)
    assert len(train_on(path, min_completions=4).data.train_prompts) == 2
    with pytest.raises(ValueError, match=r"has 9 recorded completions .*; the most is 5"):
        train_on(path, min_completions=9)


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"share": 1.5}, r"share is 1\.5; it must be at least 0 and at most 1"),
        ({"share": -0.1}, r"share is -0\.1"),
        ({"siblings": 0}, "siblings is 0; it must be at least 1"),
        ({"siblings": 5}, r"siblings is 5, but data\.group_size is only 4"),
    ],
)
def test_invalid_settings(recorded, engine, message):
    with pytest.raises(ValueError, match=message):
        replay(recorded[1], engine=engine)


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("knows_behaviour", [True, False])
def test_the_improvement_monitor(recorded, tmp_path, share, knows_behaviour):
    """It counts the lags of sampled completions only, and no group without log-probabilities."""
    path = recorded[1] if knows_behaviour else without_logprobs(recorded[1], tmp_path / "texts.parquet")
    logger = CSVLogger(str(tmp_path), name="metrics")
    replay(
        path,
        engine={"share": share},
        v=5,
        loss=ComposedLoss(regularisers=[BehaviourForwardKL()]),
        callbacks=[ImprovementMonitor(every=1, num_held_out=0)],
        trainer={"logger": logger},
    )
    series = read_series(tmp_path)
    fractions = [sum(dict(points)[step] for name, points in series.items() if "/lag_" in name) for step in (1, 3)]
    assert fractions == [0 if share == 1 else pytest.approx(1)] * 2
    assert all(math.isfinite(value) for points in series.values() for _, value in points)
    assert ("monitor/gain" in series) == (knows_behaviour or share < 1)
    if share < 1:
        assert dict(series["monitor/lag_0"])[1] == 0.5  # two passes over the first rollout
        assert dict(series["monitor/lag_2-3"])[3] == 1


def test_another_tokenizer_or_temperature(recorded, tmp_path):
    other = tiny_policy(characters="9876543210>")
    with pytest.raises(ValueError, match=r"recorded with another tokenizer \(that of qwen2"):
        replay(recorded[1], policy=other)
    with pytest.raises(ValueError, match=r"sampled at temperature 1\.0.* is 0\.5: set it to the same"):
        replay(recorded[1], data={"sampling": Sampling(max_tokens=6, temperature=0.5)})
    with pytest.raises(FileNotFoundError, match="no recorded rollouts at"):
        replay(str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match=r"no \.parquet file in"):
        replay(str(tmp_path))
    (tmp_path / "rollouts.txt").write_text("{}")
    with pytest.raises(ValueError, match="is not a file of rollouts"):
        replay(str(tmp_path / "rollouts.txt"))


def test_another_chat_template(recorded):
    policy = tiny_policy()
    policy.build()
    policy.tokenizer.chat_template = "{{ messages }}"
    with pytest.warns(UserWarning, match="was recorded with another chat template than the tokenizer's"):
        replay(recorded[1], policy=policy)


@pytest.mark.parametrize("truncation", [{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.1}])
def test_truncated_sampling(recorded, tmp_path, truncation):
    """Its log-probabilities are of no whole distribution; without them the completions can be used."""
    table = Recording.read(recorded[1]).table
    path, name = tmp_path / "truncated.parquet", next(iter(truncation))
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    write_recording(table, {"sampling": sampling}, path)
    replay(str(path))
    write_recording(table, {"sampling": sampling | truncation}, path)
    with pytest.raises(ValueError, match=rf"was sampled with {name} {truncation[name]}, .* there is no ratio to them"):
        replay(str(path))
    write_recording(with_column(table, "logprobs", [None] * len(table)), {"sampling": sampling | truncation}, path)
    replay(str(path), loss=ComposedLoss(regularisers=[BehaviourForwardKL()]))


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_whole_distributions_replayed_in_a_truncated_run_are_recorded_again(recorded, tmp_path, share):
    """Their log-probabilities stay those of whole distributions, beside sampled completions with kept tokens."""
    data = {"sampling": Sampling(max_tokens=6, top_p=0.7)}
    first = replay(
        recorded[1], engine={"share": share}, data=data, callbacks=[RolloutRecorder(path=str(tmp_path / "again"))]
    )
    again = replay(str(tmp_path / "again"), data=data)
    for one, other in zip(first.recorder.rollouts, again.recorder.rollouts, strict=True):
        assert torch.equal(one.behaviour_logprobs, other.behaviour_logprobs)
        counts = [torch.zeros(one.tokens.shape) if batch.kept is None else batch.kept_counts for batch in (one, other)]
        assert torch.equal(*(own.int() for own in counts))
        assert bool((counts[0][one.is_recorded] == 0).all())
    if share == 1:
        assert largest_difference(first.weights, again.weights) == 0
