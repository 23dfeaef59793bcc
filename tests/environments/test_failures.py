"""Count of failed episodes."""

from __future__ import annotations

import warnings

import pytest

from lgrpo.environments import EpisodeFailure, EpisodeFailures
from lgrpo.report.names import metric_names


def test_failures_are_counted_by_kind_since_the_last_call():
    failures = EpisodeFailures("Maze")
    for kind in ("timeouts", "errors", "errors"):
        failures.add(EpisodeFailure(kind, "why"))
    expected = dict.fromkeys((name for name in metric_names({}) if name.startswith("environment/")), 0.0)
    assert failures.metrics() == expected | {
        "environment/failures": 3.0,
        "environment/timeouts": 1.0,
        "environment/errors": 2.0,
    }
    assert failures.metrics() == expected


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
