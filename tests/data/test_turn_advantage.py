"""Advantages of turns: which returns are compared, and where the result is."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lgrpo import ZeroVarianceMask
from lgrpo.advantages import (
    BatchMean,
    BatchStd,
    ComposedAdvantage,
    ExponentiallyWeighted,
    GroupStd,
    GroupWhitened,
    LeaveOneOut,
    Scores,
    TurnAdvantage,
)
from lgrpo.callbacks import ExactResume, RolloutLog
from lgrpo.cli import main
from lgrpo.data.advantages import set_advantages
from lgrpo.data.collate import completions_of
from lgrpo.data.partial import PartialRollouts
from lgrpo.functional import turn_indices
from lgrpo.recordings import ReplayEngine, RolloutRecorder
from lgrpo.recordings.recording import Recording
from lgrpo.report import read_series
from lgrpo.rewards import NOT_YET, EnvironmentReward, Reward, WeightedSum
from tests.engines.test_environment import Echo, Failing, OneTurn, data_of, engine_of
from tests.helpers import LowDigits, build, fit, largest_difference
from tests.processes import two_turns

NAN = math.nan
CONFIGS = Path("configs")
MIXED = ComposedAdvantage(LeaveOneOut(), GroupStd(1e-6, "outside", unbiased=True))


class LastReward(Echo):
    """Gives its only reward in the last turn."""

    def step(self, text):
        turn = super().step(text)
        return turn._replace(reward=float(text[:1] in "0123") if turn.done else 0.0)

    def truncate(self):
        return 0.0


class Lengthy(Reward):
    is_inline = True

    def score(self, prompt, completion):
        return len(completion.token_ids) / 8


def turn_scores(turn_rewards, rewards=None, group_size=None):
    turn_rewards = torch.tensor(turn_rewards, dtype=torch.float64)
    total = turn_rewards.nansum(1) if rewards is None else torch.tensor(rewards, dtype=torch.float64)
    size = len(total)
    return Scores(
        rewards=total,
        lengths=torch.ones(size),
        draws=torch.zeros(size),
        group_size=group_size or size,
        turn_rewards=turn_rewards,
    )


def episodes_of(batch, run):
    return completions_of(batch, run.data.tokenizer, run.data.sampling)


def by_loop(batch, run, advantage, weight=1.0):
    """Return the advantage of each turn of each episode, from completions instead of tensors."""
    episodes, size = episodes_of(batch, run), batch.group_size
    returns = []
    for episode, total in zip(episodes, batch.rewards.double().tolist(), strict=True):
        own = [weight * reward for reward in episode.turn_rewards]
        own[-1] = total - sum(own[:-1])
        returns.append([sum(advantage.discount**k * r for k, r in enumerate(own[t:])) for t in range(len(own))])
    found = [[0.0] * len(own) for own in returns]
    for first in range(0, len(episodes), size):
        rows = range(first, first + size)
        for turn in range(max(len(returns[row]) for row in rows)):
            reached = [row for row in rows if turn < len(returns[row])]
            if len(reached) < advantage.min_siblings:
                continue
            group = torch.tensor([[returns[row][turn] for row in reached]])
            for row, value in zip(reached, advantage.advantage.of_groups(group)[0].tolist(), strict=True):
                found[row][turn] = value
    return found


def at_turns(batch, run):
    """Return the advantages of each turn of each episode, which all its tokens must share."""
    found = []
    for row, episode in enumerate(episodes_of(batch, run)):
        own = batch.advantages[row][batch.columns(row)]
        parts = [set(own[start:stop].tolist()) for start, stop in episode.turns]
        assert all(len(part) == 1 for part in parts)
        found.append([part.pop() for part in parts])
    return found


# Laws


@pytest.mark.parametrize("inner", [GroupWhitened(), MIXED], ids=["whitened", "leave one out"])
@pytest.mark.parametrize("settings", [{}, {"discount": 0.3}, {"episode_share": 0.6}, {"min_siblings": 4}])
def test_with_one_turn_it_is_the_ordinary_advantage(inner, settings):
    data = {"engine": engine_of(OneTurn())}
    plain = fit(v=2, rollouts=3, data=data | {"advantage": inner})
    turns = fit(v=2, rollouts=3, data=data | {"advantage": TurnAdvantage(inner, **settings)})
    for one, other in zip(plain.recorder.rollouts, turns.recorder.rollouts, strict=True):
        assert one.advantages.abs().max() > 0
        assert torch.equal(one.advantages, other.advantages)
    assert largest_difference(plain.weights, turns.weights) == 0


@pytest.mark.parametrize(
    "advantage",
    [TurnAdvantage(), TurnAdvantage(MIXED, discount=0.5), TurnAdvantage(discount=0.0, min_siblings=3)],
    ids=["whitened", "discounted", "own reward"],
)
def test_a_run_equals_a_loop_over_its_episodes(advantage):
    run = fit(v=1, rollouts=2, data=data_of() | {"advantage": advantage})
    differs = 0
    for batch in run.recorder.rollouts:
        assert (batch.advantages[~batch.completion_mask] == 0).all(), "observed tokens, prompts and padding have none"
        expected, found = by_loop(batch, run, advantage), at_turns(batch, run)
        for own, other in zip(expected, found, strict=True):
            assert own == pytest.approx(other, abs=1e-5)
            differs += len({round(value, 4) for value in own}) > 1
        shares = [value != 0 for own in found for value in own]
        assert batch.metrics["rollout/turn_signal_fraction"] == pytest.approx(sum(shares) / len(shares))
    assert differs


def test_rewards_at_the_end_without_a_discount():
    """The first turn has the ordinary advantage; later ones are whitened among the siblings that reached them."""
    data = data_of(LastReward(num_turns=3), max_turns=3)
    run = fit(v=1, rollouts=2, learning_rate=0.0, data=data | {"advantage": TurnAdvantage()})
    plain = fit(v=1, rollouts=2, learning_rate=0.0, data=data)
    for batch, ordinary in zip(run.recorder.rollouts, plain.recorder.rollouts, strict=True):
        turns = turn_indices(batch.completion_mask)
        assert torch.equal(batch.tokens, ordinary.tokens)
        assert torch.equal(batch.advantages[turns == 0], ordinary.advantages[turns == 0])
        for turn in range(int(turns.max()) + 1):
            reached = (turns == turn).any(1)
            for rows in torch.arange(len(batch)).split(batch.group_size):
                own = rows[reached[rows]]
                if len(own) < 2:
                    continue
                rewards = batch.rewards[own].double()
                expected = (rewards - rewards.mean()) / (rewards.var(correction=0) + 1e-4).sqrt()
                for row, value in zip(own.tolist(), expected.float(), strict=True):
                    assert torch.allclose(batch.advantages[row][turns[row] == turn], value, atol=1e-6)
    assert any((turn_indices(batch.completion_mask) == 2).any() for batch in run.recorder.rollouts)


def test_an_example_by_hand():
    """Episodes of 3, 2, 1 and 2 turns. Returns: 3 2 2, 1 0, 2, 2 2."""
    rewards = [[1.0, 0.0, 2.0], [1.0, 0.0, NAN], [2.0, NAN, NAN], [0.0, 2.0, NAN]]
    centred = TurnAdvantage(ComposedAdvantage())(turn_scores(rewards))
    third = 2 - 4 / 3
    expected = [[1.0, third, 0.0], [-1.0, -4 / 3, 0.0], [0.0, 0.0, 0.0], [0.0, third, 0.0]]
    assert torch.allclose(centred, torch.tensor(expected, dtype=torch.float64), atol=1e-6)
    own = TurnAdvantage(ComposedAdvantage(), discount=0.0)(turn_scores(rewards))  # rewards of the turn alone
    expected = [[0.0, -2 / 3, 0.0], [0.0, -2 / 3, 0.0], [1.0, 0.0, 0.0], [-1.0, 4 / 3, 0.0]]
    assert torch.allclose(own, torch.tensor(expected, dtype=torch.float64), atol=1e-6)
    half = TurnAdvantage(ComposedAdvantage(), discount=0.5)(turn_scores(rewards))[:, 0]  # 1.5, 1, 2, 1
    assert torch.allclose(half, torch.tensor([0.125, -0.375, 0.625, -0.375], dtype=torch.float64))


def test_few_siblings_and_the_share_of_the_episode():
    rewards = [[1.0, 0.0, 2.0], [1.0, 0.0, NAN], [2.0, NAN, NAN], [0.0, 2.0, NAN]]
    scores = turn_scores(rewards)
    ordinary = GroupWhitened()(scores)
    turns = TurnAdvantage()(scores)
    assert torch.equal(TurnAdvantage(min_siblings=4)(scores)[:, 1:], torch.zeros(4, 2))
    assert torch.equal(TurnAdvantage(episode_share=1.0)(scores), ordinary[:, None].expand(4, 3))
    mixed = TurnAdvantage(episode_share=0.25)(scores)
    assert torch.allclose(mixed, 0.75 * turns + 0.25 * ordinary[:, None])
    assert mixed[0, 2] == 0.25 * ordinary[0], "a turn that one episode reached has the share of the episode alone"


def test_the_rest_of_the_reward_belongs_to_the_last_turn():
    """Whatever the task's reward is, the return of the first turn is that reward."""
    reward = WeightedSum({"game": EnvironmentReward(), "length": Lengthy()}, {"game": 0.5})
    assert reward.turn_weight == 0.5
    assert LowDigits().turn_weight == 0
    advantage = TurnAdvantage(ComposedAdvantage(), discount=0.7)
    run = fit(v=1, rollouts=1, data=data_of(reward=reward) | {"advantage": advantage})
    (batch,) = run.recorder.rollouts
    for own, other in zip(by_loop(batch, run, advantage, weight=0.5), at_turns(batch, run), strict=True):
        assert own == pytest.approx(other, abs=1e-5)
    first = TurnAdvantage()(turn_scores([[1.0, NAN], [1.0, 2.0]], rewards=[5.0, -4.0]))[:, 0]
    assert torch.equal(first, GroupWhitened()(turn_scores([[5.0], [-4.0]])))


