"""Prompts drawn by their measured pass rates: the rule, and the same prompts however rollouts are sampled."""

from __future__ import annotations

import io
import json
import signal
import statistics
import subprocess
import sys
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import ModelCheckpoint

from lgrpo import Evaluation, ReplayEngine, RolloutRecorder, Sampling
from lgrpo.callbacks import ExactResume
from lgrpo.data import DynamicSampling, Measured
from lgrpo.data.curriculum import MAX_BOOST, Curriculum, Measurement, draw_probabilities
from lgrpo.data.partial import PartialRollouts
from lgrpo.data.sampler import RolloutSampler
from lgrpo.recordings import Recording
from lgrpo.rewards import NOT_YET, ExactMatch, FailedScore, Reward
from lgrpo.tasks import DatasetTask, SortDigits
from tests.helpers import LowDigits, a_batch, fit, largest_difference
from tests.processes import two_curricula
from tests.test_in_flight import in_flight
from tests.test_overlap import assert_same

NAN = float("nan")
BAND = (0.2, 0.8)
EVALUATION = Evaluation(success_reward=0.5)


def task(reward=None, num_rows=16):
    return SortDigits(num_digits=2, num_held_out=100 - num_rows, reward=reward or LowDigits())


def measured(data=None, **options):
    """Return settings of a run with a curriculum over 16 prompts, whose pass rates differ from the start."""
    difficulty = Measured(band=BAND, exploration=0.3, replay=0.1, forgetting=0.3)
    data = {"task": task(), "difficulty": difficulty, "evaluation": EVALUATION} | (data or {})
    return {"rollouts": 8, "learning_rate": 0.5, "data": data} | options


def curriculum(num_rows=10, num_prompts=2, forgetting=0.5, seed=0, **options):
    shares = {"band": BAND, "exploration": 0.3, "replay": 0.1} | options
    return Curriculum(num_rows, seed, num_prompts, forgetting=forgetting, **shares)


def frozen(rates, num_prompts=2, **options):
    """Return a curriculum that has measured these rates, and draws by them."""
    own = curriculum(len(rates), num_prompts, **options)
    known = [Measurement(row - len(rates), row, rate) for row, rate in enumerate(rates) if rate == rate]
    own.record(0, known)  # at positions below 0, which no test draws
    own.freeze()
    return own


def rollout_rows(own, num_prompts, rollouts):
    return [[own.row_at(k * num_prompts + j) for j in range(num_prompts)] for k in rollouts]


def prompts_of(run):
    """Return the prompts of each rollout, in order."""
    return [
        [tuple(batch.tokens[row][: int(batch.columns(row).start)].tolist()) for row in range(0, len(batch), 4)]
        for batch in run.recorder.rollouts
    ]


