"""Base class of teachers."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lgrpo.functional import TopLogprobs


class Teacher(ABC):
    """A policy whose distribution over the next token is known at every token of a completion."""

    @abstractmethod
    def start(
        self, tokenizer: PreTrainedTokenizerBase, top_k: int | None, temperature: float, longest: int | None = None
    ) -> None:
        """Load what is needed, and raise an error if the teacher cannot teach a policy with this tokenizer.

        Args:
            tokenizer: The policy's tokenizer.
            top_k: Number of tokens that will be asked for at each position; None for all.
            temperature: Temperature of the distribution.
            longest: Largest number of tokens in a prompt and its completion; None if unknown.
        """

    @abstractmethod
    def top_logprobs(
        self, tokens: Tensor, completion_mask: Tensor, top_k: int | None, temperature: float, vocabulary: int
    ) -> TopLogprobs:
        """Return the most likely tokens at each of the N tokens of ``completion_mask`` [B, T], row after row.

        Args:
            tokens: [B, T]: a prompt, its completion, then padding.
            completion_mask: [B, T]: tokens whose alternatives are needed.
            top_k: Number of tokens; None for all.
            temperature: Temperature of the distribution.
            vocabulary: Number of the policy's logits. Tokens from this number on do not exist for it.
        """

    def wake(self, device: torch.device) -> None:  # noqa: B027
        """Prepare for calls of ``top_logprobs`` with tensors on a device."""

    def sleep(self) -> None:  # noqa: B027
        """Release memory until the next ``wake``."""

    def close(self) -> None:  # noqa: B027
        """Release everything that ``start`` loaded."""
