"""Tokens of an observation: the difference that it makes to a rendered conversation."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, final

from transformers import PreTrainedTokenizerBase

from lgrpo.engines.special_text import HiddenText, special_tokens
from lgrpo.environments import Message, Observation
from lgrpo.run.chat_templates import read_chat_template, training_variant

_QUESTION = {"role": "user", "content": "What comes next?"}
_ANSWER = "lgrpo looks for the end of this answer"
_THOUGHT = "lgrpo looks for this thought"
"""Texts to render, whose place in the result shows what the template does."""
_NUM_TURNS = 3
"""Number of turns for which a template is checked."""


@final
class ObservationEncoder:
    """Turns observations into the tokens that follow a sampled turn. Sampled tokens are never rendered again.

    In a chat these are the tokens from the end of the assistant's message to the beginning of its next one, as the chat
    template renders them after any answer, or after any call if the observation is the result of a tool. In plain text
    they are the tokens of the text alone. Special tokens come from the template only: their text in an observation is
    encoded as text.
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
        hidden = HiddenText(self.tokenizer)
        if self.chat is None:
            if not isinstance(observation, str):
                raise ValueError("an observation is a list of messages, which needs a chat: set template.chat to true")
            return hidden.encode(hidden.hide(observation))
        text = self._after_answer(hidden.hide(as_messages(observation)))
        return hidden.encode(self._after_token(text, last_token))

    def check(self) -> None:
        """Raise an error if the chat template changes earlier turns when an observation follows, or does not show it.

        Warn if it changes only thoughts.
        """
        if self.chat is None:
            return
        try:
            drops_thoughts = self._drops_thoughts()
        except ValueError as error:
            raise ValueError(f"{error}. {self._advice()}") from error
        if drops_thoughts:
            warnings.warn(
                "the chat template drops the thoughts of earlier turns. Here they stay in the context, because sampled "
                f"tokens are never rendered again: use the model in the same way. {self._advice()}",
                stacklevel=2,
            )

    def _advice(self) -> str:
        """Return how to choose another chat template, by name if TRL has a variant for training that keeps turns."""
        advice = "Set policy.chat_template to the file of a template that shows and keeps all turns"
        chat = self.chat or {}
        name = training_variant(chat.get("chat_template", self.tokenizer.chat_template))
        if name is None:
            return advice
        variant = ObservationEncoder(self.tokenizer, {**chat, "chat_template": read_chat_template(name)})
        try:
            is_better = not variant._drops_thoughts()
        except ValueError:
            is_better = False
        return f"{advice}, or to {name}, TRL's variant of this template for training" if is_better else advice

    def _drops_thoughts(self) -> bool:
        """Return whether the template drops thoughts of earlier turns; raise an error if it changes or drops more."""
        role = "tool" if (self.chat or {}).get("tools") else "user"
        observation = [{"role": role, "content": "Go on.", "name": "tool"}]
        text = self._after_answer(observation)
        if "Go on." not in text:
            raise ValueError(f"the chat template does not show messages of the role {role} after an answer")
        answer = _answer() if self._after_call(observation) is None else _calls(observation)
        messages: list[Message] = [_QUESTION]
        kept = ""
        for turn in range(1, _NUM_TURNS + 1):
            before = self._render([*messages, answer], False)
            _check_prefix(turn - 1, kept, before)
            messages += [answer, *observation]
            kept = self._check_turn(turn, before, self._render(messages, True), text)
        thoughtful = {**answer, "content": f"<think>\n{_THOUGHT}\n</think>\n\n{answer['content']}"}
        if "tool_calls" in answer and _THOUGHT not in self._render([_QUESTION, thoughtful], False):
            return False  # it never shows text beside calls
        return _THOUGHT not in self._render([_QUESTION, thoughtful, *observation], True)

    def _check_turn(self, turn: int, before: str, after: str, observation: str) -> str:
        """Return a conversation up to the end of a turn; raise an error if it is rendered differently when it goes on.

        Args:
            turn: Number of the last turn.
            before: Conversation up to the answer of this turn.
            after: Conversation up to the next turn.
            observation: Text that is expected after the answer.
        """
        answered = before.rindex(_ANSWER) + len(_ANSWER)
        end = special_tokens(self.tokenizer).pattern.search(before, answered)
        kept = before[: answered if end is None else end.end()]
        _check_prefix(turn, kept, after)
        if not after.endswith(observation):
            found = after[after.rindex(_ANSWER) + len(_ANSWER) :]
            raise ValueError(
                f"the chat template renders the observation after turn {turn} as {found[:200]!r}, but after turn 1 as "
                f"{observation[:200]!r}"
            )
        return kept

    def _after_token(self, text: str, last_token: int) -> str:
        """Return what is left of the text after an answer if the answer has a part of it: the end of its turn."""
        token = self.tokenizer.decode([last_token])
        if special_tokens(self.tokenizer).pattern.fullmatch(token) and token in text:
            return text.partition(token)[2]
        return text.removeprefix(token)

    def _after_answer(self, messages: Sequence[Message]) -> str:
        """Return what the template renders after an answer if messages follow it and the model's next turn begins."""
        if (text := self._after_call(messages)) is not None:
            return text
        text = self._render([_QUESTION, _answer(), *messages], True)
        if _ANSWER not in text:
            _check_prefix(1, self._render([_QUESTION, _answer()], False), text)
            raise ValueError("the chat template does not show the text of an answer")
        return text[text.index(_ANSWER) + len(_ANSWER) :]

    def _after_call(self, messages: Sequence[Message]) -> str | None:
        """Return what the template renders after calls of tools if their results follow; None if it shows no calls.

        Calls stand for those that were sampled. The template closes a call with text that the sampled turn has already;
        what follows it is found by rendering the conversation with and without the results.
        """
        if not messages or messages[0]["role"] != "tool":
            return None
        head = [_QUESTION, _calls(messages)]
        try:
            texts = self._render(head, False), self._render([*head, *messages], True)
            ending = self._render([_QUESTION, _answer()], False).partition(_ANSWER)[2]
        except ValueError:
            return None
        closing, after = (text.rpartition(_ANSWER)[2] for text in texts)
        if not all(_ANSWER in text for text in texts) or not after.startswith(closing):
            return None
        if closing.endswith(ending):
            return after[len(closing) - len(ending) :]
        ends = [match.start() for match in special_tokens(self.tokenizer).pattern.finditer(closing)]
        return after[ends[-1] :] if ends else None

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


