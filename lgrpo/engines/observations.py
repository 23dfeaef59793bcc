"""Tokens of an observation: the difference that it makes to a rendered conversation."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, final

from transformers import PreTrainedTokenizerBase

from lgrpo.environments import Message, Observation

_QUESTION = {"role": "user", "content": "What comes next?"}
_ANSWER = "lgrpo looks for the end of this answer"
_THOUGHT = "lgrpo looks for this thought"
"""Texts to render, whose place in the result shows what the template does."""


@final
class ObservationEncoder:
    """Turns observations into the tokens that follow a sampled turn. Sampled tokens are never rendered again.

    In a chat these are the tokens from the end of the assistant's message to the beginning of its next one, as the chat
    template renders them after any answer. In plain text they are the tokens of the text alone.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat: Mapping[str, Any] | None) -> None:
        """
        Args:
            tokenizer: Tokenizer of the policy.
            chat: Further arguments of the chat template; None for plain text.
        """
        self.tokenizer = tokenizer
        self.chat = chat

    def __call__(self, observation: Observation, last_token: int) -> list[int]:
        """Return the tokens between a turn that ended with ``last_token`` and the next turn."""
        if self.chat is None:
            if not isinstance(observation, str):
                raise ValueError("an observation is a list of messages, which needs a chat: set template.chat to true")
            return self._encode(observation)
        text = self._after_answer(as_messages(observation))
        return self._encode(text.removeprefix(self.tokenizer.decode([last_token])))

    def check(self) -> None:
        """Raise an error if the chat template changes an answer when an observation follows, or does not show it.

        Warn if it changes only thoughts.
        """
        if self.chat is None:
            return
        role = "tool" if self.chat.get("tools") else "user"
        observation = [{"role": role, "content": "Go on.", "name": "tool"}]
        if "Go on." not in self._after_answer(observation):
            raise ValueError(f"the chat template does not show messages of the role {role} after an answer")
        answered = [_QUESTION, {"role": "assistant", "content": f"<think>\n{_THOUGHT}\n</think>\n\n{_ANSWER}"}]
        if _THOUGHT not in self._render([*answered, *observation], True):
            warnings.warn(
                "the chat template drops the thoughts of earlier turns. Here they stay in the context, because sampled "
                "tokens are never rendered again: render the conversation in the same way when you use the model",
                stacklevel=2,
            )

    def _encode(self, text: str) -> list[int]:
        token_ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return token_ids

    def _after_answer(self, messages: Sequence[Message]) -> str:
        """Return what the template renders after an answer if messages follow it and the model's next turn begins."""
        head = [_QUESTION, {"role": "assistant", "content": _ANSWER}]
        text = self._render([*head, *messages], True)
        if _ANSWER not in text:
            before = self._render(head, False)
            shared = next((i for i, (a, b) in enumerate(zip(before, text, strict=False)) if a != b), 0)
            raise ValueError(
                "the chat template renders the assistant's turn differently when an observation follows: "
                f"{before[shared : shared + 60]!r} becomes {text[shared : shared + 60]!r}"
            )
        return text[text.index(_ANSWER) + len(_ANSWER) :]

    def _render(self, messages: Sequence[Message], starts_turn: bool) -> str:
        try:
            text: str = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=starts_turn,
                **(self.chat or {}),
            )
        except Exception as error:  # templates raise errors of their own
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(f"the chat template cannot render messages of {roles}: {error}") from error
        return text


def as_messages(observation: Observation) -> Sequence[Message]:
    """Return an observation as messages; a text is the message of a user."""
    return [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
