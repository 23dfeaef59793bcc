"""Search tool: ranks the documents of a local corpus by BM25."""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import final

from lgrpo.checks import check_count
from lgrpo.environments.tools.environment import shorten

_WORD = re.compile(r"\w+")


class BM25:
    """Index of documents, ranked by Okapi BM25 with the weights of Lucene.

    >>> BM25(["a red fox", "a blue bird", "red red wine"]).rank("red wine", 2)
    [2, 0]
    """

    def __init__(self, documents: Sequence[str], k1: float = 1.5, b: float = 0.75) -> None:
        self._postings: dict[str, list[tuple[int, float]]] = defaultdict(list)
        counts = [Counter(words(document)) for document in documents]
        lengths = [count.total() for count in counts]
        mean = sum(lengths) / max(len(lengths), 1) or 1.0
        for index, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            for word, frequency in count.items():
                weight = frequency * (k1 + 1) / (frequency + k1 * (1 - b + b * length / mean))
                self._postings[word].append((index, weight))
        self._num_documents = len(documents)

    def rank(self, query: str, limit: int) -> list[int]:
        """Return the indices of the best documents that share a word with the query, the best first."""
        scores = self.scores(query)
        return sorted(scores, key=lambda index: (-scores[index], index))[:limit]

    def scores(self, query: str) -> dict[int, float]:
        """Return the scores of the documents that share a word with the query."""
        scores: dict[int, float] = defaultdict(float)
        for word in set(words(query)):
            found = self._postings.get(word, [])
            weight = math.log(1 + (self._num_documents - len(found) + 0.5) / (len(found) + 0.5))
            for index, value in found:
                scores[index] += weight * value
        return scores


@final
class Search:
    """Tool that finds documents in text files.

    A ``.jsonl`` file has a document on each line, with the field ``text`` and, if there is one, ``title``. In a
    ``.txt`` file, empty lines separate documents.
    """

    def __init__(self, corpus: str, num_results: int = 3, max_chars: int = 500) -> None:
        """
        Args:
            corpus: File, or folder of files, with the ending ``.txt`` or ``.jsonl``.
            num_results: Number of documents that a search returns.
            max_chars: Length of a document above which its middle is left out.
        """
        check_count("num_results", num_results, at_least=1)
        check_count("max_chars", max_chars, at_least=100)
        self._corpus = corpus
        self._num_results = num_results
        self._max_chars = max_chars
        load_corpus(corpus)

    def search(self, query: str) -> str:
        """Find documents by their words.

        Args:
            query: Words to search for.

        Returns:
            The documents that fit best.
        """
        documents, index = load_corpus(self._corpus)
        best = index.rank(query, self._num_results)
        if not best:
            return "No document has any of these words."
        return "\n\n".join(f"[{n}] {shorten(documents[i], self._max_chars)}" for n, i in enumerate(best, 1))


@lru_cache(maxsize=4)
def load_corpus(path: str) -> tuple[list[str], BM25]:
    """Return the documents of a corpus and their index, read once in each process."""
    files = [Path(path)] if Path(path).is_file() else sorted(Path(path).rglob("*"))
    documents = [d for file in files if file.suffix in (".txt", ".jsonl") for d in read_documents(file)]
    if not documents:
        raise ValueError(f"corpus is {path!r}; it must be a file or a folder with documents in .txt or .jsonl files")
    return documents, BM25(documents)


def read_documents(file: Path) -> Iterator[str]:
    """Yield the documents of a file."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".txt":
        yield from (part.strip() for part in re.split(r"\n\s*\n", text) if part.strip())
        return
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            yield f"{row['title']}: {row['text']}" if row.get("title") else str(row["text"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f'line {number} of {file} is not a document {{"text": …}}: {line[:100]}') from error


def words(text: str) -> list[str]:
    """Return the words of a text in lower case.

    >>> words("The fox's den")
    ['the', 'fox', 's', 'den']
    """
    return _WORD.findall(text.lower())
