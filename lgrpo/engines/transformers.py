"""The embedded engine: a lagged copy of the policy, decoded with transformers in the training process."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal, final

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lgrpo.engines.base import NoWeightsError, OnGroup, RolloutEngine, Sampling, eos_ids, text_before_stop
from lgrpo.engines.ledger import Sent, WeightSyncError
from lgrpo.functional import as_numbers, quick_products, stream_uniform, tensor_checksum
from lgrpo.types import Completion, PolicyWeights, Prompt


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
        sent = Sent(dtype=self.dtype)
        incoming = dict(sent.through(weights))
        if self._model is None:
            example = next(iter(incoming.values()))
            with torch.device(example.device), torch.random.fork_rng(devices=[]):
                self._model = AutoModelForCausalLM.from_config(
                    copy.deepcopy(weights.config),  # which would take on the engine's attention, and the policy with it
                    dtype=example.dtype,
                    attn_implementation="sdpa",
                    trust_remote_code=self.trust_remote_code,
                ).eval()
            self._model.requires_grad_(False)
        own = self._model.state_dict()
        if different := own.keys() ^ incoming.keys():
            raise WeightSyncError(f"the engine's model and the policy differ in their tensors: {sorted(different)[:3]}")
        for name, tensor in incoming.items():
            own[name].copy_(tensor)
        return sent

    def held_checksums(self, sent: Sent) -> dict[str, int]:
        return as_numbers({name: tensor_checksum(tensor) for name, tensor in self._held().state_dict().items()})

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
                for place, rows in _decode(model, chunk, num_samples, sampling, seed, tokenizer):
                    groups[start + place] = [row.completion(tokenizer, sampling, step, version) for row in rows]
                    if on_group is not None:
                        on_group(start + place, groups[start + place])
        return [groups[place] for place in range(len(prompts))]

    def close(self) -> None:
        self.forget()
        self._model = None


class _Row:
    """What has been drawn for one completion so far."""

    __slots__ = ("finish_reason", "logprobs", "token_ids")

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.finish_reason: Literal["stop", "length"] | None = None

    def completion(self, tokenizer: PreTrainedTokenizerBase, sampling: Sampling, step: int, version: int) -> Completion:
        text = tokenizer.decode(self.token_ids, skip_special_tokens=True)
        return Completion(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            text=text_before_stop(text, sampling.stop or []),
            finish_reason=self.finish_reason or "length",
            behaviour_step=step,
            version=version,
        )


def _decode(
    model: PreTrainedModel,
    prompts: Sequence[Prompt],
    num_samples: int,
    sampling: Sampling,
    seed: int,
    tokenizer: PreTrainedTokenizerBase,
) -> Iterator[tuple[int, list[_Row]]]:
    """The place of each prompt and its rows, as soon as the last of these ends. Siblings share their prompt's run."""
    device, stop, eos = model.device, sampling.stop or [], eos_ids(model.config, tokenizer)
    longest = max(len(p.token_ids) for p in prompts)
    tokens = torch.full((len(prompts), longest), tokenizer.pad_token_id, dtype=torch.int64)
    mask = torch.zeros(len(prompts), longest, dtype=torch.int64)
    for i, prompt in enumerate(prompts):  # padded on the left, so that all rows go on from the same column
        tokens[i, longest - len(prompt.token_ids) :] = torch.tensor(prompt.token_ids)
        mask[i, longest - len(prompt.token_ids) :] = 1
    tokens, mask = tokens.to(device), mask.to(device)
    padded = bool((mask == 0).any())
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
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
    rows = [_Row() for _ in range(len(prompts) * num_samples)]
    unfinished = [num_samples] * len(prompts)
    alive = torch.arange(len(rows), device=device)
    prompt_positions = torch.tensor([p.position for p in prompts], device=device).repeat_interleave(num_samples)
    siblings = torch.arange(num_samples, device=device).repeat(len(prompts))

    for t in range(sampling.max_tokens):
        uniform = stream_uniform(seed, prompt_positions[alive], siblings[alive], t)
        drawn, logprobs = draw(logits.float(), sampling, uniform)
        going_on, ended = _record(rows, alive, drawn, logprobs, t, sampling, stop, tokenizer, eos)
        for place, count in Counter(row // num_samples for row in ended).items():
            unfinished[place] -= count
            if unfinished[place] == 0:
                yield place, rows[place * num_samples : (place + 1) * num_samples]
        if not going_on:
            break
        if len(going_on) <= len(alive) // 2:  # decode only what is still alive
            kept = torch.tensor(going_on, device=device)
            alive, drawn, mask, lengths = alive[kept], drawn[kept], mask[kept], lengths[kept]
            cache.batch_select_indices(kept)
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
    logprobs = torch.log_softmax(logits / sampling.temperature, dim=-1)
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


def _record(
    rows: list[_Row],
    alive: Tensor,
    drawn: Tensor,
    logprobs: Tensor,
    t: int,
    sampling: Sampling,
    stop: list[str],
    tokenizer: PreTrainedTokenizerBase,
    eos: set[int],
) -> tuple[list[int], list[int]]:
    """Writes one token to each unfinished row; the places in ``alive`` of the rows that go on, the rows that end."""
    going_on, ended = [], []
    tail = 4 * max((len(s) for s in stop), default=0) + 4  # a character is at most four byte-level tokens
    for place, (row_index, token, logprob) in enumerate(
        zip(alive.tolist(), drawn.tolist(), logprobs.tolist(), strict=True)
    ):
        row = rows[row_index]
        if row.finish_reason is not None:
            continue
        row.token_ids.append(token)
        row.logprobs.append(logprob)
        if token in eos or (stop and any(s in tokenizer.decode(row.token_ids[-tail:]) for s in stop)):
            row.finish_reason = "stop"
        elif t + 1 == sampling.max_tokens:
            row.finish_reason = "length"
        if row.finish_reason is None:
            going_on.append(place)
        else:
            ended.append(row_index)
    return going_on, ended
