"""What travels between the rooms: a prompt, a completion, a rollout of them, and weights on their way to an engine.

One convention holds throughout: index t of every [B, T] tensor speaks of token t. ``behaviour_logprobs[b, t]`` is the
log-probability of ``tokens[b, t]`` given the tokens before it, not of the token after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:  # reward workers do not need it, and start sooner
    from transformers import PretrainedConfig

RECORDED = -1
"""Behaviour step of a completion that no policy of this run sampled: it has no lag."""


@dataclass(kw_only=True, slots=True)
class Prompt:
    """A question as the engine sees it, with the row of data a reward checks the answer against."""

    token_ids: list[int]
    text: str
    """The rendered template: what the token ids spell."""
    row: Mapping[str, Any]
    """The dataset row the prompt was made from."""
    position: int
    """Place in the whole run, from 0: with the seed and the index among siblings it keys the random stream."""


@dataclass(kw_only=True, slots=True)
class Completion:
    """One answer sampled from a behaviour policy."""

    token_ids: list[int]
    """The sampled tokens, the end-of-sequence token included."""
    logprobs: list[float]
    """log π_α of each token, under the distribution it was drawn from (temperature and truncation applied); NaN where
    a recording has none."""
    text: str
    """The decoded answer, without special tokens and without the stop string that ended it."""
    finish_reason: Literal["stop", "length"]
    behaviour_step: int
    """Optimizer step whose weights sampled it; ``RECORDED`` where no policy of this run did."""
    version: int = 0
    """Which sync brought those weights: the key into the engine's ledger."""
    reward: float | None = None
    """The score it came with, where it was recorded with one; None: it is to be scored."""


@dataclass(kw_only=True, slots=True)
class StepTotals:
    """What an aggregation may divide by: counts over a whole optimizer step, all micro-batches and ranks together."""

    all_tokens: float = 0.0
    live_tokens: float = 0.0
    all_sequences: float = 0.0
    live_sequences: float = 0.0


@dataclass(kw_only=True, slots=True)
class RolloutBatch:
    """B completions sampled from a behaviour policy, the G siblings of a prompt side by side.

    Rows are a prompt, its completion, then padding on the right. ``completion_mask`` (what was sampled) never changes;
    ``loss_mask`` (what trains) starts equal to it and only shrinks.
    """

    tokens: Tensor
    """[B, T] int64: prompt, completion, padding."""
    attention_mask: Tensor
    """[B, T] bool: prompt and completion, not padding."""
    completion_mask: Tensor
    """[B, T] bool: the sampled tokens."""
    loss_mask: Tensor
    """[B, T] bool: the tokens that train."""
    behaviour_logprobs: Tensor
    """[B, T] log π_α(token), float32; 0 outside the completion, NaN where a recording does not know it."""
    rewards: Tensor
    """[B] float32, as the reward gave them; NaN where that is not known yet."""
    advantages: Tensor
    """[B, T] float32; 0 outside the completion."""
    behaviour_step: Tensor
    """[B] int64: optimizer step whose weights sampled each completion, so mixed and late rollouts fit; ``RECORDED``
    where no policy of this run did."""
    positions: Tensor
    """[B] int64: place of each row's prompt in the run."""
    truncated: Tensor
    """[B] bool: the completion hit the length limit."""
    failed: Tensor
    """[B] bool: the completion could not be scored, and has the reward given to those."""
    rows: Tensor
    """[B] int64: each row's place in this rank's rollout, kept through ``split``."""
    group_size: int
    temperature: float
    """Temperature of the behaviour distribution; every log-probability in the loss is taken at it."""
    max_tokens: int
    """Longest completion that was allowed."""
    rollout: int
    """k, counted from 0 over the whole run."""
    logprobs_from: Literal["engine", "policy"] = "engine"
    """Who computed ``behaviour_logprobs``: the engine as it sampled, or the policy while it equalled α."""
    proximal_logprobs: Tensor | None = None
    """[B, T] log π_k(token), where it is known beforehand; else the module keeps it from the first pass."""
    totals: StepTotals = field(default_factory=StepTotals)
    """Denominators of the optimizer step, set once the masks are final."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Figures of the whole rollout (``rollout/…``, ``time/…``), reduced over ranks, for the log."""

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def is_known(self) -> Tensor:
        """[B] bool: rows of groups whose rewards are all there. Others hold a place only, out of the loss."""
        unknown = self.rewards.view(-1, self.group_size).isnan().any(1)
        return ~unknown.repeat_interleave(self.group_size)

    @property
    def is_recorded(self) -> Tensor:
        """[B] bool: completions that no policy of this run sampled."""
        return self.behaviour_step == RECORDED

    def lag(self, step: int) -> Tensor:
        """[B] float32: optimizer steps since each completion was sampled; NaN for recorded ones, which have no lag."""
        return torch.where(self.is_recorded, torch.nan, (step - self.behaviour_step).float())

    @property
    def lengths(self) -> Tensor:
        """[B] tokens per row, padding excluded."""
        return self.attention_mask.sum(1)

    def select(self, rows: Tensor) -> RolloutBatch:
        """The given rows, trimmed to the longest of them."""
        width = int(self.lengths[rows].max())
        chosen: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                chosen[f.name] = value[rows, :width] if value.ndim == 2 else value[rows]
        return replace(self, **chosen)

    def split(self, num_micro_batches: int) -> list[RolloutBatch]:
        """Cuts the rollout into exactly ``num_micro_batches`` pieces of about the same number of tokens.

        Rows without a live token have no gradient and are left out, as long as every piece keeps a row. Since each
        piece divides by ``totals``, how rows are dealt does not change the gradient.

        Raises:
            ValueError: there are fewer rows than pieces.
        """
        if num_micro_batches > len(self):
            raise ValueError(
                f"{len(self)} completions on this rank cannot be cut into {num_micro_batches} micro-batches: lower "
                "trainer.accumulate_grad_batches or raise data.num_prompts"
            )
        live = self.loss_mask.any(1)
        order = torch.argsort(torch.where(live, self.lengths, -1), descending=True, stable=True).tolist()
        order = order[: max(int(live.sum()), num_micro_batches)]
        lengths = self.lengths.tolist()
        bins: list[list[int]] = [[] for _ in range(num_micro_batches)]
        loads = [(False, 0, number) for number in range(num_micro_batches)]  # the lightest first, before it empty ones
        for row in order:  # longest first
            _, load, lightest = heappop(loads)
            bins[lightest].append(row)
            heappush(loads, (True, load + lengths[row], lightest))
        return [self.select(torch.tensor(sorted(rows))) for rows in bins]

    def state_dict(self) -> dict[str, Any]:
        """Plain containers and tensors only, so that a checkpoint loads with ``weights_only=True``."""
        state = {f.name: getattr(self, f.name) for f in fields(self)}
        state["totals"] = {f.name: getattr(self.totals, f.name) for f in fields(self.totals)}
        return state

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> RolloutBatch:
        """The inverse of ``state_dict``."""
        return cls(**{**state, "totals": StepTotals(**state["totals"])})