class TestProbabilities:
    @settings(max_examples=200, deadline=None)
    @given(
        rates=st.lists(st.sampled_from([NAN, 0.0, 0.1, 0.2, 0.5, 0.8, 0.9, 1.0]), min_size=1, max_size=60),
        num_prompts=st.integers(1, 40),
        exploration=st.floats(0, 1),
        replay=st.floats(0, 1),
    )
    def test_limits(self, rates, num_prompts, exploration, replay):
        """They sum to 1; no row comes twice in a rollout, or too often, as far as there are enough rows."""
        replay = min(replay, 1 - exploration)
        found = draw_probabilities(
            torch.tensor(rates, dtype=torch.float64), num_prompts, band=BAND, exploration=exploration, replay=replay
        )
        assert float(found.sum()) == pytest.approx(1)
        assert float(found.min()) >= 0
        if len(rates) >= num_prompts:
            assert float(found.max()) <= min(1 / num_prompts, MAX_BOOST / len(rates)) + 1e-12

    def test_shares(self):
        """With enough rows of each kind the shares are those of the settings, equal within a kind."""
        rates = torch.tensor([NAN] * 30 + [0.0] * 10 + [0.5] * 40 + [1.0] * 20)
        found = draw_probabilities(rates, 4, band=BAND, exploration=0.3, replay=0.1)
        assert found[:40].tolist() == pytest.approx([0.3 / 40] * 40)
        assert found[40:80].tolist() == pytest.approx([0.6 / 40] * 40)
        assert found[80:].tolist() == pytest.approx([0.1 / 20] * 20)

    def test_the_ends_of_the_band_belong_to_it(self):
        """Also if a mean of equal rates is rounded: 0.4 + 0.8 is more than 1.2."""
        rates = torch.tensor([0.2, (0.5 * 0.8 + 0.8) / 1.5, 0.1, 0.9], dtype=torch.float64)
        assert float(rates[1]) > 0.8
        found = draw_probabilities(rates, 1, band=BAND, exploration=0, replay=0)
        assert found.tolist() == pytest.approx([0.5, 0.5, 0, 0])

    @pytest.mark.parametrize(("num_prompts", "limit"), [(1, MAX_BOOST / 100), (40, 1 / 40)])
    def test_a_single_row_in_the_band(self, num_prompts, limit):
        """It is not drawn in every rollout, and not twice in one; the others come instead."""
        rates = torch.tensor([0.5] + [0.0] * 99).double()
        found = draw_probabilities(rates, num_prompts, band=BAND, exploration=0.1, replay=0.1)
        assert found[0] == pytest.approx(limit)
        assert found[1:].tolist() == pytest.approx([(1 - limit) / 99] * 99)

    def test_everything_is_solved(self):
        found = draw_probabilities(torch.ones(8).double(), 2, band=BAND, exploration=0.3, replay=0.1)
        assert found.tolist() == pytest.approx([1 / 8] * 8)


class TestDraws:
    def test_frequencies(self):
        rates = [0.5, 0.4, 0.6, 1.0, 0.9, 0.0, NAN, NAN, 0.3, 0.7]
        own = frozen(rates, num_prompts=4)
        expected = draw_probabilities(
            torch.tensor(rates, dtype=torch.float64), 4, band=BAND, exploration=0.3, replay=0.1
        )
        rows = rollout_rows(own, 4, range(1, 2001))
        counts = Counter(row for own in rows for row in own)
        for row in range(10):
            assert counts[row] / 8000 == pytest.approx(float(expected[row]), abs=0.01)
        assert all(len(set(own)) == 4 for own in rows), "no row twice in a rollout"

    def test_each_place_of_a_rollout_gets_every_row(self):
        """Ranks take places in order, so none may be given the easy prompts."""
        rows = rollout_rows(frozen([0.5] * 8, num_prompts=4), 4, range(1, 400))
        for place in range(4):
            counts = Counter(own[place] for own in rows)
            assert len(counts) == 8
            assert max(counts.values()) < 2 * min(counts.values())

    def test_seeds_differ(self):
        draws = [rollout_rows(frozen([0.5] * 8, seed=seed), 2, range(1, 20)) for seed in (0, 0, 1)]
        assert draws[0] == draws[1] != draws[2]

    def test_passes_before_anything_is_measured(self):
        own = curriculum(num_rows=10)
        own.freeze()
        assert sorted(own.row_at(position) for position in range(10)) == list(range(10))

    def test_measurements_count_from_the_next_sync_on(self):
        own = frozen([0.5] * 6 + [1.0] * 4)
        before = rollout_rows(own, 2, range(1, 30))
        own.record(1, [Measurement(20 + row, row, 1.0) for row in range(6)])
        assert rollout_rows(own, 2, range(1, 30)) == before
        own.freeze()
        assert rollout_rows(own, 2, range(1, 30)) != before

    def test_what_is_drawn_stays(self):
        """A group may be recorded, or scored again, after a sync."""
        own = frozen([0.5] * 6 + [1.0] * 4)
        drawn = own.draw(range(2, 12))
        own.record(1, [Measurement(20 + row, row, 1.0) for row in range(6)])
        own.freeze()
        assert [own.row_at(position) for position in range(2, 12)] == drawn
        assert [own.row_at(position) for position in range(12, 60)] != [
            frozen([0.5] * 6 + [1.0] * 4).row_at(position) for position in range(12, 60)
        ]

    def test_retired_rows_are_replayed(self):
        """They are drawn in their share, and come back if they are unlearnt."""
        own = frozen([NAN] * 40 + [0.5] * 40 + [1.0] * 20, num_prompts=4)
        counts = Counter(row for drawn in rollout_rows(own, 4, range(1, 1001)) for row in drawn)
        retired = sum(counts[row] for row in range(80, 100))
        assert retired / 4000 == pytest.approx(0.1, abs=0.01)
        assert all(counts[row] for row in range(80, 100)), "each of them comes now and then"
        own.record(1, [Measurement(4, 99, 0.0)])  # its rate is 1/3 now, with forgetting 0.5
        own.freeze()
        again = Counter(row for drawn in rollout_rows(own, 4, range(1, 1001)) for row in drawn)
        assert again[99] / 4000 == pytest.approx(0.6 / 41, abs=0.005)
        assert counts[99] / 4000 == pytest.approx(0.1 / 20, abs=0.003)