def test_a_failed_episode_has_the_reward_of_a_failure():
    advantage = TurnAdvantage(ComposedAdvantage())
    with pytest.warns(UserWarning, match=r"ZeroDivisionError"):
        run = fit(v=1, rollouts=1, data=data_of(Failing()) | {"advantage": advantage})
    (batch,) = run.recorder.rollouts
    assert batch.failed.any()
    for own, other in zip(by_loop(batch, run, advantage), at_turns(batch, run), strict=True):
        assert own == pytest.approx(other, abs=1e-5)


def test_other_rows_and_padding_do_not_matter():
    advantage = TurnAdvantage(discount=0.9)
    run = fit(v=1, rollouts=1, data=data_of() | {"advantage": advantage})
    (batch,) = run.recorder.rollouts
    for rows in torch.arange(len(batch)).split(batch.group_size):
        alone = batch.select(rows)
        expected = alone.advantages.clone()
        set_advantages(alone, advantage, 0, run.trainer)
        assert torch.equal(alone.advantages, expected)
    wide = replace(
        batch,
        completion_mask=torch.nn.functional.pad(batch.completion_mask, (0, 7)),
        turn_rewards=torch.nn.functional.pad(batch.turn_rewards, (0, 7)),
    )
    set_advantages(wide, advantage, 0, run.trainer)
    assert torch.equal(wide.advantages[:, :-7], batch.advantages)
    assert (wide.advantages[:, -7:] == 0).all()


