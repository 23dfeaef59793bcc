"""The embedded engine: a lagged copy of the policy, decoded with transformers in the training process."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

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

from lgrpo.engines.base import NoWeightsError, OnGroup, RolloutEngine, Sampling
from lgrpo.engines.completions import eos_ids, text_before_stop
from lgrpo.engines.ledger import Sent, WeightSyncError
from lgrpo.functional import named_checksums, quick_products, stream_uniform
from lgrpo.types import Completion, PolicyWeights, Prompt

_ROOM = 64
"""Tokens the cache makes room for at a time, and random numbers are drawn for."""


@final
class TransformersEngine(RolloutEngine):
    """Samples with transformers. For CPUs, small models and tests: it needs nothing else, and is exact."""

    def __init__(
        self,
        max_sequences: int = 512,
        dtype: Literal["float32", "bfloat16"] | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        """
        Args:
            max_sequences: Completions decoded at a time.
            dtype: Of the lagged copy. By default the policy's.
            trust_remote_code: Let the model's repository run its own code, as for the policy.
        """
        super().__init__()
        if max_sequences < 1:
            raise ValueError(f"max_sequences is {max_sequences}; at least 1 must be decoded at a time")
        self.max_sequences = max_sequences
        self.dtype = None if dtype is None else getattr(torch, dtype)
        self.trust_remote_code = trust_remote_code
        self._model: PreTrainedModel | None = None

    @torch.no_grad()
    def receive(self, weights: PolicyWeights, version: int) -> Sent:
        sent, own = Sent(dtype=self.dtype), dict[str, Tensor]()
        for name, tensor in sent.through(weights, copy=False):
            if self._model is None:
                self._model = self._build(weights.config, tensor)
            own = own or self._model.state_dict()
            if name in own:
                own[name].copy_(tensor)
        if different := own.keys() ^ sent.shapes.keys():
            raise WeightSyncError(f"the engine's model and the policy differ in their tensors: {sorted(different)[:3]}")
        return sent

    def _build(self, config: PretrainedConfig, example: Tensor) -> PreTrainedModel:
        """A model where one of the tensors is, and in its precision."""
        with torch.device(example.device), torch.random.fork_rng(devices=[]):
            model = AutoModelForCausalLM.from_config(
                copy.deepcopy(config),  # which would take on the engine's attention, and the policy with it
                dtype=example.dtype,
                attn_implementation="sdpa",
                trust_remote_code=self.trust_remote_code,
            ).eval()
        return model.requires_grad_(False)

    def held_checksums(self, sent: Sent) -> dict[str, int]:
        held = self._held().state_dict()
        places = {name: (t.data_ptr(), t.dtype, t.shape, t.stride()) for name, t in held.items()}
        first = {place: name for name, place in places.items()}  # a tied head is read once
        found = named_checksums((name, held[name]) for name in first.values())
        return {name: found[first[place]] for name, place in places.items()}

    def held_weights(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self._held().state_dict().items()}

    def held_config(self) -> PretrainedConfig:
        return self._held().config

    def _held(self) -> PreTrainedModel:
        if self._model is None or self.step is None:
            raise NoWeightsError
        return self._model

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Prompt],
        num_samples: int,
        sampling: Sampling,
        seed: int,
        tokenizer: PreTrainedTokenizerBase,
        on_group: OnGroup | None = None,
    ) -> list[list[Completion]]:
        step, version = self.holds()
        model, groups = self._held(), dict[int, list[Completion]]()
        at_a_time = max(1, self.max_sequences // num_samples)
        with quick_products(model.device, model.dtype):
            for start in range(0, len(prompts), at_a_time):
                chunk = prompts[start : start + at_a_time]
                for place, drawn in _decode(model, chunk, num_samples, sampling, seed, tokenizer):
                    rows = slice(place * num_samples, (place + 1) * num_samples)
                    groups[start + place] = drawn.completions(rows, tokenizer, sampling, step, version)
                    if on_group is not None:
                        on_group(start + place, groups[start + place])
        return [groups[place] for place in range(len(prompts))]

    def close(self) -> None:
        self.forget()
        self._model = None


class _RoomyLayer(DynamicLayer):
    """Keys and values with room for tokens to come, where transformers' own layer copies them all at every token."""

    keys: Tensor
    values: Tensor
    _room: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        before = self.get_seq_length()
        after = before + key_states.shape[-2]
        if self._room is None or self._room[0].shape[-2] < after:
            self._room = _with_room(self.keys, key_states, after), _with_room(self.values, value_states, after)
        self._room[0][..., before:after, :] = key_states
        self._room[1][..., before:after, :] = value_states
        self.keys, self.values = (room[..., :after, :] for room in self._room)
        return self.keys, self.values

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._room = None

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._room = None


