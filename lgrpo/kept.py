"""The tokens that truncated sampling (top-k, top-p, min-p) could have drawn, position after position."""

from __future__ import annotations

from array import array
from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class Kept:
    """The tokens that could have been drawn at each position of a completion, the drawn one included.

    >>> kept = Kept(token_ids=array("i", [5, 6, 7, 5]), counts=array("i", [3, 0, 1]), incomplete=(2,))
    >>> len(kept), kept.first(2).token_ids.tolist(), (kept.first(1) + kept).incomplete
    (3, [5, 6, 7], (3,))
    """

    token_ids: array[int]
    """The sets, one after another; typecode ``i``, 32 bits each."""
    counts: array[int]
    """Number of tokens in the set of each position. 0: no token was dropped, or an environment wrote this one."""
    incomplete: tuple[int, ...] = ()
    """Positions whose set lacks tokens that could have been drawn, because the engine returns only so many. log π_α is
    renormalised over the set then."""

    def __len__(self) -> int:
        return len(self.counts)

    def __add__(self, other: Kept) -> Kept:
        incomplete = (*self.incomplete, *(len(self) + index for index in other.incomplete))
        token_ids, counts = self.token_ids + other.token_ids, self.counts + other.counts
        return Kept(token_ids=token_ids, counts=counts, incomplete=incomplete)

    def first(self, num_tokens: int) -> Kept:
        """Return the sets of the first tokens."""
        counts = self.counts[:num_tokens]
        incomplete = tuple(index for index in self.incomplete if index < num_tokens)
        return Kept(token_ids=self.token_ids[: sum(counts)], counts=counts, incomplete=incomplete)

    def with_empty(self, index: int, num_tokens: int) -> Kept:
        """Return the sets with empty ones inserted before a position, for tokens that were not sampled."""
        counts = self.counts[:index] + array("i", [0]) * num_tokens + self.counts[index:]
        incomplete = tuple(own if own < index else own + num_tokens for own in self.incomplete)
        return Kept(token_ids=self.token_ids, counts=counts, incomplete=incomplete)


def join_kept(*parts: tuple[int, Kept | None]) -> Kept | None:
    """Return the sets of consecutive parts of a completion, each given with its number of tokens; None if all are.

    >>> join_kept((2, None), (1, Kept(token_ids=array("i", [5, 6]), counts=array("i", [2])))).counts.tolist()
    [0, 0, 2]
    """
    if all(kept is None for _, kept in parts):
        return None
    joined = Kept(token_ids=array("i"), counts=array("i"))
    for num_tokens, kept in parts:
        joined += Kept(token_ids=array("i"), counts=array("i", [0]) * num_tokens) if kept is None else kept
    return joined
