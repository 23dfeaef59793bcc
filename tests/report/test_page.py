"""The page of a run in a browser: its values, its filters, and that no text of a run is executed."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lgrpo.cli import main
from lgrpo.report import mean_interval, write_page
from tests.browser import Browser, needs_chromium, until
from tests.report.made_up import clocked, completions, metrics, settings, write_run

pytestmark = needs_chromium

TINY = Path(__file__).parents[2] / "configs" / "tiny.yaml"
EVERY_CURVE = """
[...pageCharts.values()].flatMap(({plot, curves}) => curves.map((curve) => {
  const points = plot.data[0].map((x, i) => [x, plot.data[curve.column][i]]);
  return [curve.run.name, curve.metric, points.filter(([x, y]) => y !== null && y !== undefined)];
}))
"""
HOSTILE = [
    "</script><script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 2'>",
    "--><svg/onload=window.hacked=3>",
    "\x00\x07\x1b[31mred\x7f\u202eturned\u2028",
    "half \ud800 of \udc00 a pair, a whole one 😀",
    "${window.hacked = 4} {{SCRIPT}} \\u003cscript\\u003e",
]


@pytest.fixture(scope="module")
def browser():
    with Browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "one")


@pytest.fixture(scope="module")
def page(run):
    write_page([run], run / "report.html")
    return run / "report.html"


def show_all(browser):
    """Bring every chart into view: a chart is drawn when it becomes visible."""
    browser.resize(1280, 12_000)
    until(lambda: browser.eval("document.querySelectorAll('.plot:empty').length === 0"), "every chart")
    browser.resize(1280)


def logged(run):
    """Read the CSV independently of ``lgrpo.report``."""
    values = {}
    with next(run.glob("metrics/version_0/metrics.csv")).open(newline="") as file:
        for row in csv.DictReader(file):
            for name, text in row.items():
                if text and name != "step":
                    values.setdefault(name, []).append([int(row["step"]), float(text)])
    return values


def rows(browser):
    return browser.eval("[...document.querySelectorAll('#completions tr.row')].map((row) => row.innerText)")


def counted(browser):
    return browser.eval("document.querySelector('#completions')?.closest('div').nextSibling.firstChild.textContent")


def text(browser, selector):
    return browser.eval(f"document.querySelector({json.dumps(selector)})?.textContent")


class TestNumbers:
    def test_every_curve_has_the_values_of_the_csv(self, browser, run, page):
        browser.open(page)
        show_all(browser)
        drawn = {metric: points for _, metric, points in browser.eval(EVERY_CURVE)}
        smoothed = drawn.pop("rollout/reward (smoothed)")
        expected = logged(run)
        bands = {name for name in expected if name.endswith("_stderr")}
        body = text(browser, "body")
        constant = {name for name, points in expected.items() if len({value for _, value in points}) == 1} - bands
        assert constant == {"rollout/zero_variance_fraction", "time/score", "time/wait", "time/update"} | {
            f"time/{part}_idle_share" for part in ("trainer", "engine")
        }
        listed = {name for name in constant if f"{name} " in body}
        assert set(drawn) | listed == set(expected) - bands
        for name, points in drawn.items():
            assert [x for x, _ in points] == [x for x, _ in expected[name]], name
            assert [y for _, y in points] == pytest.approx([y for _, y in expected[name]], rel=1e-5, abs=1e-9), name
        reward = [value for _, value in expected["rollout/reward"]]
        assert smoothed[-1][1] == pytest.approx(sum(reward[-5:]) / 5, rel=1e-5)
        assert browser.errors == []
        assert browser.requests == [page.resolve().as_uri()]

    def test_bands_are_95_percent(self, browser, page):
        browser.open(page)
        show_all(browser)
        upper, middle = browser.eval(
            "(({plot, curves}) => { const c = curves.find((c) => c.metric === 'val/pass@8');"
            "return [plot.data[c.column + 1][0], plot.data[c.column][0]]; })"
            "(pageCharts.get('Learning / pass@k, held-out problems'))"
        )
        assert upper - middle == pytest.approx(1.96 * 0.03)

    def test_tiles(self, browser, run, page):
        browser.open(page)
        shown = text(browser, "#tiles")
        scores = [value for _, value in logged(run)["val/pass@1"]]
        reward = [value for _, value in logged(run)["rollout/reward"]][-5:]
        assert f"{scores[0]:.2f} → {scores[-1]:.2f}± 0.039, best {scores[-1]:.2f}" in shown
        assert f"reward{sum(reward) / 5:.3f}" in shown
        assert "100of 100: complete" in shown
        assert "syncs10largest lag 9" in shown
        assert "trainer idle64%engine 36%" in shown
        assert "sync 50 ms" in text(browser, "#stages")
        assert "update 2.0 s" in text(browser, "#stages")

    def test_legend_follows_the_cursor(self, browser, run, page):
        browser.open(page)
        show_all(browser)
        browser.eval(
            "(({plot}) => plot.setCursor({left: plot.valToPos(37, 'x'), top: 50}))"
            "(pageCharts.get('Learning / Reward of rollouts'))"
        )
        value = logged(run)["rollout/reward"][37][1]
        until(lambda: "at step 37" in text(browser, ".chart .legend"), "the legend")
        assert f"each rollout {value:.4f}".rstrip("0") in text(browser, ".chart .legend")

    def test_curves_by_training_time(self, browser, page):
        """Each step takes 3.5 s of waiting and 2 s of updating."""
        browser.open(page, "x=time")
        show_all(browser)
        drawn = {metric: points for _, metric, points in browser.eval(EVERY_CURVE)}
        assert [x for x, _ in drawn["train/lag"]] == pytest.approx([5.5 * step for step in range(100)], rel=1e-4)

    def test_zoom_is_remembered(self, browser, page):
        browser.open(page, "zoom=20..40")
        show_all(browser)
        ends = "[...pageCharts.values()].map(({plot}) => [plot.scales.x.min, plot.scales.x.max])"
        assert all(end == [20, 40] for end in browser.eval(ends))
        browser.eval("document.querySelector('#unzoom').click()")
        assert browser.eval(ends)[0] == [0, 99]
        assert browser.eval("location.hash") == ""

    def test_dragging_zooms_every_chart_and_a_double_click_zooms_out(self, browser, page):
        browser.open(page)
        show_all(browser)
        left, top = browser.eval(
            "(({plot}) => { const box = plot.over.getBoundingClientRect(); return [box.left, box.top + 60]; })"
            "(pageCharts.get('Learning / Reward of rollouts'))"
        )
        browser.mouse("mousePressed", left + 100, top)
        browser.mouse("mouseMoved", left + 200, top)
        browser.mouse("mouseReleased", left + 200, top)
        ends = "[...pageCharts.values()].map(({plot}) => [plot.scales.x.min, plot.scales.x.max].join())"
        zoomed = set(browser.eval(ends))
        assert len(zoomed) == 1
        low, high = map(float, zoomed.pop().split(","))
        assert 10 < low < high < 60
        for clicks in (1, 2):
            browser.mouse("mousePressed", left + 150, top, clicks)
            browser.mouse("mouseReleased", left + 150, top, clicks)
        assert browser.eval(ends)[0] == "0,99"
        assert browser.errors == []

    def test_a_real_run(self, browser, tmp_path):
        """Use the commands that a user types."""
        short = ["--data.num_rollouts=6", "--trainer.max_epochs=2", "--data.evaluation.num_problems=16"]
        log = ["--trainer.callbacks.every=2"]  # of the last callback, RolloutLog
        run = tmp_path / "real"
        main(["fit", f"--config={TINY}", f"--run={run}", *short, *log, "--weight_sync.period=4"])
        main(["report", str(run)])
        browser.open(run / "report.html")
        show_all(browser)
        drawn = {metric: points for _, metric, points in browser.eval(EVERY_CURVE)}
        for name, points in logged(run).items():
            if name in drawn:
                assert [y for _, y in drawn[name]] == pytest.approx([y for _, y in points], rel=1e-5, abs=1e-9), name
        assert {"rollout/reward", "val/pass@1", "train/lag", "train/kl_behaviour", "time/wait"} <= set(drawn)
        versions = browser.eval("[...document.querySelectorAll('#syncs tr.row')].map((r) => r.cells[0].innerText)")
        assert versions == ["0", "1", "2"]
        cells = (
            "[...document.querySelectorAll('#completions tr.row')].map((r) => [0, 1].map((k) => r.cells[k].innerText))"
        )
        assert browser.eval(cells) == [[str(k), str(k // 4)] for k in (0, 3, 4) for _ in range(8)][:20]
        assert counted(browser) == "48 rows"
        assert "12of 12: complete" in text(browser, "#tiles")
        assert browser.errors == []


class TestAxes:
    def test_every_chart_is_drawn_without_scrolling(self, browser, page):
        """A screenshot of the whole page shows all charts."""
        browser.open(page)
        until(lambda: browser.eval("document.querySelectorAll('.plot:empty').length === 0"), "every chart")
        assert browser.eval("scrollY") == 0

    def test_a_logarithmic_axis(self, browser, run, page):
        browser.open(page)
        show_all(browser)
        button = (
            "[...document.querySelectorAll('.chart')].find((c) => c.innerText.startsWith('KL')).querySelector('.log')"
        )
        browser.eval(f"{button}.click()")
        scale = "pageCharts.get('Off-policy / KL').plot.scales.y"
        assert browser.eval(f"[{scale}.distr, {scale}.min > 0]") == [3, True]
        drawn = {metric: points for _, metric, points in browser.eval(EVERY_CURVE)}
        positive = [point for point in logged(run)["train/kl_behaviour"] if point[1] > 0]
        assert len(positive) == 90
        assert [x for x, _ in drawn["train/kl_behaviour"]] == [x for x, _ in positive]
        note = "[...document.querySelectorAll('.chart')].find((c) => c.innerText.startsWith('KL')).innerText"
        assert "Values of 0 or below are left out." in browser.eval(note)
        browser.open(page, browser.eval("location.hash").removeprefix("#"))
        show_all(browser)
        assert browser.eval(f"{scale}.distr") == 3
        assert browser.eval("pageCharts.get('Off-policy / Lag').plot.scales.y.distr") != 3
        assert browser.errors == []

    def test_smoothing_of_every_curve(self, browser, run, page):
        browser.open(page)
        show_all(browser)
        browser.set("select#smooth", "20")
        drawn = {metric: points for _, metric, points in browser.eval(EVERY_CURVE)}
        for name in ("train/loss", "rollout/reward", "mine/colour"):
            values = [value for _, value in logged(run)[name]]
            for k in (0, 5, 50, 99):
                expected = values[max(0, k - 19) : k + 1]
                mean = pytest.approx(sum(expected) / len(expected), rel=1e-5)
                assert drawn[f"{name} (smoothed)"][k] == [k, mean], name
        assert "val/pass@1 (smoothed)" not in drawn, "four points"
        browser.set("select#smooth", "1")
        assert not [metric for _, metric, _ in browser.eval(EVERY_CURVE) if "smoothed" in metric]

    def test_another_axis_shows_the_whole_run(self, browser, page):
        """A range of steps is not a range of seconds."""
        browser.open(page, "zoom=20..40")
        show_all(browser)
        browser.eval("document.querySelector('#axis').click()")
        ends = "[...pageCharts.values()].map(({plot}) => [plot.scales.x.min, plot.scales.x.max])"
        assert browser.eval(ends)[0] == [0, pytest.approx(99 * 5.5)]
        assert "zoom" not in browser.eval("location.hash")

    def test_print_is_light(self, browser, page):
        browser.scheme("dark")
        browser.open(page)
        browser.eval("dispatchEvent(new Event('beforeprint'))")
        assert browser.eval("document.querySelectorAll('.plot:empty').length") == 0
        assert not browser.eval("document.documentElement.classList.contains('dark')")
        browser.eval("dispatchEvent(new Event('afterprint'))")
        assert browser.eval("document.documentElement.classList.contains('dark')")
        browser.scheme("light")
        assert browser.errors == []

    def test_strip_of_stages(self, browser, page):
        """Each rollout waits 3.5 s, of which 0.4 s are scoring and in one of ten 0.5 s are a sync, and updates 2 s."""
        browser.open(page)
        columns = "[...document.querySelectorAll('#timeline .strip span')]"
        assert browser.eval(f"{columns}.length") == 100
        first, second = browser.eval(f"{columns}.slice(0, 2).map((column) => column.title)")
        assert first == "rollout 0: sync 500 ms, generate 2.6 s, score 400 ms, update 2.0 s, validate 0 ms"
        assert second.startswith("rollout 1: sync 0 ms, generate 3.1 s")
        height, total = browser.eval(f"[{columns}[0].children[3].offsetHeight, {columns}[0].offsetHeight]")
        assert height / total == pytest.approx(2 / 5.5, abs=0.03)
        assert browser.eval("document.querySelector('#gantt')") is None, "the run has no clock"

    def test_gantt_chart(self, browser, tmp_path):
        """Cycles that are sampled before training on them, and during it."""
        for name, overlaps in (("off", False), ("on", True)):
            write_run(tmp_path / name, rows=clocked(metrics(40), overlaps), table=completions(2), period=4)
        write_page([tmp_path / "off", tmp_path / "on"], tmp_path / "report.html")
        browser.open(tmp_path / "report.html")
        assert "Rollouts 12 to 23 of 40 are shown" in text(browser, "#gantt")
        found = browser.eval(
            "[...document.querySelectorAll('#gantt .bar')].map((bar) => [...bar.querySelectorAll('.lane i')].map("
            "(box) => [box.title, box.offsetLeft, box.offsetLeft + box.offsetWidth]))"
        )
        off, on = ({title: (left, right) for title, left, right in boxes} for boxes in found)
        assert "rollout 12: the trainer waited for sync 1.0 s, generation 8.0 s, preparation 500 ms" in off
        assert "engine idle 11 s until it sampled rollout 16" in off
        assert off["rollouts 12 to 15: generate 8.0 s"][1] < off["rollout 12: update 2.0 s"][0]
        assert on["rollout 13: generate 2.0 s"][1] > on["rollout 12: update 2.0 s"][0] + 5
        browser.resize(390)
        assert browser.eval("document.documentElement.scrollWidth") == 390
        browser.resize(1280)
        assert browser.errors == []


class TestSeeds:
    @pytest.fixture(scope="class")
    def sweep(self, tmp_path_factory):
        """Three seeds of one setting, one of another."""
        root = tmp_path_factory.mktemp("sweep")
        for seed in range(3):
            write_run(root / f"a{seed}", rows=metrics(40, seed=seed), config=settings(seed_everything=seed))
        write_run(root / "b", rows=metrics(40, seed=3), config=settings(data__reuse=2))
        write_page([root / name for name in ("a0", "b", "a1", "a2")], root / "report.html")
        return root

    def test_mean_and_interval(self, browser, sweep):
        browser.open(sweep / "report.html", "smooth=1")
        show_all(browser)
        drawn = {(run, metric): points for run, metric, points in browser.eval(EVERY_CURVE)}
        assert {run for run, _ in drawn} == {"data.reuse=1 (3 seeds)", "data.reuse=2 (1 seed)"}
        runs = [logged(sweep / f"a{seed}")["rollout/reward"] for seed in range(3)]
        interval = mean_interval([points[7][1] for points in runs])
        assert drawn["data.reuse=1 (3 seeds)", "rollout/reward"][7] == [7, pytest.approx(interval.mean, rel=1e-5)]
        upper = browser.eval(
            "(({plot, curves}) => plot.data[curves.find((c) => c.run.members.length === 3).column + 1][7])"
            "(pageCharts.get('Learning / Reward of rollouts'))"
        )
        assert upper - interval.mean == pytest.approx(interval.half_width, rel=1e-4)
        assert browser.errors == []

    def test_each_run(self, browser, sweep):
        browser.open(sweep / "report.html")
        browser.eval("document.querySelectorAll('.chip')[0].click()")
        assert counted(browser) == "320 of 1,280 rows", "the completions of three runs are hidden"
        browser.eval("document.querySelector('#group').click()")
        until(lambda: text(browser, "#group") == "each run", "the page")
        show_all(browser)
        assert {run for run, _, _ in browser.eval(EVERY_CURVE)} == {"a0", "b", "a1", "a2"}
        assert counted(browser) == "1,280 rows"


class TestTable:
    @pytest.mark.parametrize(
        ("given", "keep"),
        [
            ({"#search": "THINK 3"}, lambda r: r["completion"] == "I think 3"),
            ({"#search": "sort 864"}, lambda r: "864" in r["prompt"]),
            ({"#filter-reward": ">0.5"}, lambda r: r["reward"] > 0.5),
            ({"#filter-lag": "2..4"}, lambda r: 2 <= r["lag"] <= 4),
            ({"#filter-version": "3"}, lambda r: r["version"] == 3),
            ({"#filter-advantage": "<=-1"}, lambda r: r["advantage"] <= -1),
            ({"#filter-dropped": ">0"}, lambda r: r["dropped"] is not None),
            ({"select#filter-live": "no"}, lambda r: not r["live"]),
            ({"#search": "think", "#filter-rollout": ">=30"}, lambda r: r["reward"] == 0 and r["rollout"] >= 30),
            ({"#search": "nowhere to be found"}, lambda r: False),
        ],
        ids=lambda value: " ".join(value.values()) if isinstance(value, dict) else "",
    )  # fmt: skip
    def test_filters(self, browser, page, given, keep):
        browser.open(page)
        for selector, value in given.items():
            browser.set(selector, value)
        expected = [row for row in completions(40) if keep(row)]
        until(lambda: counted(browser) == f"{len(expected)} of 320 rows", f"{len(expected)} rows")
        shown = rows(browser)
        assert len(shown) == min(20, len(expected))
        for line, row in zip(shown, expected, strict=False):
            assert line.split("\t")[0] == str(row["rollout"])
            assert row["completion"] in line

    def test_an_invalid_filter_is_marked_and_hides_nothing(self, browser, page):
        browser.open(page)
        browser.set("#filter-reward", "good")
        assert browser.eval("document.querySelector('#filter-reward').classList.contains('bad')")
        assert counted(browser) == "320 rows"

    def test_sorting_paging_and_siblings(self, browser, page):
        browser.open(page)
        browser.eval("document.querySelectorAll('#completions th button')[4].click()")
        advantages = [float(line.split("\t")[4].replace("−", "-").rstrip(" ∅")) for line in rows(browser)]
        expected = sorted(row["advantage"] for row in completions(40))
        assert advantages == pytest.approx(expected[:20], abs=6e-4)
        browser.eval("[...document.querySelectorAll('.pager button')].at(-1).click()")
        second = [float(line.split("\t")[4].replace("−", "-").rstrip(" ∅")) for line in rows(browser)]
        assert second == pytest.approx(expected[20:40], abs=6e-4)
        browser.eval("document.querySelector('#completions tr.row').click()")
        assert "Sort " in text(browser, "tr.detail .full")
        browser.eval("document.querySelector('tr.detail button').click()")
        assert counted(browser) == "8 of 320 rows"
        browser.eval("document.querySelector('#clear').click()")
        assert counted(browser) == "320 rows"

    def test_notes_of_the_reward(self, browser, tmp_path):
        """Such as a judge's answer, in the detail of a row; nothing in that of a row without any."""
        table = completions(1)
        table[1]["notes"] = "scores: [0.7]\nanswers: <b>Fine.</b>\nRating: 7"
        write_page([write_run(tmp_path / "run", table=table)], tmp_path / "page.html")
        browser.open(tmp_path / "page.html")
        details = []
        for number in (0, 1):
            browser.eval(f"[...document.querySelectorAll('#completions tr.row')][{number}].click()")
            details.append(browser.eval("[...document.querySelectorAll('tr.detail')].at(-1).innerText"))
            browser.eval(f"[...document.querySelectorAll('#completions tr.row')][{number}].click()")
        assert "notes of the reward" not in details[0]
        assert details[1].count(table[1]["notes"]) == 1

    def test_a_live_page_keeps_its_filter(self, browser, tmp_path):
        """The command rewrites the page while the run continues; the open page reloads."""
        run = write_run(tmp_path / "live", rows=metrics(40), table=completions(10))
        command = [str(Path(sys.executable).parent / "lgrpo"), "report", str(run), "--watch", "1"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            page = run / "report.html"
            until(page.exists, "the page", 120)
            browser.open(page)
            browser.set("#filter-reward", ">0.5")
            right = sum(row["reward"] for row in completions(10))
            until(lambda: counted(browser) == f"{right:.0f} of 80 rows", "the filter")
            with (run / "completions.jsonl").open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in completions(20)[80:])
            right = sum(row["reward"] for row in completions(20))
            until(lambda: counted(browser) == f"{right:.0f} of 160 rows", "the page to reload", 120)
            assert browser.eval("document.querySelector('#filter-reward').value") == ">0.5"
            assert "40of 100; last written" in text(browser, "#tiles")
        finally:
            process.send_signal(signal.SIGINT)
            output = process.communicate(timeout=60)[0]
        assert process.returncode == 0
        assert "written again every 1 s" in output
        browser.open(page)
        assert "live" not in text(browser, ".brand"), "the last page does not reload"


