"""Score the reference answer of every problem, which should get 1, and a wrong answer, which must get 0.

    python -m tests.benchmarks.answers --data FOLDER              # all tasks, resumable; minutes on two cores
    python -m tests.benchmarks.answers --data FOLDER GSM8K        # some of the tasks
    python -m tests.benchmarks.answers --report                   # write the table of rewards.md from the rows

``--data`` has a folder for each entry of ``CHECKS`` with its splits as JSON lines, such as ``gsm8k/test.jsonl.gz``,
with the fields ``question``, ``answer`` and ``solution``. Entries without a folder are left out. Each split appends a
row to ``tests/benchmarks/results/answers.jsonl``.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lgrpo.data.scorer import GroupScores, Scorer
from lgrpo.rewards import FailedScore, Scoring
from lgrpo.tasks import AIME24, GSM8K, MATH, MATH500, Countdown, DeepScaleR, Task
from lgrpo.types import Completion, Prompt

ROWS = Path(__file__).parent / "results" / "answers.jsonl"
PAGE = Path(__file__).parents[2] / "tutorials" / "pages" / "rewards.md"
Row = Mapping[str, Any]


def with_number(row: Row) -> str:
    """Return the solution, followed by the answer."""
    return f"{row['solution']}\nThe answer is {row['answer']}."


def with_box(row: Row) -> str:
    """Return the solution, followed by the answer in a box."""
    return f"{row['solution']}\nThe answer is $\\boxed{{{row['answer']}}}$."


def solution(row: Row) -> str:
    """Return the solution, which contains its answer in a box."""
    return str(row["solution"])


def equation(row: Row) -> str:
    """Return the solution, which is an equation, as an answer."""
    return f"<answer> {row['solution']} </answer>"


def with_other_digit(text: str) -> str:
    """Return a text whose first digit is one higher (0 after 9), or another number if it has no digit.

    >>> [with_other_digit(text) for text in ("72", "9/(x + 1)", "x")]
    ['82', '0/(x + 1)', '7654321']
    """
    digit = re.search(r"\d", text)
    if digit is None:
        return "7654321"
    return f"{text[: digit.start()]}{(int(digit[0]) + 1) % 10}{text[digit.end() :]}"


@dataclass(frozen=True, kw_only=True)
class Check:
    """A task, and how its reference answers and wrong answers are written."""

    folder: str
    task: Callable[..., Task]
    right: Callable[[Row], str]
    right_is: str
    wrong: Callable[[Row], str]
    changed: str = "answer"
    """Field in which a digit is changed to make the answer wrong."""


APPENDED = "reference solution, with the answer appended"
CHECKS = {
    "GSM8K": Check(folder="gsm8k", task=GSM8K, right=with_number, right_is=APPENDED, wrong=with_number),
    "MATH": Check(folder="math", task=MATH, right=solution, right_is="reference solution", wrong=with_box),
    "MATH, answer_from_solution": Check(
        folder="math",
        task=partial(MATH, answer_from_solution=True),
        right=solution,
        right_is="reference solution",
        wrong=with_box,
    ),
    "MATH500": Check(folder="math500", task=MATH500, right=with_box, right_is=APPENDED, wrong=with_box),
    "AIME24": Check(folder="aime24", task=AIME24, right=with_box, right_is=APPENDED, wrong=with_box),
    "DeepScaleR": Check(folder="deepscaler", task=DeepScaleR, right=with_box, right_is="answer", wrong=with_box),
    "Countdown": Check(
        folder="countdown",
        task=Countdown,
        right=equation,
        right_is="reference equation",
        wrong=equation,
        changed="solution",
    ),
}


def score_all(task: Task, rows: Sequence[Row], texts: Sequence[str]) -> dict[str, int]:
    """Return how many texts the task's reward scores 1, 0, something between, and not at all."""
    scorer = Scorer(task.reward, Scoring(num_workers=2))
    prompts = [Prompt(token_ids=[], text="", row=row, position=index) for index, row in enumerate(rows)]
    group_scores = GroupScores(scorer, prompts)
    for index, text in enumerate(texts):
        group_scores(index, [Completion(token_ids=[], logprobs=[], text=text, finish_reason="stop", behaviour_step=0)])
    scores = [score for (score,) in group_scores.result()]
    scorer.close()
    failed = sum(isinstance(score, FailedScore) for score in scores)
    return {"one": scores.count(1.0), "zero": scores.count(0.0) - failed, "failed": failed}


def measure(name: str, path: Path) -> dict[str, Any]:
    """Score the answers of one file and return its row."""
    check = CHECKS[name]
    task = check.task(train=str(path), validation=str(path))
    rows = task.rows("train")
    right = score_all(task, rows, [check.right(row) for row in rows])
    broken = [{**row, check.changed: with_other_digit(str(row[check.changed]))} for row in rows]
    wrong = score_all(task, rows, [check.wrong(row) for row in broken])
    split = path.name.split(".")[0]
    return {"name": name, "split": split, "rows": len(rows), "right": right, "wrong": wrong}


def read() -> list[dict[str, Any]]:
    return [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of the page."""
    lines = [
        "| task | split | right answers | scored 1 | wrong answers scored 1 |",
        "|---|---|---|---:|---:|",
    ]
    for row in sorted(rows, key=lambda row: (list(CHECKS).index(row["name"]), row["split"])):
        count, one, note = row["rows"], row["right"]["one"], row["right"]["failed"]
        share = "all" if one == count else f"{one:,} ({100 * one / count:.1f} %)"
        share += f", {note} not scored" if note else ""
        wrong = "none" if row["wrong"]["one"] == 0 else f"{row['wrong']['one']:,}"
        cells = f"{count:,} × {CHECKS[row['name']].right_is}", share, wrong
        lines.append(f"| `{row['name']}` | {row['split']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def filled(text: str) -> str:
    """Return the page with the table of the kept rows."""
    block = f"<!-- answers -->\n\n{table(read())}\n\n<!-- end -->"
    return re.sub(r"<!-- answers -->.*?<!-- end -->", lambda _: block, text, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"some of {', '.join(CHECKS)} (default: all)")
    parser.add_argument("--data", type=Path, help="folder with a folder for each task")
    parser.add_argument("--report", action="store_true", help="write the table of rewards.md")
    arguments = parser.parse_args()
    if arguments.data is None and not arguments.report:
        parser.error("give --data, or --report")
    done = {(row["name"], row["split"]) for row in read()}
    for name in arguments.names or CHECKS if arguments.data else ():
        for path in sorted((arguments.data / CHECKS[name].folder).glob("*.jsonl*")):
            if (name, path.name.split(".")[0]) in done:
                continue
            row = measure(name, path)
            print(json.dumps(row), flush=True)
            with ROWS.open("a") as file:
                file.write(json.dumps(row) + "\n")
    if arguments.report:
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(table(read()))


if __name__ == "__main__":
    main()
