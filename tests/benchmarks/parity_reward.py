"""A reward as good as random, so that every group varies."""

from __future__ import annotations

from lgrpo.rewards import Reward
from lgrpo.types import Completion, Prompt


class Parity(Reward):
    """1 where the sum of the token ids is odd."""

    is_inline = True

    def score(self, prompt: Prompt, completion: Completion) -> float:
        return float(sum(completion.token_ids) % 2)