def test_a_completion_without_tokens_counts_for_its_siblings():
    run = fit(v=1, rollouts=1, data=data_of(OneTurn()) | {"advantage": TurnAdvantage()})
    (batch,) = run.recorder.rollouts
    batch.rewards = torch.arange(16.0) % 4
    batch.completion_mask[0] = False
    set_advantages(batch, TurnAdvantage(), 0, run.trainer)
    turns = batch.advantages
    set_advantages(batch, GroupWhitened(), 0, run.trainer)
    assert torch.equal(turns, batch.advantages)


def test_micro_batches_and_packing_give_the_same_weights():
    settings = {"v": 2, "rollouts": 3, "i": 2}
    runs = [
        fit(**settings, data=data_of() | {"advantage": TurnAdvantage()}, trainer={"accumulate_grad_batches": n})
        for n in (1, 4)
    ]
    assert largest_difference(*(run.weights for run in runs)) < 1e-6


def test_equal_rewards_from_different_turns():
    """They have no ordinary advantage, but their later turns differ."""
    found = TurnAdvantage()(turn_scores([[1.0, 0.0], [0.0, 1.0]]))
    assert (found[:, 0] == 0).all()
    assert found[0, 1] < 0 < found[1, 1]
    third = TurnAdvantage()(turn_scores([[0.1, 0.2, 0.3], [0.3, 0.2, 0.1], [0.2, 0.3, 0.1]]))
    assert (third[:, 0] == 0).all(), "sums that differ by rounding are equal"