class TestRates:
    @pytest.mark.parametrize(("forgetting", "rate"), [(0.0, 1.5 / 3), (0.5, (0.25 + 0.25 + 0.0) / 1.75), (1.0, 0.0)])
    def test_forgetting(self, forgetting, rate):
        own = curriculum(forgetting=forgetting)
        for rollout, value in enumerate((1.0, 0.5, 0.0)):
            own.record(rollout, [Measurement(rollout, 3, value)])
        assert float(own._rates[3]) == pytest.approx(rate)
        assert int(own._rates.isnan().sum()) == 9

    def test_a_rollout_counts_once(self):
        """Its preparation may be interrupted, and begin again."""
        own = curriculum(forgetting=0)
        for _ in range(2):
            own.record(0, [Measurement(0, 3, 1.0)])
        own.record(1, [Measurement(1, 3, 0.0)])
        assert float(own._rates[3]) == 0.5

    def test_the_order_of_ranks_does_not_matter(self):
        found = [Measurement(5, 3, 1.0), Measurement(2, 3, 0.0), Measurement(9, 3, 0.5)]
        rates = []
        for some in (found, found[::-1]):
            own = curriculum()
            own.record(0, some)
            rates.append(float(own._rates[3]))
        assert rates[0] == rates[1] == pytest.approx((0.25 * 0 + 0.5 * 1 + 0.5) / 1.75)

    def test_groups(self):
        """Failed completions are left out; a group that lacks a score, or has none, is not measured."""
        batch = a_batch(size=16)
        batch.rewards = torch.tensor([1, 0, 0.5, 0.4] + [1, 1, 0, 0] + [NAN, 1, 1, 1] + [1.0] * 4)
        batch.failed[[6, 7]] = True
        batch.failed[12:] = True
        own = curriculum(num_prompts=4)
        rows = own.draw(range(4))
        assert own.measure(batch, 0.5) == [(0, rows[0], 0.5), (1, rows[1], 1.0)]

    def test_draws_are_forgotten_when_they_were_trained_on(self):
        """Those of the last rollout may still be recorded; memory and checkpoints do not grow."""
        own = frozen([0.5] * 16, num_prompts=4)
        for rollout in range(1, 20):
            rows = own.draw(range(4 * rollout, 4 * rollout + 4))
            batch = a_batch(size=16)
            batch.positions = torch.arange(4 * rollout, 4 * rollout + 4).repeat_interleave(4)
            own.record(rollout, own.measure(batch, 0.5))
            if rollout == 10:
                state, own = own.state_dict(), frozen([0.5] * 16, num_prompts=4)
                own.load_state_dict(state)
            assert own.draw(range(4 * rollout, 4 * rollout + 4)) == rows
        assert sorted(own._drawn) == [76, 77, 78, 79]

    def test_groups_that_were_not_drawn(self):
        """As in a run that was resumed with a curriculum."""
        assert curriculum().measure(a_batch(), 0.5) == []

    def test_metrics(self):
        assert frozen([0.5, 0.2, 1.0, 0.0, NAN, NAN, NAN, NAN]).metrics() == {
            "curriculum/measured_fraction": 0.5,
            "curriculum/in_band_fraction": 0.25,
            "curriculum/retired_fraction": 0.125,
        }

    def test_its_state(self):
        """In a checkpoint, which loads without executing code."""
        own = frozen([0.5, 0.2, 1.0, 0.0, NAN, NAN, NAN, NAN])
        own.draw(range(2, 8))
        own.record(1, [Measurement(2, 5, 0.5)])
        file = io.BytesIO()
        torch.save(own.state_dict(), file)
        file.seek(0)
        other = curriculum(8)
        other.load_state_dict(torch.load(file, weights_only=True))
        assert rollout_rows(other, 2, range(1, 30)) == rollout_rows(own, 2, range(1, 30))
        for one in (own, other):
            one.freeze()
            one.record(1, [Measurement(2, 5, 0.0)])
        assert rollout_rows(other, 2, range(1, 30)) == rollout_rows(own, 2, range(1, 30))
        assert own.metrics() == other.metrics()


