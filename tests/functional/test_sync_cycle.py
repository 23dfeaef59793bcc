"""Which rollouts are selected for logs and measurements."""

from __future__ import annotations

import pytest

from lgrpo.functional.sync_cycle import ENDLESS, MAX_AHEAD, is_selected, rollouts_to_sample


@pytest.mark.parametrize("every", [1, 2, 3, 7, 10, 25])
def test_one_of_every_n_rollouts_is_selected(every):
    selected = [k for k in range(40 * every) if is_selected(k, every)]
    assert [k // every for k in selected] == list(range(40))
    assert selected[0] == 0


@pytest.mark.parametrize("period", [2, 5, 10, 11, 20, 30])
@pytest.mark.parametrize("every", [2, 10, 20])
def test_rollouts_of_all_lags_are_selected(every, period):
    lags = {k % period for k in range(every * 200) if is_selected(k, every)}
    assert lags == set(range(period))


def test_an_endless_cycle_is_not_sampled_at_once():
    assert rollouts_to_sample(5, ENDLESS, ENDLESS, True, per_epoch=1000) == range(5, 5 + MAX_AHEAD)
    assert rollouts_to_sample(995, ENDLESS, ENDLESS, True, per_epoch=1000) == range(995, 1000)
