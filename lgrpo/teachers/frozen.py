"""A teacher in the trainer's process."""

from __future__ import annotations

from typing import Literal, final

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lgrpo.checks import check_count
from lgrpo.functional import TopLogprobs
from lgrpo.policy import CausalPolicy
from lgrpo.policy.forward import logits, predicting_states
from lgrpo.run.resume import vocabulary_fingerprint
from lgrpo.teachers.base import Teacher


@final
class FrozenTeacher(Teacher):
    """A language model in the trainer's process, on its device. Every process has a whole copy."""

    def __init__(
        self,
        name: str,
        dtype: Literal["float32", "bfloat16"] = "bfloat16",
        offload: bool = False,
        attention: str = "packed",
        chunk_size: int = 1024,
        trust_remote_code: bool = False,
    ) -> None:
        """
        Args:
            name: Hub name or folder of the model, which must have the policy's vocabulary; of a run, the folder that
                ``lgrpo export`` writes.
            dtype: Data type of the weights.
            offload: Whether the weights are on the CPU except while a rollout is read, once for all of its tokens.
            attention: As of the policy.
            chunk_size: Number of tokens whose logits are in memory at a time.
            trust_remote_code: Allow the model's repository to run its code on this machine.
        """
        check_count("teacher.chunk_size", chunk_size, at_least=1)
        self.name = name
        self.dtype: Literal["float32", "bfloat16"] = dtype
        self.offload = offload
        self.attention = attention
        self.chunk_size = chunk_size
        self.trust_remote_code = trust_remote_code
        self._policy: CausalPolicy | None = None

    def start(
        self, tokenizer: PreTrainedTokenizerBase, top_k: int | None, temperature: float, longest: int | None = None
    ) -> None:
        if self._policy is not None:
            return
        policy = CausalPolicy(
            self.name, dtype=self.dtype, attention=self.attention, trust_remote_code=self.trust_remote_code
        )
        if vocabulary_fingerprint(policy.tokenizer) != vocabulary_fingerprint(tokenizer):
            raise ValueError(
                f"the teacher {self.name} has another vocabulary than the policy ({len(policy.tokenizer)} and "
                f"{len(tokenizer)} tokens), so its probabilities are of other tokens: choose one of the same family"
            )
        self._check_length(longest or 0, policy.context_length)
        policy.build()
        policy.requires_grad_(False).is_frozen = True
        self._policy = policy.eval()

    @torch.no_grad()
    def top_logprobs(
        self, tokens: Tensor, completion_mask: Tensor, top_k: int | None, temperature: float, vocabulary: int
    ) -> TopLogprobs:
        assert self._policy is not None, "start comes first"
        policy = self._policy
        self._check_length(tokens.shape[1], policy.context_length)
        with torch.autocast(tokens.device.type, enabled=False):  # its own data type, whatever the trainer's precision
            hidden = predicting_states(policy.model, tokens, completion_mask, policy.is_packed)
            parts = [
                TopLogprobs.of(logits(policy.model, part)[:, :vocabulary], top_k, temperature).tensors()
                for part in hidden.split(self.chunk_size)
            ]
        token_ids, logprobs, rest = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return TopLogprobs(token_ids=token_ids, logprobs=logprobs, rest=rest)

    def _check_length(self, length: int, context: int) -> None:
        if length > context:
            raise ValueError(
                f"a prompt with its completion has up to {length} tokens, but the teacher {self.name} can read only "
                f"{context}: lower data.sampling.max_tokens or data.max_prompt_tokens"
            )

    def wake(self, device: torch.device) -> None:
        assert self._policy is not None, "start comes first"
        self._policy.to(device)

    def sleep(self) -> None:
        if self.offload and self._policy is not None:
            self._policy.to("cpu")

    def close(self) -> None:
        self._policy = None