class TestRuns:
    @pytest.mark.parametrize("lead", [0, 2])
    @pytest.mark.parametrize("v", [1, 3])
    def test_the_same_prompts_however_rollouts_are_sampled(self, v, lead):
        settings = measured(v=v, i=2)
        plain = fit(**measured({"lead": lead}, v=v, i=2))
        assert len({tuple(map(tuple, prompts)) for prompts in prompts_of(plain)}) > 4
        for ahead, overlap in ((True, False), (False, True), (True, True)):
            data = settings["data"] | {"lead": lead, "generate_ahead": ahead, "overlap": overlap}
            run = fit(**settings | {"data": data})
            assert prompts_of(run) == prompts_of(plain)
            assert_same(plain, run)
            assert run.logged[-1]["curriculum/measured_fraction"] > 0

    @pytest.mark.parametrize(("v", "lead"), [(1, 0), (3, 0), (1, 2), (3, 2)])
    def test_pass_rates_are_those_of_the_last_sync(self, v, lead):
        """That is, of the rollouts that the sampling weights were trained on."""
        run = fit(**measured({"lead": lead}, v=v))
        batches = run.recorder.rollouts
        shadow = curriculum(16, 4, forgetting=0.3, seed=0)
        rows = []
        for k, batch in enumerate(batches):
            step = int(batch.behaviour_step[0])  # as reuse is 1, the number of rollouts that were trained on
            known = curriculum(16, 4, forgetting=0.3, seed=0)
            for j in range(step):
                known._drawn = dict(zip(range(4 * j, 4 * j + 4), rows[j], strict=True))
                known.record(j, known.measure(batches[j], 0.5))
            known.freeze()
            rows.append([known.row_at(4 * k + j) for j in range(4)])
        prompts = {
            row: tokens
            for own, found in zip(rows, prompts_of(run), strict=True)
            for row, tokens in zip(own, found, strict=True)
        }
        assert [[prompts[row] for row in own] for own in rows] == prompts_of(run)
        assert len(set(prompts.values())) == len(prompts), "rows and prompts correspond one to one"
        assert shadow.metrics()["curriculum/measured_fraction"] == 0

    @pytest.mark.parametrize(("band", "reward"), [((0.0, 0.3), 0.0), ((0.7, 1.0), 1.0)])
    def test_prompts_of_the_band_come(self, band, reward):
        """Once enough of them are known, no others come, if nothing is explored or replayed."""

        solved = {row["question"] for row in task().rows("train")[::2]}

        class IsSolved(Reward):
            is_inline = True

            def score(self, prompt, completion):
                return float(prompt.row["question"] in solved)

        difficulty = Measured(band=band, exploration=0.0, replay=0.0)
        run = fit(**measured({"task": task(IsSolved()), "difficulty": difficulty}, rollouts=10))
        rewards = [batch.rewards.mean().item() for batch in run.recorder.rollouts]
        assert 0 < statistics.fmean(rewards[:2]) < 1
        assert rewards[5:] == [reward] * 5

    def test_recorded_rows_are_those_of_the_prompts(self, tmp_path):
        """Also with rollouts that were sampled before the last sync."""
        settings = measured({"lead": 2}, v=1, callbacks=[RolloutRecorder(path=str(tmp_path))])
        fit(**settings)
        for row in Recording.read(str(tmp_path)).table.to_pylist():
            assert json.loads(row["row"])["question"] == row["prompt"].removesuffix(">")

    def test_late_scores(self):
        """A group counts when it is trained on."""

        class Late(Reward):
            is_inline = True

            def __init__(self):
                self.asked = Counter()

            def score(self, prompt, completion):
                self.asked[prompt.position, completion.text] += 1
                is_late = prompt.position == 1 and self.asked[1, completion.text] < 3
                return NOT_YET if is_late else LowDigits().score(prompt, completion)

        run = fit(**measured({"task": task(Late())}))
        shares = [row["curriculum/measured_fraction"] * 16 for row in run.logged]
        assert shares[0] == 3
        known = [set(batch.positions[batch.is_known].tolist()) for batch in run.recorder.rollouts]
        assert [1 in positions for positions in known].index(True) > 0

    def test_failed_completions(self):
        class Fails(Reward):
            is_inline = True

            def score(self, prompt, completion):
                return (
                    FailedScore(0.0, "errors", "no") if prompt.position == 1 else LowDigits().score(prompt, completion)
                )

        run = fit(**measured({"task": task(Fails())}, rollouts=1))
        assert run.logged[0]["curriculum/measured_fraction"] * 16 == 3