@dataclass(kw_only=True, slots=True)
class EvaluationBatch:
    """Which samples of which problems were right: what validation reads."""

    task: str
    """Name of the task; empty for the run's own."""
    correct: Tensor
    """[problems, samples] bool, of the current policy."""
    answers: Tensor
    """[problems, samples] int64: which samples of a problem end in the same answer; -1 for those without one."""
    reference_correct: Tensor | None = None
    """[problems, samples] bool, of the reference, where it was sampled too."""


NamedTensors: TypeAlias = Callable[[], Iterator[tuple[str, Tensor]]]


@dataclass(kw_only=True, slots=True)
class Adapter:
    """Low-rank changes to weights that stand still: W of a layer becomes W + B A."""

    rank: int
    base: NamedTensors
    """The weights that stand still, by their Hugging Face names."""
    tensors: NamedTensors
    """``LAYER.lora_A.weight`` [rank, in] and ``LAYER.lora_B.weight`` [out, rank] of every layer that is changed."""

    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """The weights with the changes in them."""
        changes = dict(self.tensors())
        for name, tensor in self.base():
            layer = name.removesuffix(".weight")
            if (a := changes.get(f"{layer}.lora_A.weight")) is not None:
                b = changes[f"{layer}.lora_B.weight"]
                tensor = (tensor.float() + b.float() @ a.float()).to(tensor.dtype)
            yield name, tensor


@dataclass(kw_only=True, slots=True)
class PolicyWeights:
    """A policy's weights on their way to an engine, by their Hugging Face names, one tensor at a time."""

    config: PretrainedConfig
    """Architecture of the model: an engine builds its own copy from this."""
    tensors: NamedTensors
    adapter: Adapter | None = None
    """The same weights in two parts, where only one of them is trained: an engine that has the other needs no more."""
    computed_in: torch.dtype | None = None
    """What the trainer computes in, where that is coarser than what it keeps weights in."""
    noted: dict[str, int] | None = None
    """Checksums that were taken before, complete once the last tensor was; None where that is still to be done."""

    @classmethod
    def adapted(cls, config: PretrainedConfig, adapter: Adapter) -> PolicyWeights:
        """Weights in two parts."""
        return cls(config=config, tensors=adapter.merged, adapter=adapter)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self.tensors()
