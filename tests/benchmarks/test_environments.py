"""The seeds of the environments' configs: the stored rows and the table on the page."""

from tests.benchmarks import environments


def test_the_table_on_the_page_is_that_of_the_rows():
    text = environments.PAGE.read_text(encoding="utf-8")
    rows = environments.read()
    assert environments.with_table(text, environments.table(rows)) == text, "run the benchmark with --report"
    runs = [(row["arm"], row["seed"]) for row in rows]
    assert len(runs) == len(set(runs))
    assert {arm for arm, _ in runs} <= set(environments.ARMS)


def test_the_results_say_what_the_page_says():
    """The game and the calculator's task are learnt from every stored seed, the latter not without the tool."""
    ends = {arm: [row["pass@1"] for row in environments.read() if row["arm"] == arm] for arm in environments.ARMS}
    for arm in "guess_number", "calculator":
        assert all(curve[-1][1] > curve[0][1] + 0.1 for curve in ends[arm])
    assert all(curve[-1][1] < 0.1 for curve in ends["no_tool"])
    assert all(curve[-1][1] > 0.4 for curve in ends["calculator"])