class TestHostile:
    def test_text_of_a_run_is_neither_executed_nor_loaded(self, browser, tmp_path):
        table = completions(len(HOSTILE), group_size=2)
        for row in table:
            row["prompt"] = row["completion"] = row["notes"] = HOSTILE[row["rollout"]]
        rows_ = metrics(30)
        for row in rows_:
            row["<script>window.hacked=5</script>/<b>x"] = row["step"]
        config = settings(seed_everything="</script><script>window.hacked=6</script>")
        config["<img src=x onerror=window.hacked=7>"] = HOSTILE[0]
        run = write_run(tmp_path / "<img src=x onerror=window.hacked=8>", rows=rows_, table=table, config=config)
        with (run / "syncs.jsonl").open("a") as file:
            file.write(json.dumps({"version": 99, "step": 29, "checksum": HOSTILE[0], "num_bytes": "<b>"}) + "\n")
        write_page([run], tmp_path / "page.html")
        browser.open(tmp_path / "page.html")
        show_all(browser)
        for number in range(len(HOSTILE)):
            browser.eval(f"[...document.querySelectorAll('#completions tr.row')][{2 * number}].click()")
        browser.eval("new Promise((done) => setTimeout(done, 200))")
        assert browser.eval("window.hacked") is None
        assert browser.errors == []
        assert browser.requests == [(tmp_path / "page.html").resolve().as_uri()]
        shown = rows(browser)
        for number, expected in {
            0: HOSTILE[0],
            1: HOSTILE[1],
            2: HOSTILE[2],
            3: r"\u0000\u0007\u001b[31mred\u007f\u202eturned\u2028",
            4: r"half \ud800 of \udc00 a pair, a whole one 😀",
            5: HOSTILE[5],
        }.items():
            assert expected in shown[2 * number]
        assert text(browser, "h1") == "<img src=x onerror=window.hacked=8>"
        assert HOSTILE[0] in text(browser, "#settings")
        assert browser.eval("document.querySelectorAll('main img, main script, main svg, main b img').length") == 0

    def test_the_content_security_policy_blocks_an_inserted_script(self, browser, page):
        browser.open(page)
        browser.eval(
            "(() => { const s = document.createElement('script'); s.textContent = 'window.hacked = 9';"
            "document.body.append(s); })()"
        )
        assert browser.eval("window.hacked") is None
        assert any("Content Security Policy" in error for error in browser.errors)


