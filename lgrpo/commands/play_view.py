"""Text of an episode for ``lgrpo play``."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, TextIO, final

from transformers import PreTrainedTokenizerBase

from lgrpo.engines.observations import ObservationEncoder
from lgrpo.environments import Observation, ToolEnvironment, Turn, TurnError
from lgrpo.types import Completion, Prompt

_COLOURS = {"sampled": "32", "observed": "36", "prompt": "2", "heading": "1", "error": "31"}
_WIDTH = 10


@final
class EpisodeView:
    """Prints an episode turn by turn: what was sampled, what the environment answered, and what it was worth.

    ``begin`` shows the prompt. For each turn ``observe`` shows the tokens that were added to the context since the
    turn before, ``sample`` the tokens of the turn, ``called`` its tool calls, and ``answered`` its reward. ``end``
    shows the sums.
    """

    def __init__(self, out: TextIO, lists_tokens: bool = False) -> None:
        """
        Args:
            out: Stream to print to; colours are used if it is a terminal and ``NO_COLOR`` is not set.
            lists_tokens: List each token on a line of its own.
        """
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self.tools: ToolEnvironment | None = None
        self._out = out
        self._lists_tokens = lists_tokens
        self._has_colours = out.isatty() and not os.environ.get("NO_COLOR")
        self._context: list[int] = []
        self._chat: Mapping[str, Any] | None = None
        self._observation: Observation = ""
        self._num_turns = 0

    def begin(self, prompt: Prompt, heading: str) -> None:
        self._context, self._chat = list(prompt.token_ids), prompt.chat
        self._print(self._coloured(heading, "heading"))
        self._block("prompt", prompt.text, f"{len(prompt.token_ids)} tokens")

    def observe(self, context: Sequence[int]) -> None:
        """Show what follows the last turn in the context of the next one, and begin that turn."""
        known, new = self._context, list(context)
        is_longer = new[: len(known)] == known
        if added := new[len(known) :] if is_longer else self._encoded_observation():
            self._context = new[: len(new) - len(added)]
            self._tokens("observed", added, None, "not trained on")
        if not is_longer:
            shorter = len(known) + len(added) - len(new)
            self._line("dropped", f"earlier observations; the context is {shorter} tokens shorter")
        self._context = new
        self._num_turns += 1
        self._print(self._coloured(f"turn {self._num_turns}", "heading"))

    def sample(self, completion: Completion) -> None:
        """Show the tokens of a turn."""
        known = [value for value in completion.logprobs if not math.isnan(value)]
        details = f"log-probability {sum(known):.2f}" if known else ""
        if completion.finish_reason == "length":
            details += ", cut at the limit"
        self._tokens("sampled", completion.token_ids, completion.logprobs, details.removeprefix(", "))
        self._context += completion.token_ids

    def called(self, text: str) -> None:
        """Show the tool calls in the text of a turn as the environment receives it. Called by a thread of it."""
        for call in [] if self.tools is None else self.tools.calls(text):
            self._line("call", shown_call(call))

    def answered(self, turn: Turn) -> None:
        """Show the reward and the errors of a turn. Called by a thread of the environment."""
        self._observation = turn.observation
        for error in turn.errors:
            self._line("error", f"{error.kind}: {error.text}")
        self._line("reward", f"{turn.reward:g}" + (", the episode is over" if turn.done else ""))

    def end(self, completion: Completion, score: object) -> None:
        sampled = completion.num_sampled
        observed = len(completion.token_ids) - sampled - sum(one.stop - one.middle for one in completion.dropped)
        self._print(self._coloured("episode", "heading"))
        if completion.failure is not None:
            self._line("error", f"the environment failed ({completion.failure[0]}): {completion.failure[1]}")
        reason = "ended by a limit" if completion.finish_reason == "length" else "ended by itself"
        self._line("turns", f"{len(completion.turns)}, {reason}")
        self._line("tokens", f"{sampled} sampled, {observed} observed")
        if count := len(completion.dropped):
            self._line("dropped", f"{count} observation{'s' * (count > 1)}, which later turns did not see")
        rewards = completion.turn_rewards or ()
        self._line("rewards", " + ".join(f"{reward:g}" for reward in rewards) + f" = {sum(rewards):g}")
        self._line("task", f"reward {score:g}" if isinstance(score, float) else f"reward {score}")

    def note(self, text: str) -> None:
        """Print a remark on a line of its own."""
        self._print(("\n" if self._out.isatty() else "") + text)

    def _encoded_observation(self) -> list[int]:
        """Return the tokens of the newest observation, which follow the last turn."""
        assert self.tokenizer is not None
        return ObservationEncoder(self.tokenizer, self._chat)(self._observation, self._context[-1])

    def _tokens(self, kind: str, token_ids: Sequence[int], logprobs: Sequence[float] | None, details: str) -> None:
        assert self.tokenizer is not None
        count = f"{len(token_ids)} token{'s' if len(token_ids) != 1 else ''}"
        self._block(kind, self.tokenizer.decode(token_ids), ", ".join(part for part in (count, details) if part))
        if not self._lists_tokens:
            return
        for offset, token_id in enumerate(token_ids):
            value = float("nan") if logprobs is None else logprobs[offset]
            shown = "" if math.isnan(value) else f"{value:8.3f}"
            token = repr(self.tokenizer.decode([token_id]))
            line = f"{'':{_WIDTH}}{len(self._context) + offset:>6} {token_id:>7}  {kind:<9}{shown:>8}  {token}"
            self._print(self._coloured(line.rstrip(), kind))

    def _block(self, kind: str, text: str, details: str) -> None:
        """Print a text with its kind before it, its further lines indented."""
        lines = printable(text).split("\n")
        self._print(f"{kind:<{_WIDTH}}" + f"\n{'':{_WIDTH}}".join(self._coloured(line, kind) for line in lines))
        self._print(f"{'':{_WIDTH}}({details})")

    def _line(self, name: str, text: str) -> None:
        text = printable(text).replace("\n", " ")
        self._print(f"{name:<{_WIDTH}}" + (self._coloured(text, "error") if name == "error" else text))

    def _coloured(self, text: str, kind: str) -> str:
        return f"\x1b[{_COLOURS[kind]}m{text}\x1b[0m" if self._has_colours else text

    def _print(self, text: str) -> None:
        print(text, file=self._out, flush=True)


def shown_call(call: Any) -> str:
    """Return a call of a tool as Python would write it."""
    if isinstance(call, TurnError):
        return f"unreadable ({call.text})"
    arguments = [repr(value) for value in call.positional] + [f"{k}={v!r}" for k, v in call.arguments.items()]
    return f"{call.name}({', '.join(arguments)})"


def printable(text: str) -> str:
    r"""Return a text with control characters other than line breaks written as escapes.

    >>> printable("a\x1b[31m\tb\nc")
    'a\\x1b[31m\\tb\nc'
    """
    return "".join(c if c == "\n" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)