# Runs


def test_a_recorded_run_is_repeated_exactly(tmp_path):
    data = data_of() | {"advantage": TurnAdvantage()}
    first = fit(v=1, rollouts=3, data=data, callbacks=[RolloutRecorder(path=str(tmp_path))])
    again = fit(v=1, rollouts=3, data=data | {"engine": ReplayEngine(str(tmp_path))})
    assert largest_difference(first.weights, again.weights) == 0
    batch, table = first.recorder.rollouts[0], Recording.read(str(tmp_path)).table
    recorded = [row["advantage"] for row in table.to_pylist() if row["rollout"] == 0]
    for row, value in enumerate(recorded):
        assert value == pytest.approx(float(batch.advantages[row][batch.completion_mask[row]].mean()), abs=1e-6)


def test_resume_is_exact(tmp_path):
    settings = {"v": 2, "rollouts": 6, "callbacks": [ExactResume()]}
    whole = fit(**settings, data=data_of() | {"advantage": TurnAdvantage()})
    part = build(**settings, data=data_of() | {"advantage": TurnAdvantage()}, trainer={"max_steps": 3})
    part.trainer.fit(part.module, datamodule=part.data)
    part.trainer.save_checkpoint(tmp_path / "part.ckpt")
    rest = fit(**settings, data=data_of() | {"advantage": TurnAdvantage()}, ckpt_path=str(tmp_path / "part.ckpt"))
    assert largest_difference(whole.weights, rest.weights) == 0


def test_the_table_lists_the_turns(tmp_path):
    data = data_of() | {"advantage": TurnAdvantage()}
    run = fit(v=1, rollouts=1, data=data, callbacks=[RolloutLog()], trainer={"default_root_dir": str(tmp_path)})
    rows = [json.loads(line) for path in tmp_path.rglob("completions.jsonl") for line in path.read_text().splitlines()]
    (batch,) = run.recorder.rollouts
    for row, episode, advantages in zip(rows, episodes_of(batch, run), at_turns(batch, run), strict=False):
        assert [reward for reward, _ in row["turns"]] == pytest.approx(list(episode.turn_rewards), abs=1e-5)
        assert [advantage for _, advantage in row["turns"]] == pytest.approx(advantages, abs=1e-5)
    assert any(len(row["turns"]) > 1 for row in rows)


def test_the_overlay_trains(tmp_path):
    run = tmp_path / "run"
    configs = [f"--config={CONFIGS / name}.yaml" for name in ("guess_number", "turn_advantage")]
    arguments = ["--data.num_rollouts=2", "--trainer.max_epochs=1", "--trainer.enable_progress_bar=false"]
    main(["fit", *configs, f"--run={run}", "--data.evaluation.num_samples=2", *arguments])
    assert all(0 < value < 1 for _, value in read_series(run)["rollout/turn_signal_fraction"])


class SecondTime(EnvironmentReward):
    """Knows the reward of some prompts when it is asked again."""

    def __init__(self):
        super().__init__()
        self.asked = set()

    def score(self, prompt, completion):
        is_known = prompt.position % 3 or prompt.position in self.asked
        return super().score(prompt, completion) if is_known else NOT_YET

    def __call__(self, prompts, completions):
        scores = super().__call__(prompts, completions)
        self.asked |= {prompt.position for prompt in prompts}
        return scores


