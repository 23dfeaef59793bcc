"""A judge in the trainer's process."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal, NamedTuple, final

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lgrpo.checks import check_count
from lgrpo.engines.completions import Sampling
from lgrpo.engines.special_text import HiddenText
from lgrpo.engines.transformers import TransformersEngine
from lgrpo.rewards.judge import Answer, JudgeEngine, JudgeError, Messages
from lgrpo.types import Prompt
from lgrpo.weights import PolicyWeights


class _Loaded(NamedTuple):
    """The model, in memory."""

    engine: TransformersEngine
    tokenizer: PreTrainedTokenizerBase
    context_length: int
    name: str


@final
class JudgeModel(JudgeEngine):
    """A frozen language model that judges in the trainer's process; the questions about a group are one batch.

    For small judges and for machines without a server: the embedded engine samples it, while others wait. A vLLM server
    is faster. Every process has a whole copy, which is loaded when the first group is scored, and stays in memory.
    """

    def __init__(
        self,
        name: str,
        dtype: Literal["float32", "bfloat16"] = "bfloat16",
        device: str | None = None,
        max_sequences: int = 64,
        chat_template: str | None = None,
        chat_options: dict[str, Any] | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        """
        Args:
            name: Hub name or folder of a model with a chat template.
            dtype: Data type of the weights.
            device: Device of the weights, such as ``cuda:1``; by default the GPU of this process, or the CPU if there
                is none.
            max_sequences: Upper limit of answers that are sampled at a time.
            chat_template: Chat template instead of the tokenizer's: a file.
            chat_options: Further arguments of the chat template, such as ``enable_thinking: false``.
            trust_remote_code: Allow the model's repository to run its code on this machine.
        """
        from lgrpo.policy import CausalPolicy  # not above: processes of engines would import Lightning, too

        check_count("JudgeModel's max_sequences", max_sequences, at_least=1)
        self.source = name
        self.device = device
        self.max_sequences = max_sequences
        self.chat_options = chat_options or {}
        self._policy = CausalPolicy(  # which checks its arguments, and loads nothing yet
            name, dtype=dtype, attention="sdpa", chat_template=chat_template, trust_remote_code=trust_remote_code
        )
        self._lock = threading.RLock()
        self._model: _Loaded | None = None

    @property
    def name(self) -> str:
        return self._loaded().name

    def answers(
        self, questions: Sequence[Messages], num_answers: int, temperature: float, max_tokens: int
    ) -> list[list[Answer] | JudgeError]:
        with self._lock:
            model = self._loaded()
            token_ids = [self._token_ids(messages, model.tokenizer) for messages in questions]
            longest = model.context_length - max_tokens
            prompts = [
                Prompt(token_ids=own, text="", row={}, position=_position(messages))
                for messages, own in zip(questions, token_ids, strict=True)
                if len(own) <= longest
            ]
            sampled = iter(self._sample(model, prompts, num_answers, temperature, max_tokens) if prompts else [])
        return [
            next(sampled)
            if len(own) <= longest
            else JudgeError(
                f"a question has {len(own)} tokens, but the judge {self.source} can read only {model.context_length}, "
                f"{max_tokens} of them for the answer (max_tokens)"
            )
            for own in token_ids
        ]

    def close(self) -> None:
        model, self._model = self._model, None
        if model is not None:
            model.engine.close()  # without the lock, so that it interrupts a generation in another thread

    def _sample(
        self, model: _Loaded, prompts: list[Prompt], num_answers: int, temperature: float, max_tokens: int
    ) -> list[list[Answer]]:
        likeliest = Sampling(top_k=1, max_tokens=max_tokens)
        sampling = Sampling(temperature=temperature, max_tokens=max_tokens) if temperature > 0 else likeliest
        with self._current_device():
            groups = model.engine.generate(prompts, num_answers, sampling, 0, model.tokenizer)
        return [[Answer(answer.text, answer.finish_reason == "stop") for answer in group] for group in groups]

    def _token_ids(self, messages: Messages, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Return the tokens of a conversation; text of special tokens in a message stays text."""
        hidden = HiddenText(tokenizer)
        text = tokenizer.apply_chat_template(
            hidden.hide(messages), tokenize=False, add_generation_prompt=True, **self.chat_options
        )
        return hidden.encode(text)

    def _loaded(self) -> _Loaded:
        """Return the model; load it at the first call."""
        with self._lock:
            if self._model is None:
                self._model = self._load()
            return self._model

    def _load(self) -> _Loaded:
        policy, device = self._policy, self._device()
        if policy.tokenizer.chat_template is None:
            raise ValueError(
                f"the judge {self.source} has no chat template: choose an instruction-tuned model, or set chat_template"
            )
        policy.build()

        def tensors() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in policy.weights():
                yield name, tensor.to(device)

        engine = TransformersEngine(max_sequences=self.max_sequences)
        with self._current_device():
            record = engine.load_weights(PolicyWeights(config=policy.model.config, tensors=tensors), step=0)
        del policy.model  # the engine has its own copy
        name = f"{Path(self.source).name if os.path.isdir(self.source) else self.source}@{record.checksum[:12]}"
        return _Loaded(engine, policy.tokenizer, policy.context_length, name)

    def _current_device(self) -> AbstractContextManager[object]:
        """Make the device the current one of this thread, which begins with the first one."""
        device = torch.device(self._device())
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    def _device(self) -> str:
        if self.device is not None:
            return self.device
        number = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % number}" if number else "cpu"


def _position(messages: Messages) -> int:
    """Return a number that depends on a conversation only, for the random stream of its answers."""
    return int(hashlib.sha256(json.dumps(messages).encode()).hexdigest()[:12], 16)