class TestBroken:
    def test_a_run_that_crashed(self, browser, tmp_path):
        """Incomplete lines are left out and counted in a note."""
        run = write_run(tmp_path / "crashed", rows=metrics(40), table=completions(5))
        file = run / "metrics" / "version_0" / "metrics.csv"
        lines = file.read_text().splitlines()
        file.write_text("\n".join(lines[:-1]) + "\n" + lines[-1][: len(lines[-1]) * 2 // 3])
        with (run / "completions.jsonl").open("a") as stream:
            stream.write('{"rollout": 5, "prompt": "cut he')
        with (run / "syncs.jsonl").open("a") as stream:
            stream.write("\x00\x00\x00\n[1, 2]\n")
        write_page([run], run / "report.html")
        browser.open(run / "report.html")
        show_all(browser)
        drawn = {metric: points for _, metric, points in browser.eval(EVERY_CURVE)}
        assert drawn["train/loss"][-1][0] == 38
        assert counted(browser) == "40 rows"
        notes = text(browser, "#notes")
        assert "metrics/version_0/metrics.csv has a line that cannot be read" in notes
        assert "completions.jsonl has a line that cannot be read" in notes
        assert "syncs.jsonl has 2 lines that cannot be read" in notes
        assert "39of 100; last written just now" in text(browser, "#tiles")
        assert browser.errors == []

    def test_a_folder_with_only_metrics(self, browser, tmp_path):
        run = write_run(
            tmp_path / "bare", rows=[{"step": 0, "train/loss": float("nan")}, {"step": 1, "train/loss": 0.5}]
        )
        for name in ("config.yaml", "completions.jsonl", "syncs.jsonl"):
            (run / name).unlink()
        write_page([run], run / "report.html")
        browser.open(run / "report.html")
        notes = text(browser, "#notes")
        assert "train/loss is not finite at 1 of 2 steps, first at step 0" in notes
        assert "no config.yaml" in notes
        assert "no completions were written" in notes
        assert browser.errors == []

    def test_only_a_header(self, browser, tmp_path):
        run = write_run(tmp_path / "early", rows=[{"step": 0, "train/loss": 1.0}], table=[])
        (run / "metrics" / "version_0" / "metrics.csv").write_text("step,train/lo")
        write_page([run], run / "report.html")
        browser.open(run / "report.html")
        assert browser.errors == []


class TestLarge:
    def test_thousands_of_steps_and_completions(self, browser, tmp_path):
        rows_ = metrics(6000, every=500)
        rows_[3456]["train/loss"] = 77.0  # one spike
        step = rows_[3456]["step"]
        run = write_run(
            tmp_path / "large", rows=rows_, table=completions(1500), config=settings(data__num_rollouts=1500)
        )
        write_page([run], run / "report.html", max_completions=6000)
        assert (run / "report.html").stat().st_size < 2e6
        browser.open(run / "report.html")
        show_all(browser)
        drawn = {metric: points for _, metric, points in browser.eval(EVERY_CURVE)}
        assert all(len(points) <= 1500 for points in drawn.values())
        assert [step, 77] in drawn["train/loss"]
        assert [x for x, _ in drawn["train/loss"]][::1499] == [0, 5999]
        assert "Curves of up to 6,000 points are downsampled to at most 1,500:" in text(browser, "#downsampled")
        assert "6,000 of the 12,000 completions on disk: whole rollouts" in text(browser, "main")
        assert counted(browser) == "6,000 rows"
        assert len(rows(browser)) == 20
        browser.set("#filter-rollout", "1499")
        until(lambda: counted(browser) == "8 of 6,000 rows", "the last rollout")
        assert browser.errors == []


class TestSeveral:
    @pytest.fixture(scope="class")
    def both(self, tmp_path_factory):
        root = tmp_path_factory.mktemp("several")
        write_run(root / "a", rows=metrics(60))
        other = settings(weight_sync__init_args__period=1, data__task={"class_path": "lgrpo.tasks.Arithmetic"})
        write_run(root / "b", rows=metrics(80, period=1, seed=1), config=other, period=1)
        write_page([root / "a", root / "b"], root / "report.html")
        return root

    def test_curves_and_summary_of_both(self, browser, both):
        browser.open(both / "report.html")
        show_all(browser)
        drawn = {(run, metric): points for run, metric, points in browser.eval(EVERY_CURVE)}
        for name in ("a", "b"):
            expected = logged(both / name)["rollout/reward"]
            assert [x for x, _ in drawn[name, "rollout/reward"]] == [x for x, _ in expected]
            assert [y for _, y in drawn[name, "rollout/reward"]] == pytest.approx([y for _, y in expected], rel=1e-5)
        assert "different tasks" in text(browser, "#notes")
        summary = browser.eval("[...document.querySelectorAll('#summary tbody tr')].map((row) => row.innerText)")
        assert summary[0].startswith("a\n")
        assert "60 of 100" in summary[0]
        assert "Arithmetic" in summary[1]
        assert browser.errors == []

    def test_settings_that_differ(self, browser, both):
        browser.open(both / "report.html")
        lines = "[...document.querySelectorAll('#settings tbody tr')].map((row) => row.innerText)"
        assert browser.eval(lines) == [
            "data.task\tlgrpo.tasks.SortDigits\tlgrpo.tasks.Arithmetic",
            "data.task.num_digits\t3\t×",
            "weight_sync.period\t10\t1",
        ]
        browser.eval("document.querySelector('#only-differences').click()")
        assert len(browser.eval(lines)) > 12
        browser.set("#find-setting", "group_size")
        assert browser.eval(lines) == ["data.group_size\t8\t8"]

    def test_hiding_a_run(self, browser, both):
        browser.open(both / "report.html")
        assert counted(browser) == "640 rows"
        browser.eval("document.querySelector('.chip').click()")
        assert counted(browser) == "320 of 640 rows"
        assert {run for run, _, _ in browser.eval(EVERY_CURVE)} == {"b"}

    def test_choosing_another_metric_of_a_chart(self, browser, both):
        browser.open(both / "report.html")
        browser.eval("[...document.querySelectorAll('.choose button')].find((b) => b.innerText === 'pass@8').click()")
        assert ("a", "val/pass@8") in {(run, metric) for run, metric, _ in browser.eval(EVERY_CURVE)}


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_fits_its_width(browser, page, width, scheme):
    """Nothing exceeds the width of the window, and the page follows the system's theme."""
    browser.scheme(scheme)
    browser.open(page)
    browser.resize(width)
    assert browser.eval("document.documentElement.scrollWidth") == width
    red = int(browser.eval("getComputedStyle(document.body).backgroundColor").removeprefix("rgb(").split(",")[0])
    assert (red < 60) == (scheme == "dark")
    browser.resize(1280)
    browser.scheme("light")
