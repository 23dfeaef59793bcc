"""The engine that samples with transformers in the training process, from a lagged copy of the policy."""

from __future__ import annotations

import copy
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, final

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.cache_utils import DynamicLayer

from lgrpo.checks import check_count
from lgrpo.engines.base import RolloutEngine
from lgrpo.engines.completions import Generation, Sampling
from lgrpo.engines.manifest import WeightManifest, WeightSyncError
from lgrpo.engines.recovery import EngineError, NoWeightsError
from lgrpo.functional import named_checksums, stream_uniform
from lgrpo.kept import Kept
from lgrpo.types import Completion
from lgrpo.weights import PolicyWeights

_BLOCK = 64
"""Number of tokens by which the cache grows, and for which random numbers are drawn at once."""


@final
class TransformersEngine(RolloutEngine):
    """Samples with transformers: exact, without further dependencies; for CPUs, small models and tests."""

    can_overlap = True
    can_continue = True
    returns_kept = "yes"

    def __init__(
        self,
        max_sequences: int = 512,
        dtype: Literal["float32", "bfloat16"] | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        """
        Args:
            max_sequences: Completions decoded at a time.
            dtype: Precision of the lagged copy; by default the policy's.
            trust_remote_code: Whether code of the model's repository may run, as for the policy.
        """
        super().__init__()
        check_count("max_sequences", max_sequences, at_least=1)
        self.max_sequences = max_sequences
        self.dtype = None if dtype is None else getattr(torch, dtype)
        self.trust_remote_code = trust_remote_code
        self._model: PreTrainedModel | None = None

    def adopt(self, other: RolloutEngine) -> bool:
        if not isinstance(other, TransformersEngine) or other._model is None:
            return False
        self._model = other._model
        other.close()
        return True

    @torch.no_grad()
    def receive_weights(self, weights: PolicyWeights, step: int, version: int) -> WeightManifest:
        manifest, own = WeightManifest(dtype=self.dtype), dict[str, Tensor]()
        for name, tensor in manifest.stream(weights, copy=False):
            if self._model is None:
                self._model = self._build(weights.config, tensor)
            own = own or self._model.state_dict()
            if name in own:
                own[name].copy_(tensor)
        if different := own.keys() ^ manifest.shapes.keys():
            raise WeightSyncError(f"the engine's model and the policy differ in their tensors: {sorted(different)[:3]}")
        return manifest

    def _build(self, config: PretrainedConfig, example: Tensor) -> PreTrainedModel:
        """Build a model on the device and in the precision of a tensor."""
        with torch.device(example.device), torch.random.fork_rng(devices=[]):
            model = AutoModelForCausalLM.from_config(
                copy.deepcopy(config),  # from_config would change the policy's attention too
                dtype=example.dtype,
                attn_implementation="eager" if config._attn_implementation == "eager" else "sdpa",
                trust_remote_code=self.trust_remote_code,
            ).eval()
        return model.requires_grad_(False)

    def held_checksums(self, manifest: WeightManifest) -> dict[str, int]:
        held = self._held().state_dict()
        memory = {name: (t.data_ptr(), t.dtype, t.shape, t.stride()) for name, t in held.items()}
        names = {key: name for name, key in memory.items()}  # tied weights are read once
        checksums = named_checksums((name, held[name]) for name in names.values())
        return {name: checksums[names[key]] for name, key in memory.items()}

    def held_weights(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self._held().state_dict().items()}

    def _held(self) -> PreTrainedModel:
        if self._model is None or self.state.step is None:
            raise NoWeightsError
        return self._model

    @torch.inference_mode()
    def sample(self, generation: Generation) -> None:
        prompts_at_once = max(1, self.max_sequences // generation.num_samples)
        for start in range(0, len(generation.prompts), prompts_at_once):
            if generation.is_enough:
                break
            chunk = range(len(generation.prompts))[start : start + prompts_at_once]
            for index, group in _decode(self._held(), chunk, generation, self._between_steps):
                generation.keep(index, group)

    def _between_steps(self) -> None:
        if self._model is None:
            raise EngineError("the engine was closed during a generation")
        if self.on_step is not None:
            self.on_step()

    def close(self) -> None:
        self.drop_weights()
        self._model = None


class _BlockLayer(DynamicLayer):
    """Keys and values in memory that grows by blocks; transformers' layer copies everything at every token."""

    keys: Tensor
    values: Tensor
    _storage: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        before = self.get_seq_length()
        after = before + key_states.shape[-2]
        storage = self._storage
        has_moved = storage is not None and storage[0].data_ptr() != self.keys.data_ptr()  # to repeat or select rows
        if storage is None or has_moved or storage[0].shape[-2] < after:
            storage = self._storage = _grow(self.keys, key_states, after), _grow(self.values, value_states, after)
        storage[0][..., before:after, :] = key_states
        storage[1][..., before:after, :] = value_states
        self.keys, self.values = (tensor[..., :after, :] for tensor in storage)
        return self.keys, self.values


def _grow(old: Tensor, states: Tensor, length: int) -> Tensor:
    """Return new storage for at least ``length`` tokens that begins with the old ones."""
    *size, _, width = states.shape
    storage = states.new_empty(*size, length + _BLOCK, width)
    if old.numel():
        storage[..., : old.shape[-2], :] = old
    return storage


def _cache(config: PretrainedConfig) -> DynamicCache:
    cache = DynamicCache(config=config)
    cache.layers = [_BlockLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


class _Row(NamedTuple):
    """A completion that is being decoded."""

    prompt: int
    """Index of its prompt in the generation."""
    sibling: int
    begun: Completion


def _decode(
    model: PreTrainedModel, indices: Sequence[int], generation: Generation, between_steps: Callable[[], None]
) -> Iterator[tuple[int, list[Completion]]]:
    """Yield the index and the completions of each prompt when the last of them ends, and leave the unfinished ones.

    Siblings share the pass over their prompt, unless completions are continued, which have different prefixes.
    """
    num_samples, sampling, tokenizer = generation.num_samples, generation.sampling, generation.tokenizer
    device, eos = model.device, torch.tensor(generation.eos_ids(model.config), device=model.device)
    groups = {index: generation.begun_of(index) for index in indices}
    rows = [
        _Row(index, sibling, begun)
        for index, group in groups.items()
        for sibling, begun in enumerate(group)
        if begun.finish_reason is None
    ]
    has_begun = any(row.begun.token_ids for row in rows) or len(rows) < num_samples * len(indices)
    prompts = {index: generation.prompts[index] for index in indices}
    passed = rows if has_begun else rows[::num_samples]
    prefixes = [prompts[row.prompt].token_ids + row.begun.token_ids for row in passed]
    longest = max(len(prefix) for prefix in prefixes)
    tokens = torch.full((len(prefixes), longest), tokenizer.pad_token_id, dtype=torch.int64)
    mask = torch.zeros(len(prefixes), longest, dtype=torch.int64)
    for i, prefix in enumerate(prefixes):  # padded on the left, so that all rows continue from the same column
        tokens[i, longest - len(prefix) :] = torch.tensor(prefix)
        mask[i, longest - len(prefix) :] = 1
    tokens, mask = tokens.to(device), mask.to(device)
    padded = bool((mask == 0).any())
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = _cache(model.config)
    output = model(
        input_ids=tokens,
        attention_mask=mask if padded else None,
        position_ids=positions,
        past_key_values=cache,
        logits_to_keep=1,
    )
    logits = output.logits[:, -1]
    if not has_begun:
        logits, mask = logits.repeat_interleave(num_samples, 0), mask.repeat_interleave(num_samples, 0)
        cache.reorder_cache(torch.arange(len(passed), device=device).repeat_interleave(num_samples))
    lengths = mask.sum(1)
    begun_lengths = torch.tensor([len(row.begun.token_ids) for row in rows], device=device)
    limits = torch.tensor([generation.max_tokens_of(row.prompt) for row in rows], device=device)
    most = limits - begun_lengths  # tokens that each row may still have
    all_tokens = torch.zeros(len(rows), int(most.max()), dtype=torch.int64, device=device)
    all_logprobs = torch.zeros_like(all_tokens, dtype=torch.float32)
    unfinished = Counter(row.prompt for row in rows)
    alive = torch.arange(len(rows), device=device)
    is_open = torch.ones(len(rows), dtype=torch.bool, device=device)  # of the rows in alive
    prompt_positions = torch.tensor([prompts[row.prompt].position for row in rows], device=device)
    siblings = torch.tensor([row.sibling for row in rows], device=device)
    all_kept = [Kept(token_ids=array("i"), counts=array("i")) for _ in rows] if sampling.returns_kept else None

    def finish(row: int, length: int, reason: str | None) -> None:
        """Set the completion of a row that has ``length`` new tokens."""
        index, sibling, begun = rows[row]
        new = all_tokens[row, :length].tolist(), all_logprobs[row, :length].tolist()
        kept = None if all_kept is None else all_kept[row].first(length)  # rows that have ended may be decoded on
        groups[index][sibling] = generation.completion(*new, reason, begun, kept)

    for t in range(all_tokens.shape[1]):
        between_steps()
        if generation.is_enough:
            break
        if t % _BLOCK == 0:  # drawing for one token takes as long as for a block
            ahead = begun_lengths[alive, None] + torch.arange(t, t + _BLOCK, device=device)
            uniform = stream_uniform(generation.seed, prompt_positions[alive, None], siblings[alive, None], ahead)
        distribution = log_distribution(logits.float(), sampling)
        drawn, logprobs = draw(distribution, uniform[:, t % _BLOCK])
        all_tokens[alive, t], all_logprobs[alive, t] = drawn, logprobs
        if all_kept is not None:
            _add_kept([all_kept[row] for row in alive.tolist()], distribution)
        stops = is_open & _stops(all_tokens[:, : t + 1], alive, rows, sampling.stop or [], tokenizer, eos)
        ends = is_open & (stops | (most[alive] == t + 1))
        for row, has_stopped in zip(alive[ends].tolist(), stops[ends].tolist(), strict=True):
            finish(row, t + 1, "stop" if has_stopped else "length")
            index = rows[row].prompt
            unfinished[index] -= 1
            if unfinished[index] == 0:
                yield index, groups.pop(index)
        is_open = is_open & ~ends
        remaining = is_open.nonzero().squeeze(1)
        if not len(remaining):
            break
        if len(remaining) <= len(alive) // 2:  # decode only the rows that are left
            alive, drawn, mask, lengths = alive[remaining], drawn[remaining], mask[remaining], lengths[remaining]
            is_open, uniform = is_open[remaining], uniform[remaining]
            cache.reorder_cache(remaining)
        if padded:
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        logits = model(
            input_ids=drawn[:, None],
            attention_mask=mask if padded else None,
            position_ids=lengths[:, None] + t,
            past_key_values=cache,
        ).logits[:, -1]
    for row in alive[is_open].tolist():
        finish(row, t, None)
    for index, group in groups.items():
        generation.leave(index, group)


def log_distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return log-probabilities [B, V] of the distribution that tokens are drawn from; -inf for those left out."""
    logprobs = torch.log_softmax(logits if sampling.temperature == 1 else logits / sampling.temperature, dim=-1)
    if not sampling.is_truncated:
        return logprobs
    ordered, order = logprobs.sort(dim=-1, descending=True)
    keep = ordered.exp() >= sampling.min_p * ordered[:, :1].exp()
    ordered = ordered.masked_fill(~keep, -torch.inf).log_softmax(-1)
    if sampling.top_k:
        keep[:, sampling.top_k :] = False
        ordered = ordered.masked_fill(~keep, -torch.inf).log_softmax(-1)
    if sampling.top_p < 1:
        keep &= ordered.exp().cumsum(-1) - ordered.exp() < sampling.top_p  # the mass before a token is below top_p
    keep[:, 0] = True
    dropped = torch.empty_like(keep).scatter_(-1, order, ~keep)
    return logprobs.masked_fill(dropped, -torch.inf).log_softmax(-1)


def draw(distribution: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Draw tokens [B] from log-probabilities [B, V] by inverse transform; return them and their log-probabilities."""
    cumulative = distribution.exp().cumsum(-1, dtype=torch.float64)
    threshold = uniform.to(cumulative) * cumulative[:, -1]
    tokens = torch.searchsorted(cumulative, threshold[:, None], right=True).squeeze(-1)
    tokens = tokens.clamp(max=distribution.shape[-1] - 1)
    return tokens, distribution.gather(-1, tokens[:, None]).squeeze(-1)


def _add_kept(completions: Sequence[Kept], distribution: Tensor) -> None:
    """Add the tokens that can be drawn from each row of log-probabilities [B, V] to the sets of a completion."""
    is_kept = distribution > -torch.inf
    sets = is_kept.nonzero()[:, 1].int().cpu().numpy()
    counts = is_kept.sum(1).tolist()
    start = 0
    for kept, count in zip(completions, counts, strict=True):
        kept.token_ids.frombytes(sets[start : start + count].tobytes())
        kept.counts.append(count)
        start += count


def _stops(
    drawn: Tensor,
    alive: Tensor,
    rows: Sequence[_Row],
    stop: list[str],
    tokenizer: PreTrainedTokenizerBase,
    eos: Tensor,
) -> Tensor:
    """Return which rows in ``alive`` end with the last token: an end of sequence, or the end of a stop string."""
    stops = torch.isin(drawn[alive, -1], eos)
    if stop:
        tail = 4 * max(len(s) for s in stop) + 4  # a character is at most four byte-level tokens
        recent = zip(alive.tolist(), drawn[alive, -tail:].tolist(), strict=True)
        texts = [tokenizer.decode([*rows[row].begun.token_ids, *tokens][-tail:]) for row, tokens in recent]
        stops |= torch.tensor([any(s in text for s in stop) for text in texts], device=stops.device)
    return stops
