"""A pseudo-random reward, so that the rewards of every group vary."""

from __future__ import annotations

from lgrpo.rewards import Reward
from lgrpo.types import Completion, Prompt


class Parity(Reward):
    """1 if the sum of the token ids is odd, else 0."""

    is_inline = True

    def score(self, prompt: Prompt, completion: Completion) -> float:
        return float(sum(completion.token_ids) % 2)