def replaced(observation: Observation, text: str) -> Observation:
    """Return an observation with a text in place of what it says, in messages of the same roles."""
    if isinstance(observation, str):
        return text
    return [{**message, "content": text} for message in observation]


def _check_prefix(turn: int, before: str, after: str) -> None:
    """Raise an error with the turn and the difference if a conversation does not begin as it was rendered before."""
    if after.startswith(before):
        return
    shared = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(after))
    tag = re.search(r"<[^<>\s]*\Z", before[:shared])  # show tags as a whole
    start = shared if tag is None else tag.start()
    changed = min(turn, before[:shared].count(_ANSWER) + 1)
    raise ValueError(
        f"the chat template renders turn {changed} differently when an observation follows: "
        f"{before[start : start + 60]!r} becomes {after[start : start + 60]!r}"
    )


def _answer() -> Message:
    return {"role": "assistant", "content": _ANSWER}


def _calls(messages: Sequence[Message]) -> Message:
    """Return an answer that calls the tools whose results the messages have; each call has ``_ANSWER``."""
    calls = [
        {
            "type": "function",
            "id": message.get("tool_call_id", f"call{index:05d}"),
            "function": {"name": message.get("name", "tool"), "arguments": {"text": _ANSWER}},
        }
        for index, message in enumerate(messages)
        if message["role"] == "tool"
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}
