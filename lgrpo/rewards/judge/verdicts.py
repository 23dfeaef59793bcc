"""Verdicts of judges on disk: one file each, named by a hash of everything that was asked."""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import threading
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

Verdict: TypeAlias = dict[str, Any]
"""Questions to a judge about a completion, and its answers.

``key`` is the name of its file, a hash of everything that was asked: ``model``, ``questions`` (conversations),
``votes`` and the settings of the request. ``answers`` are those of each vote to each question, and ``complete`` says
whether they ended by themselves. ``scores`` and ``errors`` have the score of each vote, or why its answers cannot be
read. ``orders_agree``, if there are several orders, says whether the answers of each vote mean the same in all of them.
``seconds`` is the time they took."""


def verdict_key(asked: Mapping[str, Any]) -> str:
    """Return the key of what is asked: a hash that depends on nothing else."""
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


class VerdictFolder:
    """A folder of verdicts, which several processes may share."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def find(self, key: str) -> Verdict | None:
        """Return a verdict; None if there is none, or its file is broken, as after a power failure."""
        return _read(self._path(key))

    def keep(self, verdict: Verdict, replace: bool) -> Verdict:
        """Write a verdict, and return the one that is in the folder then.

        Another process may have asked the same: the first verdict stays, so that all use the same one.

        Args:
            verdict: The verdict.
            replace: Whether it replaces the one that ``find`` has returned.
        """
        path = self._path(verdict["key"])
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.unfinished")
        try:
            unfinished.write_text(json.dumps(verdict), encoding="utf-8")
            if not replace and (first := self._publish(unfinished, path)) is not None:
                return first
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)
        return verdict

    def _publish(self, unfinished: Path, path: Path) -> Verdict | None:
        """Give a file its name unless there is one; return the verdict of that one, if it has one."""
        try:
            os.link(unfinished, path)
        except FileExistsError:
            return _read(path)
        except OSError:  # a file system without links
            return _read(path)
        return None

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key[2:]}.json"


def _read(path: Path) -> Verdict | None:
    try:
        verdict = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return verdict if isinstance(verdict, dict) and "answers" in verdict else None


def read_verdicts(folder: str | Path) -> Iterator[Verdict]:
    """Yield the verdicts in a folder of ``JudgeReward``, in the order of their keys.

    Args:
        folder: Folder given as ``verdicts``.
    """
    for path in sorted(Path(folder).glob("*/*.json")):
        if (verdict := _read(path)) is not None:
            yield verdict


def verdict_statistics(folder: str | Path, labels: Mapping[str, float] | None = None) -> dict[str, float]:
    """Return statistics of the verdicts in a folder, NaN where there is nothing to count.

    ``verdicts`` is their number, ``unreadable`` the share of the votes that could not be read, ``score`` the mean
    score, ``unanimous`` the share of verdicts whose votes are equal and ``agreement`` the mean share of the votes that
    equal the most frequent one, both over verdicts with several votes, ``order_changes`` the share of the votes that
    change with the order, and ``seconds`` the median time of a verdict.

    With labels: ``labelled`` is the number of verdicts that have one and can be read, ``accuracy`` the share of these
    whose score is on the label's side of 0.5, and ``auc`` the probability that of two completions, with a label of at
    least 0.5 and below, the judge gives the first the higher score, equal scores counting half.

    Args:
        folder: Folder given as ``verdicts``.
        labels: Known score of completions, between 0 and 1, by the key of the verdict.
    """
    names = ("key", "scores", "orders_agree", "seconds")  # without the texts, which may not fit into memory
    found = [{name: one[name] for name in names if name in one} for one in read_verdicts(folder)]
    if not found:
        raise FileNotFoundError(f"there are no verdicts in {folder}")
    votes = [score for verdict in found for score in verdict["scores"]]
    several = [scores for verdict in found if len(scores := readable_scores(verdict)) > 1]
    orders = [agree for verdict in found for agree in verdict.get("orders_agree", []) if agree is not None]
    result = {
        "verdicts": len(found),
        "unreadable": votes.count(None) / len(votes),
        "score": _mean(statistics.fmean(scores) for verdict in found if (scores := readable_scores(verdict))),
        "unanimous": _mean(len(set(scores)) == 1 for scores in several),
        "agreement": _mean(max(Counter(scores).values()) / len(scores) for scores in several),
        "order_changes": _mean(not agree for agree in orders),
        "seconds": statistics.median(verdict["seconds"] for verdict in found),
    }
    return result if labels is None else result | _against_labels(found, labels)


def readable_scores(verdict: Mapping[str, Any]) -> list[float]:
    """Return the scores of the votes that could be read."""
    return [score for score in verdict["scores"] if score is not None]


def _against_labels(verdicts: list[Verdict], labels: Mapping[str, float]) -> dict[str, float]:
    pairs = [
        (statistics.fmean(scores), labels[verdict["key"]])
        for verdict in verdicts
        if verdict["key"] in labels and (scores := readable_scores(verdict))
    ]
    right = [score for score, label in pairs if label >= 0.5]
    wrong = sorted(score for score, label in pairs if label < 0.5)
    return {
        "labelled": len(pairs),
        "accuracy": _mean((score >= 0.5) == (label >= 0.5) for score, label in pairs),
        "auc": _mean((bisect_left(wrong, one) + bisect_right(wrong, one)) / 2 / len(wrong) for one in right if wrong),
    }


def _mean(values: Iterator[float]) -> float:
    """Return the mean; NaN of nothing."""
    known = [float(value) for value in values]
    return statistics.fmean(known) if known else float("nan")
