"""Count of failed episodes."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest

from lgrpo.data.episodes import episode_metrics
from lgrpo.environments import EpisodeFailure, EpisodeFailures
from lgrpo.report.names import metric_names
from lgrpo.types import Completion


def test_failures_are_counted_by_kind():
    one = Completion(token_ids=[5], logprobs=[-1.0], text="", finish_reason="stop", behaviour_step=0)
    assert not any(episode_metrics([one], may_drop=False).values())
    episodes = [replace(one, turn_rewards=(0.0,), failure=(kind, "why")) for kind in ("timeouts", "errors", "errors")]
    found = episode_metrics([*episodes, replace(one, turn_rewards=(1.0,))], may_drop=True)
    assert {name: value for name, value in found.items() if value} == {
        "rollout/turns": 1.0,
        "environment/failures": 3.0,
        "environment/timeouts": 1.0,
        "environment/errors": 2.0,
    }
    assert found.keys() <= set(metric_names({}))


def test_the_first_failure_is_shown_once():
    failures = EpisodeFailures("Maze")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        failures.check()
        for _ in range(4):
            failures.add_start()
        failures.check()
    failures.add(EpisodeFailure("timeouts", "a step took longer than 3 s"))
    failures.add(EpisodeFailure("errors", "another"))
    failures.add(EpisodeFailure("errors", "a third", "reset"))
    message = "Maze failed in 3 of 5 episodes; the first failure, in a step: a step took longer than 3 s. From now on"
    with pytest.warns(UserWarning, match=message):
        failures.check()
    failures.add(EpisodeFailure("errors", "why"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        failures.check()


def test_an_environment_that_never_starts_stops_the_run():
    failures = EpisodeFailures("Maze")
    for text in ("KeyError: 'size'", "other"):
        failures.add(EpisodeFailure("errors", text, "reset"))
    message = "Maze failed in the reset of each of the first 2 episodes: KeyError: 'size'"
    with pytest.raises(RuntimeError, match=message):
        failures.check()
    failures.add_start()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        failures.check()


def test_failures_in_steps_alone_do_not_stop_the_run():
    failures = EpisodeFailures("Maze")
    failures.add_start()
    failures.add(EpisodeFailure("errors", "why"))
    with pytest.warns(UserWarning, match="1 of 1 episodes"):
        failures.check()
