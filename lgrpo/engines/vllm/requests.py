"""The requests of a generation, as vLLM takes them, and what becomes of its answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PretrainedConfig

from lgrpo.engines.completions import Generation
from lgrpo.engines.vllm.kept import from_flat, num_likeliest
from lgrpo.functional import stream_seed
from lgrpo.types import Completion


def request_fields(generation: Generation, config: PretrainedConfig) -> dict[str, Any]:
    """Return the fields of a request that do not depend on the prompt."""
    sampling = generation.sampling
    return {
        "n": generation.num_samples,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": 1.0,
        "max_tokens": sampling.max_tokens,
        "logprobs": num_likeliest(sampling, config),
        "stop_token_ids": generation.stop_ids(config),
    }


def request_seed(generation: Generation, index: int, sibling: int, num_begun: int) -> int:
    """Return the seed of a request for one completion, of which some tokens may be sampled already.

    A sibling of a new prompt has the seed that vLLM would give it. A continued one must not repeat its draws.
    """
    key = (sibling, num_begun) if num_begun else ()
    return stream_seed(generation.seed, generation.prompts[index].position, *key) + (0 if num_begun else sibling)


class Requests:
    """Requests for some prompts of a generation: one for each prompt, or for each completion of a partial one."""

    def __init__(
        self, generation: Generation, indices: Sequence[int], config: PretrainedConfig, is_seeded: bool
    ) -> None:
        self.generation = generation
        self.inputs: list[dict[str, Any]] = []
        self.parameters: list[Any] = []
        self._is_seeded = is_seeded
        self._shared = request_fields(generation, config)
        self._asked: list[tuple[int, int]] = []  # prompt and sibling of each request
        self._groups: dict[int, list[Completion]] = {}
        """Groups of a partial generation that are not whole, with the completions that are finished by now."""
        num_begun = sum(len(c.token_ids) for index in indices for c in generation.begun.get(index, []))
        # the same prompt may come first in several calls, which must not draw the same numbers
        key = (generation.version, num_begun) if num_begun else ()
        self.seed = stream_seed(generation.seed, generation.prompts[indices[0]].position, *key)
        """Seed of vLLM's own generators, from which requests without a seed draw."""
        for index in indices:
            if not generation.is_partial:
                self._add(index, 0, [])
                continue
            self._groups[index] = group = generation.begun_of(index)
            for sibling, begun in enumerate(group):
                if begun.finish_reason is None:
                    self._add(index, sibling, begun.token_ids)

    def _add(self, index: int, sibling: int, begun: list[int]) -> None:
        from vllm import SamplingParams

        generation, prompt, fields = self.generation, self.generation.prompts[index], dict(self._shared)
        fields["max_tokens"] = generation.max_tokens_of(index) - len(begun)
        if generation.is_partial:
            fields["n"] = 1
        seed = request_seed(generation, index, sibling, len(begun))
        self.inputs.append({"prompt_token_ids": prompt.token_ids + begun, "cache_salt": f"v{generation.version}"})
        self.parameters.append(
            SamplingParams(
                **fields,
                seed=seed if self._is_seeded else None,
                flat_logprobs=True,  # otherwise vLLM creates an object per token
                detokenize=False,
            )
        )
        self._asked.append((index, sibling))

    def keep(self, number: int, outputs: Sequence[Any]) -> None:
        """Take vLLM's answer to a request; a group is passed on when it is whole."""
        generation, (index, sibling) = self.generation, self._asked[number]
        if not generation.is_partial:
            generation.keep(index, [self._completion(a.token_ids, a.logprobs, a.finish_reason) for a in outputs])
            return
        group, (a, *_) = self._groups[index], outputs
        group[sibling] = self._completion(a.token_ids, a.logprobs, a.finish_reason, group[sibling])
        if all(completion.finish_reason is not None for completion in group):
            generation.keep(index, self._groups.pop(index))

    def leave(self, number: int, token_ids: Sequence[int], logprobs: Any) -> None:
        """Take the tokens of a completion that is not finished, and vLLM's log-probabilities."""
        index, sibling = self._asked[number]
        group = self._groups[index]
        group[sibling] = self._completion(token_ids, logprobs, None, group[sibling])

    def _completion(
        self, token_ids: Sequence[int], logprobs: Any, reason: str | None, begun: Completion | None = None
    ) -> Completion:
        found, kept = from_flat(token_ids, logprobs, self._shared["logprobs"])
        return self.generation.completion(list(token_ids), found, reason, begun, kept)

    def finish(self) -> None:
        """Pass on the groups that are not whole."""
        for index, group in self._groups.items():
            self.generation.leave(index, group)
