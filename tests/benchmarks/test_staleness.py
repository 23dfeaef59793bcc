"""The page on staleness follows from the rows."""

from __future__ import annotations

import pytest

from tests.benchmarks import staleness
from tests.benchmarks.staleness import V


def test_the_page_is_up_to_date():
    """After new rows: ``python -m tests.benchmarks.staleness``."""
    assert staleness.PAGE.read_text(encoding="utf-8") == staleness.page()


def rows(*finals, kl=(0.0,) * V, clipped=0.0):
    """Return rows of an arm, one for each final pass@1, with two cycles of these KLs."""
    return [
        {
            "seed": seed,
            "pass@1": [[0, 0.4], [10, 0.5], [20, final]],
            "pass@1_stderr": 0.02,
            "kl_behaviour": list(kl) * 2,
            "clip_fraction_low": [clipped] * 2 * V,
            "clip_fraction_high": [clipped] * 2 * V,
            "rollouts": 20,
        }
        for seed, final in enumerate(finals)
    ]


def cycles(growth):
    """Return the KLs of a cycle that grow by so much from its middle to its end."""
    return [0.001] * (V // 2) + [0.001 + growth * step / (V - 1 - V // 2) for step in range(V - V // 2)]


@pytest.fixture
def arms():
    return {
        "v=1": rows(0.66, 0.67, 0.68),
        "v=2": rows(0.67),
        "v=10": rows(0.53, 0.54, 0.56, kl=cycles(0.001), clipped=0.01),
        "v=10, no clip": rows(0.65, 0.66, 0.67, kl=cycles(0.1)),
    }


def test_a_metric_by_the_step_of_a_cycle(arms):
    assert staleness.by_cycle_step(arms["v=10"], "kl_behaviour") == pytest.approx(cycles(0.001))
    assert staleness.by_cycle_step(arms["v=10"], "clipped") == pytest.approx([0.02] * V)
    assert staleness.growth(arms["v=10, no clip"]) == pytest.approx(0.1)


def test_whether_the_clip_holds_the_policy(arms):
    held = staleness.cycle_verdict(arms).splitlines()[0]
    assert "1% of the growth" in held
    assert "**holds the policy**" in held
    arms["v=10"] = rows(0.53, 0.54, 0.56, kl=cycles(0.05))
    assert "does not hold" in staleness.cycle_verdict(arms).splitlines()[0]
    del arms["v=10, no clip"]
    assert "not complete" in staleness.cycle_verdict(arms)


def test_the_order_of_growth_and_of_learning(arms):
    assert staleness.rank_verdict(arms).endswith("the same order.")
    arms["v=10"] = rows(0.73, 0.74, 0.76, kl=cycles(0.001))
    assert staleness.rank_verdict(arms).endswith("different orders.")


def test_verdicts_on_lag(arms):
    text = staleness.lag_verdict(arms)
    assert "Clearly different from v = 1: v = 10" in text
    assert "no verdict: v = 2" in text
    assert "largest at v = 1" in text
    arms["v=10"] = rows(0.66, 0.60, 0.71)
    assert "Not separated from v = 1: v = 10" in staleness.lag_verdict(arms)
    del arms["v=2"]
    arms["v=10"] = rows(0.5)
    assert "falls with every larger v, from 0.670 to 0.500" in staleness.lag_verdict(arms)


def test_verdicts_on_methods(arms):
    arms["v=10, M2PO"] = rows(0.7)
    text = staleness.method_verdict(arms)
    assert text.startswith("Clearly better than the clip of 0.2 at the same v: no clip (+0.")
    assert "These seeds do not separate from v=1: no clip." in text or "Clearly below v=1: no clip." in text
    assert "M2PO" not in text, "one seed is no verdict"
    assert staleness.method_table(arms).splitlines()[2].startswith("| v=10, M2PO | 1 | 0.700 |"), "the best first"
    arms["v=10, no clip"] = rows(0.53, 0.54, 0.56)
    assert staleness.method_verdict(arms).startswith("None is clearly better")


def test_v_1_is_judged_at_its_best_learning_rate(arms, monkeypatch):
    assert staleness.on_policy(arms) == "v=1"
    monkeypatch.setattr(staleness, "best_rates", lambda: {"v=1": "1e-5"})
    arms["v=1 at 1e-5"] = rows(0.7, 0.7)
    assert staleness.on_policy(arms) == "v=1", "it has two seeds"
    arms["v=1 at 1e-5"] = rows(0.7, 0.71, 0.72)
    assert staleness.on_policy(arms) == "v=1 at 1e-5"
    assert "less v=1 at 1e-5" in staleness.method_table(arms)


@pytest.mark.parametrize(("final", "expected"), [(0.45, "falls from 0.500 to 0.450"), (0.6, "rises to 0.600")])
def test_a_cycle_without_clip_that_may_be_too_long(arms, final, expected):
    assert "not known yet" in staleness.limit_verdict(arms)
    arms["v=30, no clip"] = rows(final)
    assert expected in staleness.limit_verdict(arms)
    assert "1 seed, no verdict" in staleness.limit_verdict(arms)