@pytest.mark.slow("resumes runs from each of their checkpoints")
@pytest.mark.parametrize(
    "data",
    [
        {},
        {"lead": 2},
        {"generate_ahead": True},
        {"generate_ahead": True, "overlap": True, "lead": 1},
        {"partial": PartialRollouts(extra_prompts=2), "sampling": Sampling(max_tokens=6)},
    ],
    ids=["plain", "lead", "ahead", "overlap", "partial"],
)
def test_resume(data, tmp_path):
    """Exact from every step, inside a cycle and inside a rollout."""

    def options(name, save=False):
        callbacks = [ExactResume()]
        if save:
            callbacks.append(ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1))
        trainer = {"enable_checkpointing": save, "default_root_dir": str(tmp_path / name)}
        return measured(data, v=3, i=2, rollouts=7, callbacks=callbacks, trainer=trainer)

    straight = fit(**options("straight", save=True))
    for step in range(1, 14):
        run = fit(**options(str(step)), ckpt_path=str(tmp_path / f"step={step}.ckpt"))
        assert largest_difference(straight.weights, run.weights) == 0, f"from step {step}"
        begun = -(-step // 2)
        assert prompts_of(run) == prompts_of(straight)[begun:], f"from step {step}"
        assert [row["curriculum/measured_fraction"] for row in run.logged] == [
            row["curriculum/measured_fraction"] for row in straight.logged[step:]
        ]


def in_processes(command, folder):
    arguments = [sys.executable, "-m", "tests.processes.two_curricula", command, str(folder)]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=300)


