"""Data types in the order data flows: prompt, completion, rollout, evaluation.

Index t of every [B, T] tensor refers to token t: ``behaviour_logprobs[b, t]`` is the log-probability
of ``tokens[b, t]`` given the tokens before it, not of the token after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from lgrpo.contexts import Dropped, contexts_of, dropped_of, ranges
from lgrpo.kept import Kept
from lgrpo.partition import Part, balanced_parts, consecutive_parts

if TYPE_CHECKING:  # reward workers start in a tenth of the time without them
    from torch import Tensor

MIN_WIDTH = 2
"""Smallest T of [B, T] tensors, because the policy predicts a token from the one before it."""
BYTES_PER_TOKEN = 24
"""Approximate memory of a token in a RolloutBatch."""
RECORDED = -1
"""Behaviour step of a completion that was not sampled by a policy of this run; such a completion has no lag."""


@dataclass(kw_only=True, slots=True)
class Prompt:
    """A tokenised prompt, with the dataset row that the reward checks the answer against."""

    token_ids: list[int]
    text: str
    """Rendered template, the text of the token ids."""
    row: Mapping[str, Any]
    """Dataset row the prompt was rendered from."""
    position: int
    """Index in the whole run, from 0. Together with the seed and the sibling index it keys the random stream."""
    max_tokens: int | None = None
    """Upper limit of the length of its completions, if it is less than that of the sampling."""
    chat: Mapping[str, Any] | None = None
    """Further arguments of the chat template that rendered it; None if it is plain text."""


class Span(NamedTuple):
    """Consecutive tokens of a completion that were sampled from the same weights."""

    num_tokens: int
    step: int
    """Optimizer step of the weights."""
    version: int
    """Number of the sync that loaded them."""


@dataclass(kw_only=True, slots=True)
class Completion:
    """One answer sampled from a behaviour policy, or recorded; with an environment, an episode of several turns."""

    token_ids: list[int]
    """Sampled tokens, including the end-of-sequence token, and between turns the observed ones. May be empty: such a
    completion has a reward, but nothing to train on. The first and the last token are sampled."""
    logprobs: list[float]
    """log π_α of each token under the distribution it was drawn from (temperature and truncation applied); NaN if a
    recording has none; 0 for observed tokens."""
    text: str
    """Decoded answer, without special tokens and without the stop string that ended it; the last turn of an episode."""
    finish_reason: Literal["stop", "length"] | None
    """Why it ended; None if it is unfinished, and will be continued (``data.partial``)."""
    behaviour_step: int
    """Optimizer step whose weights sampled it, or its last tokens; ``RECORDED`` if no policy of this run did."""
    version: int = 0
    """Number of the sync that loaded those weights: the key into the engine's ledger."""
    earlier: tuple[Span, ...] = ()
    """Its first tokens, if these were sampled from earlier weights."""
    kept: Kept | None = None
    """Tokens that could have been drawn at each position; None if none was dropped, or they were not asked for."""
    reward: float | None = None
    """Recorded score; None if the completion still has to be scored."""
    observed: tuple[tuple[int, int], ...] = ()
    """Ranges of tokens, [start, stop), that an environment wrote, in order."""
    turn_rewards: tuple[float, ...] | None = None
    """Reward of each turn from an environment; None if there was none."""
    failure: tuple[str, str] | None = None
    """Kind and reason of the failure of an environment that ended the episode."""
    num_errors: int = 0
    """Number of mistakes of the model that the environment reported, such as tool calls that cannot be read."""
    dropped: tuple[Dropped, ...] = ()
    """Observations that later contexts do not have. Their replacements are among the observed tokens."""

    @property
    def turns(self) -> list[tuple[int, int]]:
        """Ranges of tokens, [start, stop), that were sampled, in order: one without an environment.

        >>> one = Completion(token_ids=[5, 6, 7, 8, 9], logprobs=[-1, -1, 0, 0, -1], text="", finish_reason="stop",
        ...                  behaviour_step=0, observed=((2, 4),))
        >>> one.turns, one.num_sampled
        ([(0, 2), (4, 5)], 3)
        """
        starts = [0, *(stop for _, stop in self.observed)]
        return list(zip(starts, [*(start for start, _ in self.observed), len(self.token_ids)], strict=True))

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens."""
        return len(self.token_ids) - sum(stop - start for start, stop in self.observed)

    @property
    def contexts(self) -> list[int]:
        """Contexts that each token is in, as bits (``contexts_of``)."""
        return contexts_of(self.turns, self.dropped)

    @property
    def spans(self) -> tuple[Span, ...]:
        """All tokens by the weights that sampled them, in order; the last span may be empty."""
        rest = len(self.token_ids) - sum(span.num_tokens for span in self.earlier)
        return (*self.earlier, Span(rest, self.behaviour_step, self.version))


@dataclass(kw_only=True, slots=True)
class StepTotals:
    """Denominators of a loss aggregation: counts over one optimizer step, summed over micro-batches and ranks."""

    all_tokens: float = 0.0
    live_tokens: float = 0.0
    all_sequences: float = 0.0
    live_sequences: float = 0.0
    signal_tokens: float = 0.0
    """Live tokens whose advantage is not 0. No denominator: without any, a step may have no gradient."""


@dataclass(kw_only=True, slots=True)
class RolloutBatch:
    """B completions sampled from a behaviour policy; the G siblings of a prompt are adjacent rows.

    A row is a prompt, its completion, then padding on the right. ``completion_mask`` (sampled tokens) never changes;
    ``loss_mask`` (trained tokens) starts equal to it and only shrinks.
    """

    tokens: Tensor
    """[B, T] int64: prompt, completion, padding."""
    attention_mask: Tensor
    """[B, T] bool: prompt, completion and observations, not padding."""
    completion_mask: Tensor
    """[B, T] bool: sampled tokens. Observations of an environment, which are between turns, are not among them."""
    loss_mask: Tensor
    """[B, T] bool: tokens that contribute to the loss."""
    behaviour_logprobs: Tensor
    """[B, T] float32: log π_α(token); 0 outside the completion, NaN if a recording does not have it."""
    rewards: Tensor
    """[B] float32: rewards as returned by the reward; NaN if not known yet."""
    advantages: Tensor
    """[B, T] float32: 0 outside the completion."""
    behaviour_step: Tensor
    """[B] int64: optimizer step whose weights sampled each completion (rows may differ: late and recorded groups);
    ``RECORDED`` if no policy of this run did. [B, T] if tokens of a completion differ (``data.partial``): see
    ``token_steps``."""
    positions: Tensor
    """[B] int64: position of each row's prompt in the run."""
    truncated: Tensor
    """[B] bool: completions that hit the length limit."""
    failed: Tensor
    """[B] bool: completions that could not be scored; their reward is ``scoring.failure_score``."""
    rows: Tensor
    """[B] int64: index of each row in this rank's rollout, kept by ``split``."""
    group_size: int
    temperature: float
    """Temperature of the behaviour distribution; every log-probability in the loss uses it."""
    max_tokens: int
    """Upper limit of a completion's length in tokens."""
    rollout: int
    """k, the index of the rollout, counted from 0 over the whole run."""
    logprobs_from: Literal["engine", "policy"] = "engine"
    """Source of ``behaviour_logprobs``: the engine while it sampled, or the policy while it equalled α."""
    proximal_logprobs: Tensor | None = None
    """[B, T] log π_k(token) if known beforehand; otherwise the module stores it in the first pass."""
    reward_parts: Tensor | None = None
    """[B, 2, K] float32: each reward of a weighted sum, and its weight; None if the reward is not a sum."""
    notes: list[dict[str, Any] | None] | None = None
    """Notes of the reward about each of the B scores, such as a judge's verdict, in plain containers; None without
    any."""
    turn_rewards: Tensor | None = None
    """[B, T] float32: reward of each turn at its last token, 0 elsewhere; None without an environment."""
    episode_failed: Tensor | None = None
    """[B] bool: episodes that a failure of their environment ended; None without an environment."""
    contexts: Tensor | None = None
    """[B, T] int64: the contexts that each token is in, as bits (``contexts_of``); None if each row is one context."""
    zero_variance: Tensor | None = None
    """[B] bool: completions of groups whose rewards are all equal, set with the advantages."""
    kept_ids: Tensor | None = None
    """[B, K] int32: tokens that could have been drawn, position after position of a row, then padding; None if sampling
    dropped no token."""
    kept_counts: Tensor | None = None
    """[B, T] int32: number of ``kept_ids`` that belong to each token; 0 if none was dropped there."""
    totals: StepTotals = field(default_factory=StepTotals)
    """Denominators of the optimizer step, set when the masks are final."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the whole rollout (``rollout/…``, ``time/…``), reduced over ranks, for the loggers."""

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def is_known(self) -> Tensor:
        """[B] bool: rows of groups whose rewards are all known. Other rows are placeholders outside the loss."""
        unknown = self.rewards.view(-1, self.group_size).isnan().any(1)
        return ~unknown.repeat_interleave(self.group_size)

    @property
    def is_recorded(self) -> Tensor:
        """[B] bool: completions that were not sampled by a policy of this run."""
        return self.first_step == RECORDED

    @property
    def kept(self) -> tuple[Tensor, Tensor] | None:
        """``kept_ids`` and ``kept_counts``; None if sampling dropped no token."""
        return None if self.kept_ids is None or self.kept_counts is None else (self.kept_ids, self.kept_counts)

    @property
    def token_steps(self) -> Tensor:
        """[B, T] int64: ``behaviour_step`` of each token. A row never decreases; a prompt has its first token's."""
        steps = self.behaviour_step
        return steps if steps.ndim == 2 else steps[:, None].expand_as(self.tokens)

    @property
    def first_step(self) -> Tensor:
        """[B] int64: ``behaviour_step`` of the first token of each completion, the oldest."""
        return self.behaviour_step if self.behaviour_step.ndim == 1 else self.behaviour_step[:, 0]

    @property
    def last_step(self) -> Tensor:
        """[B] int64: ``behaviour_step`` of the last token of each completion, the newest."""
        import torch

        if self.behaviour_step.ndim == 1:
            return self.behaviour_step
        return torch.where(self.completion_mask, self.behaviour_step, self.first_step[:, None]).amax(1)

    def lag(self, step: int) -> Tensor:
        """Return [B] float32: optimizer steps since each completion was begun; NaN for recorded ones."""
        return _lag(step, self.first_step)

    def token_lag(self, step: int) -> Tensor:
        """Return [B, T] float32: optimizer steps since each token was sampled; NaN for recorded ones."""
        return _lag(step, self.token_steps)

    def columns(self, row: int) -> slice:
        """Return the columns of a completion, from its first to its last sampled token."""
        sampled = self.completion_mask[row].nonzero()
        return slice(int(sampled[0]), int(sampled[-1]) + 1) if len(sampled) else slice(0, 0)

    def turns(self, row: int) -> list[tuple[float, float]] | None:
        """Return the environment's reward and the advantage of each turn of an episode; None without an environment."""
        if self.turn_rewards is None:
            return None
        ends = [stop - 1 for _, stop in ranges(self.completion_mask[row].tolist())]
        return [(float(self.turn_rewards[row, end]), float(self.advantages[row, end])) for end in ends]

    def mean_advantage(self, row: int) -> float | None:
        """Return the mean advantage of a completion's sampled tokens, which differs only by turn; None without any."""
        own = self.advantages[row][self.completion_mask[row]].double()  # the mean of equal float32 is then exact
        return float(own.mean()) if len(own) else None

    def spans(self, row: int) -> list[tuple[int, int]]:
        """Return the parts of a completion: number of tokens, and their behaviour step."""
        steps = self.token_steps[row][self.columns(row)].tolist()
        return [(len(list(part)), step) for step, part in groupby(steps)] or [(0, int(self.first_step[row]))]

    @property
    def lengths(self) -> Tensor:
        """[B] int64: tokens per row, without padding."""
        return self.attention_mask.sum(1)

    @property
    def num_read(self) -> Tensor:
        """[B] int64: tokens that the model reads of each row, those of all its contexts."""
        return self.context_masks().sum((1, 2))

    def context_masks(self) -> Tensor:
        """Return [B, C, T] bool: tokens of each context of each row, in order; none for contexts that a row lacks."""
        import torch

        if self.contexts is None:
            return self.attention_mask[:, None]
        index = torch.arange(int(self.contexts.max()).bit_length(), device=self.contexts.device)
        return (self.contexts[:, None] >> index[:, None] & 1).bool()

    def dropped(self, row: int) -> tuple[Dropped, ...]:
        """Return the dropped observations of an episode, counted from its first sampled token."""
        if self.contexts is None:
            return ()
        own = self.columns(row)
        return dropped_of(ranges(self.completion_mask[row][own].tolist()), self.contexts[row][own].tolist())

    def select(self, rows: Tensor) -> RolloutBatch:
        """Return the given rows, trimmed to the longest of them."""
        from torch import Tensor

        width = max(int(self.lengths[rows].max()), MIN_WIDTH)
        chosen: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                chosen[f.name] = value[rows, :width] if value.ndim == 2 else value[rows]
        if self.kept is not None:
            ids, counts = self.kept
            chosen["kept_ids"] = ids[rows, : int(counts[rows].sum(1).max())]
        if self.notes is not None:
            chosen["notes"] = [self.notes[row] for row in rows.tolist()]
        return replace(self, **chosen)

    def empty(self) -> RolloutBatch:
        """Return the batch without its rows: a micro-batch that the lengths of a rollout do not need."""
        from torch import Tensor

        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        values = {name: value[:0] for name, value in values.items() if isinstance(value, Tensor)}
        values |= {"contexts": None, "kept_ids": None, "kept_counts": None, "notes": None}
        return replace(self, **values)

    def split(self, num_micro_batches: int, share_prompts: bool = False) -> list[RolloutBatch]:
        """Split the rollout into exactly ``num_micro_batches`` pieces of about the same number of tokens to read.

        Rows without a token in the loss have no gradient and are left out, as long as every piece keeps one row. Each
        piece divides by ``totals``, so the assignment of rows to pieces does not change the gradient.

        Args:
            num_micro_batches: Number of pieces.
            share_prompts: Whether a prompt is read once in each piece (``policy.share_prompts``), not once in each row.
                Pieces are then consecutive rows, so that each cut divides at most one group.

        Raises:
            ValueError: If there are fewer rows than pieces.
        """
        import torch

        return [self.select(torch.tensor(part.rows)) for part in self.parts(num_micro_batches, share_prompts)]

    def parts(self, num_micro_batches: int, share_prompts: bool = False) -> list[Part]:
        """Return the rows of each piece of ``split``, and the tokens that the model reads of them."""
        import torch

        if num_micro_batches > len(self):
            raise ValueError(
                f"{len(self)} completions on this rank cannot be split into {num_micro_batches} micro-batches: lower "
                "trainer.accumulate_grad_batches or raise data.num_prompts"
            )
        live, num_read = self.loss_mask.any(1), self.num_read
        order = torch.argsort(torch.where(live, num_read, -1), descending=True, stable=True)
        rows = order[: max(int(live.sum()), num_micro_batches)].sort().values
        sizes = num_read[rows].tolist()
        if share_prompts:
            parts = consecutive_parts(sizes, num_micro_batches, self._repeated_prompts(rows).tolist())
        else:
            parts = balanced_parts(sizes, num_micro_batches)
        return [Part(rows[part.rows].tolist(), part.size) for part in parts]

    def _repeated_prompts(self, rows: Tensor) -> Tensor:
        """Return how many tokens each of these rows has in its prompt, if the row before it has the same prompt."""
        import torch

        sampled = self.completion_mask[rows]
        lengths = torch.where(sampled.any(1), sampled.int().argmax(1), 0)
        positions = self.positions[rows]
        is_sibling = (positions[1:] == positions[:-1]) & (lengths[1:] == lengths[:-1])
        return torch.cat([lengths.new_zeros(1), lengths[1:] * is_sibling])

    def state_dict(self) -> dict[str, Any]:
        """Return plain containers and tensors only, so that a checkpoint loads with ``weights_only=True``."""
        state = {f.name: getattr(self, f.name) for f in fields(self)}
        state["totals"] = {f.name: getattr(self.totals, f.name) for f in fields(self.totals)}
        return state

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> RolloutBatch:
        """Return the batch of a ``state_dict``."""
        return cls(**{**state, "totals": StepTotals(**state["totals"])})


@dataclass(kw_only=True, slots=True)
class EvaluationBatch:
    """Correctness of every sample of every problem: the input of ``validation_step``."""

    task: str
    """Name of the benchmark; empty for the run's task."""
    correct: Tensor
    """[problems, samples] bool: correct samples of the current policy."""
    answers: Tensor
    """[problems, samples] int64: number of the final answer, equal for equal answers; -1 if there is none."""
    reference_correct: Tensor | None = None
    """[problems, samples] bool: correct samples of the reference, if it was sampled too."""
    failed: Tensor | None = None
    """[problems, samples] bool: samples that could not be scored; None if the reward cannot fail."""


def _lag(step: int, steps: Tensor) -> Tensor:
    return (step - steps).float().masked_fill(steps == RECORDED, float("nan"))
