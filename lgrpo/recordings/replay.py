"""An engine that returns recorded completions, alone or mixed with sampled ones."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from typing import Any, Literal, final

from transformers import PreTrainedTokenizerBase

from lgrpo.checks import check_count, check_range
from lgrpo.engines.base import BORROWED, RolloutEngine
from lgrpo.engines.completions import Generation, Sampling
from lgrpo.engines.recovery import EngineError
from lgrpo.engines.transformers import TransformersEngine
from lgrpo.engines.wrapper import WrapperEngine
from lgrpo.recordings.priority import draw, recent_groups, recorded_priorities
from lgrpo.recordings.recording import RecordedGroup, Recording
from lgrpo.recordings.tokens import check_completion_lengths, check_sampling, max_contexts, tokenised
from lgrpo.types import Completion, Prompt
from lgrpo.weights import PolicyWeights


@final
class ReplayEngine(WrapperEngine):
    """Returns recorded completions for prompts; an inner engine samples the rest, and everything for validation.

    The seed and a prompt's position decide whether its group is recorded, and which recorded group is used. If the
    recording has the same prompt at the same position, that group is used, so a run replayed with its settings is
    repeated exactly. Otherwise one of the prompt's groups is drawn. ``prepare`` reads the recording; weights, state and
    faults are those of the inner engine.
    """

    replays = True

    def __init__(
        self,
        path: str | list[str],
        engine: RolloutEngine | None = None,
        share: float = 1.0,
        siblings: int | None = None,
        rewards: Literal["recorded", "task"] = "recorded",
        missing: Literal["error", "sample"] = "error",
        priority: float = 0.0,
        max_age: int | None = None,
    ) -> None:
        """
        Args:
            path: Folder written by ``RolloutRecorder``, .parquet, .jsonl or .json file, or a list of them.
            engine: Engine that samples what is not recorded, and for validation; by default the embedded one.
            share: Share of a rollout's groups that are recorded, from 0 to 1, spread evenly over the run's positions.
            siblings: Number of recorded completions at the end of such a group, the others being sampled; by default
                all.
            rewards: Source of the rewards of recorded completions: the recording, or the task.
            missing: Treatment of a prompt with too few recorded completions.
            priority: Power of the absolute recorded advantage that a completion's chance to be drawn, among all of its
                prompt, is proportional to. At 0 whole groups are drawn, all with the same chance.
            max_age: Largest age of a recorded completion that is used, in rollouts before the last recorded one; by
                default any.
        """
        super().__init__(TransformersEngine() if engine is None else engine)
        check_range("data.engine.share", share, at_least=0, at_most=1)
        check_count("data.engine.siblings", siblings, at_least=1)
        check_range("data.engine.priority", priority, at_least=0, at_most=50, reason="it is an exponent")
        check_count("data.engine.max_age", max_age, at_least=0)
        self.path = path
        if self.engine.replays:
            raise ValueError("a ReplayEngine cannot contain another one: pass a list of paths instead")
        self.share = share
        self.siblings = siblings
        self.rewards: Literal["recorded", "task"] = rewards
        self.missing: Literal["error", "sample"] = missing
        self.priority = priority
        self.max_age = max_age
        self._recording: Recording | None = None
        self._by_prompt: dict[str, list[RecordedGroup]] = {}
        self._priorities: list[float] = []
        self._num_without_logprobs = 0

    # The recording

    def prepare(
        self, tokenizer: PreTrainedTokenizerBase, prompts: Iterable[Prompt], group_size: int, sampling: Sampling
    ) -> None:
        num_recorded = group_size if self.siblings is None else self.siblings
        if num_recorded > group_size:
            raise ValueError(f"data.engine.siblings is {num_recorded}, but data.group_size is only {group_size}")
        recording = Recording.read(self.path)
        recording.check_tokenizer(tokenizer)
        check_sampling(recording, sampling)
        recording.table = tokenised(recording, tokenizer, sampling.max_tokens)
        check_completion_lengths(recording, sampling.max_tokens)
        self.max_contexts = max(self.engine.max_contexts, max_contexts(recording))
        groups = recent_groups(recording, self.max_age)
        used = [row for group in groups for row in group.rows]
        if self.rewards == "recorded" and (unscored := recording.table["reward"].take(used).null_count):
            raise ValueError(
                f"{unscored} of {len(used)} recorded completions in {recording.name} have no reward: add "
                "them (lgrpo score FILE --config …), or have the task score them here (data.engine.rewards: task)"
            )
        self._num_without_logprobs = recording.table["logprobs"].take(used).null_count
        self._priorities = recorded_priorities(recording, used) if self.priority else []
        self._by_prompt = {}
        for group in groups:
            self._by_prompt.setdefault(group.prompt, []).append(group)
        self._recording = recording
        prompts = list(prompts)
        self._check_prompts(prompts, num_recorded)
        self.engine.prepare(tokenizer, prompts, group_size, sampling)

    @property
    def num_without_logprobs(self) -> int:
        return self._num_without_logprobs

    def _check_prompts(self, prompts: Iterable[Prompt], num_required: int) -> None:
        """Raise an error before the run if one of its prompts has too few recorded completions."""
        if self.missing == "sample":
            return
        total, lacking = 0, []
        for prompt in prompts:
            total += 1
            if self._is_due(prompt) and self._num_available(prompt) < num_required:
                lacking.append(prompt)
        if lacking:
            raise ValueError(self._too_few(lacking[0], num_required, f"{len(lacking)} of {total} prompts, such as"))

    def _num_available(self, prompt: Prompt) -> int:
        return sum(len(group.rows) for group in self._by_prompt.get(prompt.text, []))

    def _too_few(self, prompt: Prompt, num_required: int, subject: str) -> str:
        return (
            f"{self._loaded.name} has fewer than {num_required} completions of {subject} {prompt.text[:60]!r} (with "
            f"{self._num_available(prompt)}). Train on the recorded prompts (data.task: "
            "lgrpo.recordings.RecordedPrompts, which can leave out those with few), use fewer recorded siblings "
            "(data.group_size, data.engine.siblings), or sample what is missing (data.engine.missing: sample)"
            + ("" if self.max_age is None else f"; older ones than data.engine.max_age ({self.max_age}) do not count")
        )

    @property
    def _loaded(self) -> Recording:
        if self._recording is None:
            raise EngineError("the recording is not read yet: call prepare first")
        return self._recording

    def _is_due(self, prompt: Prompt) -> bool:
        """Return whether ``share`` assigns a recorded group to this position: n · share of every n, rounded."""
        return math.floor((prompt.position + 1) * self.share) > math.floor(prompt.position * self.share)

    def _is_recorded(self, prompt: Prompt, num_required: int) -> bool:
        """Return whether the group at a position comes from the recording."""
        if not self._is_due(prompt):
            return False
        if self._num_available(prompt) >= num_required:
            return True
        if self.missing == "sample":
            return False
        raise EngineError(self._too_few(prompt, num_required, "the prompt"))

    def _choose_rows(self, prompt: Prompt, num_required: int, seed: int) -> list[int]:
        """Return rows of one recorded group if one is large enough, otherwise, or by priority, of all groups."""
        generator = random.Random(f"{seed} {prompt.position}")
        groups = self._by_prompt[prompt.text]
        if self.priority:
            rows = [row for group in groups for row in group.rows]
            return sorted(draw(rows, [self._priorities[row] ** self.priority for row in rows], num_required, generator))
        large = [group for group in groups if len(group.rows) >= num_required]
        same = [group for group in large if group.position == prompt.position]
        rows = generator.choice(same or large).rows if large else [row for group in groups for row in group.rows]
        return rows if len(rows) == num_required else sorted(generator.sample(rows, num_required))

    def _completions(self, prompt: Prompt, rows: list[int]) -> list[Completion]:
        for token_ids in self._loaded.table["prompt_token_ids"].take(rows).to_pylist():
            if token_ids not in (None, prompt.token_ids):
                raise EngineError(
                    f"prompt {prompt.text[:60]!r} was recorded as {len(token_ids)} tokens and has "
                    f"{len(prompt.token_ids)} here: the task renders it differently"
                )
        return self._loaded.completions(rows, self.rewards)

    def sample(self, generation: Generation) -> None:
        if generation.version == BORROWED:  # a validation samples from the policy only
            return self.engine.sample(generation)
        prompts, num_samples, seed = generation.prompts, generation.num_samples, generation.seed
        num_recorded = num_samples if self.siblings is None else self.siblings
        recorded = {
            index: self._completions(prompt, self._choose_rows(prompt, num_recorded, seed))
            for index, prompt in enumerate(prompts)
            if self._is_recorded(prompt, num_recorded)
        }

        def complete(index: int, sampled: list[Completion]) -> None:
            generation.keep(index, [*sampled, *recorded.get(index, [])])

        counts = {index: num_samples - len(recorded.get(index, [])) for index in range(len(prompts))}
        for index in (index for index, count in counts.items() if count == 0):
            complete(index, [])
        for count in sorted(set(counts.values()) - {0}):  # one call of the inner engine for each number of samples
            indices = [index for index in counts if counts[index] == count]
            self.engine.generate(
                [prompts[index] for index in indices],
                count,
                generation.sampling,
                seed,
                generation.tokenizer,
                lambda i, sampled, indices=indices: complete(indices[i], sampled),  # type: ignore[misc]
            )

    def state_dict(self) -> dict[str, Any]:
        recording = None if self._recording is None else self._recording.fingerprint
        return self.engine.state_dict() | {"recording": recording}

    def load_state_dict(self, state: dict[str, Any], policy: PolicyWeights | None = None) -> None:
        recorded = state.get("recording")
        if recorded is not None and recorded != self._loaded.fingerprint:
            raise ValueError(
                f"the recorded completions in {self._loaded.name} are not those this run started with: it would "
                "continue as another run. Use the same files, or start a new run"
            )
        self.engine.load_state_dict(state, policy)