def test_groups_whose_rewards_come_later():
    advantage = TurnAdvantage(discount=0.8)
    run = fit(v=2, rollouts=4, data=data_of(reward=SecondTime()) | {"advantage": advantage})
    assert sum(row["rollout/late_joined"] for row in run.logged) > 0
    for batch in run.recorder.rollouts:
        known = batch.select(batch.is_known.nonzero().flatten())
        for own, other in zip(by_loop(known, run, advantage), at_turns(known, run), strict=True):
            assert own == pytest.approx(other, abs=1e-5)
        assert (batch.advantages[~batch.is_known] == 0).all()


def test_episodes_that_continue_in_the_next_rollout():
    advantage = TurnAdvantage()
    data = data_of() | {"advantage": advantage, "partial": PartialRollouts(extra_prompts=4, max_spans=8)}
    run = fit(v=1, rollouts=5, data=data)
    assert any(batch.behaviour_step.ndim == 2 for batch in run.recorder.rollouts)
    for batch in run.recorder.rollouts:
        for own, other in zip(by_loop(batch, run, advantage), at_turns(batch, run), strict=True):
            assert own == pytest.approx(other, abs=1e-5)


@pytest.mark.slow("starts two processes")
def test_two_processes_equal_one(tmp_path):
    """Also in rollouts in which the episodes of one process have fewer turns than those of the other."""
    command = [sys.executable, "-m", "tests.processes.two_turns", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert first["turns"] != second["turns"]
    alone = two_turns.run()
    assert largest_difference(alone.weights, first["weights"]) < 1e-6
    shares = [row["rollout/turn_signal_fraction"] for row in alone.logged]
    assert first["shares"] == second["shares"] == pytest.approx(shares)


# Messages


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TurnAdvantage(discount=1.5), r"TurnAdvantage's discount .* 1\.5"),
        (lambda: TurnAdvantage(episode_share=-0.1), r"TurnAdvantage's episode_share"),
        (lambda: TurnAdvantage(min_siblings=1), r"min_siblings .*one return is its own mean"),
        (lambda: TurnAdvantage(ComposedAdvantage(BatchMean())), r"BatchMean is a statistic of the whole rollout"),
        (lambda: TurnAdvantage(ComposedAdvantage(scale=BatchStd())), r"BatchStd is a statistic of the whole rollout"),
        (lambda: build(data={"advantage": TurnAdvantage()}), r"TurnAdvantage compares turns, but TransformersEngine"),
        (
            lambda: fit(data=data_of() | {"advantage": TurnAdvantage(min_siblings=5)}),
            r"min_siblings is 5, but data.group_size is only 4",
        ),
        (
            lambda: fit(data=data_of() | {"advantage": ExponentiallyWeighted(TurnAdvantage())}),
            r"needs the rewards of turns, but there are none: set it as data.advantage itself",
        ),
        (
            lambda: fit(data=data_of() | {"advantage": TurnAdvantage()}, callbacks=[ZeroVarianceMask()]),
            r"with data.advantage TurnAdvantage: set zero_variance_mask: null",
        ),
    ],
)
def test_messages(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_plan_refuses_single_turns(capsys):
    overlay = f"--config={CONFIGS / 'turn_advantage.yaml'}"
    with pytest.raises(ValueError, match=r"TurnAdvantage compares turns, but TransformersEngine samples single turns"):
        main(["plan", f"--config={CONFIGS / 'demo.yaml'}", overlay])
    main(["plan", f"--config={CONFIGS / 'guess_number.yaml'}", overlay])
    assert "zero-variance groups  kept" in capsys.readouterr().out


def test_a_recording_without_episodes(tmp_path):
    fit(v=1, rollouts=1, callbacks=[RolloutRecorder(path=str(tmp_path))])
    with pytest.raises(ValueError, match=r"TurnAdvantage needs the rewards of turns, but no completion is an episode"):
        fit(v=1, rollouts=1, data={"engine": ReplayEngine(str(tmp_path)), "advantage": TurnAdvantage()})