@pytest.mark.slow("starts processes")
def test_two_ranks(tmp_path):
    """They draw the prompts that one process draws, and log the same state; a resumed run does, too."""
    done = in_processes("ranks", tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    found = torch.load(tmp_path / "found", weights_only=True)
    for mode in two_curricula.MODES:
        if mode != "partial":  # where the groups that are whole first depend on the ranks
            alone = two_curricula.summary(two_curricula.run(mode, tmp_path))
            assert found[mode]["prompts"] == alone["prompts"]
            assert found[mode]["shares"] == alone["shares"]
            assert largest_difference(found[mode]["weights"], alone["weights"]) < 1e-5
        assert found[mode]["shares"][-1] > found[mode]["shares"][0] > 0
    straight, resumed = found[two_curricula.RESUMED], found["resumed"]
    assert largest_difference(straight["weights"], resumed["weights"]) == 0
    assert resumed["prompts"] == straight["prompts"][4 * two_curricula.STEP :]
    assert resumed["shares"] == straight["shares"][two_curricula.STEP :]


@pytest.mark.slow("starts a process")
def test_a_killed_run(tmp_path):
    """It resumes from its last whole checkpoint as if it had not been killed."""
    killed = in_processes("killed", tmp_path)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    resumed = two_curricula.summary(two_curricula.run(two_curricula.RESUMED, tmp_path, resume=True))
    straight = two_curricula.summary(two_curricula.run(two_curricula.RESUMED, tmp_path))
    assert largest_difference(straight["weights"], resumed["weights"]) == 0
    assert resumed["prompts"] == straight["prompts"][4 * two_curricula.STEP :]
    assert resumed["shares"] == straight["shares"][two_curricula.STEP :]


class TestPartial:
    def test_a_prompt_is_drawn_when_its_group_is_begun(self, tmp_path):
        """It stays the prompt of its group, which later syncs do not change."""
        partial = {"partial": PartialRollouts(extra_prompts=2), "sampling": Sampling(max_tokens=6)}
        run = fit(**measured(partial, callbacks=[RolloutRecorder(path=str(tmp_path))], rollouts=10))
        rows = Recording.read(str(tmp_path)).table.to_pylist()
        for row in rows:
            assert json.loads(row["row"])["question"] == row["prompt"].removesuffix(">")
        later = [row for row in rows if row["behaviour_step"] < row["rollout"]]
        assert later, "some groups were begun before the last sync"
        assert run.logged[-1]["curriculum/measured_fraction"] > 0

    def test_in_the_background(self):
        partial = {"partial": PartialRollouts(extra_prompts=2), "sampling": Sampling(max_tokens=6)}
        plain, overlapped = fit(**measured(partial, v=2)), fit(**measured(partial | {"overlap": True}, v=2))
        assert prompts_of(plain) == prompts_of(overlapped)
        assert_same(plain, overlapped)


def test_syncs_in_flight(monkeypatch):
    """A rollout is drawn when it is requested, also if it is sampled after the next sync."""
    requested = {}
    request = RolloutSampler.on_request

    def on_request(self, rollouts):
        for rollout in rollouts:
            positions = range(4 * rollout, 4 * rollout + 4)
            requested[rollout] = [tuple(self.prompts.at(position).token_ids) for position in positions]
        request(self, rollouts)

    monkeypatch.setattr(RolloutSampler, "on_request", on_request)
    data = {name: measured()["data"][name] for name in ("task", "difficulty", "evaluation")}
    run = in_flight(lead=2, data=data, learning_rate=0.5)
    assert [requested[batch.rollout] for batch in run.recorder.rollouts] == prompts_of(run)
    assert len(set(map(tuple, prompts_of(run)))) > 4


class TestMistakes:
    @pytest.mark.parametrize(
        ("data", "message"),
        [
            ({"dynamic_sampling": DynamicSampling()}, r"data\.dynamic_sampling is set: groups that are replaced"),
            ({"shuffle": False}, r"draws rows at random: it needs data\.shuffle"),
            ({"engine": ReplayEngine("nothing")}, "takes completions from a recording"),
            ({"difficulty": Measured(band=(0.9, 0.1))}, "the lower first"),
            ({"difficulty": Measured(band=(-0.1, 0.9))}, "two pass rates between 0 and 1"),
            ({"difficulty": Measured(exploration=0.8, replay=0.3)}, "are more than 1 together"),
            ({"difficulty": Measured(forgetting=1.5)}, r"forgetting is 1\.5; it must be at least 0 and at most 1"),
        ],
    )
    def test_settings(self, data, message):
        with pytest.raises(ValueError, match=message):
            fit(**measured(data))

    def test_a_stream(self, tmp_path):
        rows = [{"question": f"{n:02}", "answer": "1"} for n in range(16)]
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        streamed = DatasetTask(ExactMatch(), train=str(path), validation=rows, streaming=True)
        with pytest.raises(ValueError, match="draws from all rows, which a stream does not keep"):
            fit(**measured({"task": streamed}))
