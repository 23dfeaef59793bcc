"""Distributions of a teacher at the tokens of a rollout."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from lgrpo.checks import check_count, check_range
from lgrpo.functional import Direction, TeacherDivergence, TopLogprobs
from lgrpo.policy import CausalPolicy
from lgrpo.policy.sequences import sequences
from lgrpo.tasks.template import Template
from lgrpo.teachers.base import Teacher
from lgrpo.types import Prompt, RolloutBatch


@final
class Distillation:
    """A teacher, the divergence from it, and its distributions at the tokens of the current rollout."""

    def __init__(
        self,
        teacher: Teacher,
        direction: Direction,
        top_k: int | None,
        temperature: float | None,
        teacher_template: Template | None,
    ) -> None:
        check_count("TeacherKL's top_k", top_k, at_least=1)
        check_range("TeacherKL's temperature", temperature, above=0, below=math.inf)
        self.teacher = teacher
        self.direction: Direction = direction
        self.top_k = top_k
        self.temperature = temperature
        self.teacher_template = teacher_template
        self._known: dict[tuple[int, ...], TopLogprobs] = {}

    def start(self, policy: CausalPolicy, sampling_temperature: float, longest: int) -> None:
        """Load the teacher, and check that it can teach this policy.

        Args:
            policy: The policy that is trained.
            sampling_temperature: Temperature of sampling, the default one.
            longest: Largest number of tokens in a prompt and its completion.
        """
        self._known = {}
        temperature = self.temperature or sampling_temperature
        has_own_prompts = self.teacher_template is not None
        self.teacher.start(policy.tokenizer, self.top_k, temperature, None if has_own_prompts else longest)

    def divergence(
        self,
        batch: RolloutBatch,
        micro_batches: Sequence[RolloutBatch],
        policy: CausalPolicy,
        prompt_at: Callable[[int], Prompt],
    ) -> TeacherDivergence:
        """Return the divergence at the sampled tokens of a micro-batch.

        Args:
            batch: Micro-batch.
            micro_batches: All micro-batches of its optimizer step, which the teacher reads together.
            policy: The policy that is trained.
            prompt_at: Function that returns the prompt at a position of the run.
        """
        temperature = self.temperature or batch.temperature
        device = batch.tokens.device
        if _key(batch) not in self._known:
            self._known = {key: top for key, top in self._known.items() if key[0] == batch.rollout}
            self.teacher.wake(device)
            for part in (batch, *micro_batches):
                if _key(part) not in self._known:
                    tokens, mask = self._rows(part, policy.tokenizer, prompt_at)
                    self._known[_key(part)] = self.teacher.top_logprobs(
                        tokens.to(device), mask.to(device), self.top_k, temperature, policy.num_logits
                    )
            self.teacher.sleep()
        teacher = self._known[_key(batch)].to(device)
        return TeacherDivergence(teacher=teacher, direction=self.direction, temperature=temperature)

    def _rows(
        self, batch: RolloutBatch, tokenizer: PreTrainedTokenizerBase, prompt_at: Callable[[int], Prompt]
    ) -> tuple[Tensor, Tensor]:
        """Return the tokens that the teacher reads, with prompts of its own if it has a template, and their mask."""
        read = sequences(batch)
        if self.teacher_template is None:
            return read.tokens, read.sampled
        rows, masks = [], []
        for tokens, sampled, row in zip(read.tokens.cpu(), read.sampled.cpu(), read.rows.tolist(), strict=True):
            position, start = int(batch.positions[row]), batch.columns(row).start
            prompt = prompt_at(position)
            if start and tokens[:start].tolist() != prompt.token_ids:
                raise ValueError(
                    "teacher_template needs the rows of the task, but this completion answers another prompt than "
                    f"the one at position {position}: it cannot be used with recorded rollouts of another run"
                )
            own = _token_ids(self.teacher_template, prompt, tokenizer)
            completion = slice(start, int(sampled.nonzero().max()) + 1 if start else 0)
            rows.append(torch.cat([torch.tensor(own), tokens[completion]]))
            masks.append(torch.cat([torch.zeros(len(own), dtype=torch.bool), sampled[completion]]))
        return pad_sequence(rows, batch_first=True), pad_sequence(masks, batch_first=True)

    def close(self) -> None:
        """Release the teacher."""
        self._known = {}
        self.teacher.close()


def _token_ids(template: Template, prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the teacher's prompt for a row."""
    if missing := sorted(template.fields() - set(prompt.row)):
        raise ValueError(f"teacher_template reads {missing}, but the rows have only {sorted(prompt.row)}")
    _, token_ids = template.render(prompt.row, tokenizer)
    assert token_ids is not None, "there is no limit of characters"
    return token_ids


def _key(batch: RolloutBatch) -> tuple[int, ...]:
    return (batch.rollout, *batch.rows.tolist())