def _with_room(held: Tensor, states: Tensor, length: int) -> Tensor:
    """What is held, with place behind it."""
    *size, _, width = states.shape
    room = states.new_empty(*size, length + _ROOM, width)
    if held.numel():
        room[..., : held.shape[-2], :] = held
    return room


def _cache(config: PretrainedConfig) -> DynamicCache:
    cache = DynamicCache(config=config)
    cache.layers = [_RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


@dataclass(slots=True)
class _Drawn:
    """What has been drawn of some completions so far."""

    tokens: Tensor
    logprobs: Tensor
    lengths: list[int]
    finish_reasons: list[Literal["stop", "length"]]

    @classmethod
    def nothing(cls, count: int, max_tokens: int, device: torch.device) -> _Drawn:
        tokens = torch.zeros(count, max_tokens, dtype=torch.int64, device=device)
        return cls(tokens, torch.zeros_like(tokens, dtype=torch.float32), [0] * count, ["length"] * count)

    def completions(
        self, rows: slice, tokenizer: PreTrainedTokenizerBase, sampling: Sampling, step: int, version: int
    ) -> list[Completion]:
        found = []
        whole = self.tokens[rows].tolist(), self.logprobs[rows].tolist(), self.lengths[rows], self.finish_reasons[rows]
        for tokens, logprobs, length, reason in zip(*whole, strict=True):
            text = tokenizer.decode(tokens[:length], skip_special_tokens=True)
            found.append(
                Completion(
                    token_ids=tokens[:length],
                    logprobs=logprobs[:length],
                    text=text_before_stop(text, sampling.stop or []),
                    finish_reason=reason,
                    behaviour_step=step,
                    version=version,
                )
            )
        return found


def _decode(
    model: PreTrainedModel,
    prompts: Sequence[Prompt],
    num_samples: int,
    sampling: Sampling,
    seed: int,
    tokenizer: PreTrainedTokenizerBase,
) -> Iterator[tuple[int, _Drawn]]:
    """The place of each prompt, as soon as the last of its rows ends. Siblings share their prompt's run."""
    device, eos = model.device, torch.tensor(sorted(eos_ids(model.config, tokenizer)), device=model.device)
    longest = max(len(p.token_ids) for p in prompts)
    tokens = torch.full((len(prompts), longest), tokenizer.pad_token_id, dtype=torch.int64)
    mask = torch.zeros(len(prompts), longest, dtype=torch.int64)
    for i, prompt in enumerate(prompts):  # padded on the left, so that all rows go on from the same column
        tokens[i, longest - len(prompt.token_ids) :] = torch.tensor(prompt.token_ids)
        mask[i, longest - len(prompt.token_ids) :] = 1
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
    logits = output.logits[:, -1].repeat_interleave(num_samples, 0)
    cache.batch_repeat_interleave(num_samples)
    mask = mask.repeat_interleave(num_samples, 0)
    lengths = mask.sum(1)
    so_far = _Drawn.nothing(len(mask), sampling.max_tokens, device)
    unfinished = [num_samples] * len(prompts)
    alive = torch.arange(len(mask), device=device)
    is_open = torch.ones(len(mask), dtype=torch.bool, device=device)  # of those alive
    prompt_positions = torch.tensor([p.position for p in prompts], device=device).repeat_interleave(num_samples)
    siblings = torch.arange(num_samples, device=device).repeat(len(prompts))

    for t in range(sampling.max_tokens):
        if t % _ROOM == 0:  # for many tokens at once: for each, it would take as long
            ahead = torch.arange(t, min(t + _ROOM, sampling.max_tokens), device=device)
            uniform = stream_uniform(seed, prompt_positions[alive, None], siblings[alive, None], ahead)
        drawn, logprobs = draw(logits.float(), sampling, uniform[:, t % _ROOM])
        so_far.tokens[alive, t], so_far.logprobs[alive, t] = drawn, logprobs
        stops = is_open & _stops(so_far.tokens[:, : t + 1], alive, sampling.stop or [], tokenizer, eos)
        ends = is_open if t + 1 == sampling.max_tokens else stops
        for row, has_stopped in zip(alive[ends].tolist(), stops[ends].tolist(), strict=True):
            so_far.lengths[row], so_far.finish_reasons[row] = t + 1, "stop" if has_stopped else "length"
            place = row // num_samples
            unfinished[place] -= 1
            if unfinished[place] == 0:
                yield place, so_far
        is_open = is_open & ~ends
        going_on = is_open.nonzero().squeeze(1)
        if not len(going_on):
            break
        if len(going_on) <= len(alive) // 2:  # decode only what is still alive
            alive, drawn, mask, lengths = alive[going_on], drawn[going_on], mask[going_on], lengths[going_on]
            is_open, uniform = is_open[going_on], uniform[going_on]
            cache.batch_select_indices(going_on)
        if padded:
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        logits = model(
            input_ids=drawn[:, None],
            attention_mask=mask if padded else None,
            position_ids=lengths[:, None] + t,
            past_key_values=cache,
        ).logits[:, -1]


def draw(logits: Tensor, sampling: Sampling, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [B] drawn from logits [B, V] by inverse transform, and their log-probabilities, truncation included."""
    logprobs = torch.log_softmax(logits if sampling.temperature == 1 else logits / sampling.temperature, dim=-1)
    if sampling.is_truncated:
        ordered, order = logprobs.sort(dim=-1, descending=True)
        keep = ordered.exp() >= sampling.min_p * ordered[:, :1].exp()
        ordered = ordered.masked_fill(~keep, -torch.inf).log_softmax(-1)
        if sampling.top_k:
            keep[:, sampling.top_k :] = False
            ordered = ordered.masked_fill(~keep, -torch.inf).log_softmax(-1)
        keep &= ordered.exp().cumsum(-1) - ordered.exp() < sampling.top_p  # the mass before a token is not enough yet
        keep[:, 0] = True
        dropped = torch.empty_like(keep).scatter_(-1, order, ~keep)
        logprobs = logprobs.masked_fill(dropped, -torch.inf).log_softmax(-1)
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    threshold = uniform.to(cumulative) * cumulative[:, -1]
    tokens = torch.searchsorted(cumulative, threshold[:, None], right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)
    return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1)


def _stops(drawn: Tensor, alive: Tensor, stop: list[str], tokenizer: PreTrainedTokenizerBase, eos: Tensor) -> Tensor:
    """Which of the rows alive end with what was drawn last: an end of sequence, or the last token of a stop string."""
    stops = torch.isin(drawn[alive, -1], eos)
    if stop:
        tail = 4 * max(len(s) for s in stop) + 4  # a character is at most four byte-level tokens
        texts = [tokenizer.decode(tokens) for tokens in drawn[alive, -tail:].tolist()]
        stops |= torch.tensor([any(s in text for s in stop) for text in texts], device=stops.device)
    return stops
