"""Recorded completions in the place of sampled ones, or among them."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, final

from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from lgrpo.engines.base import BORROWED, EngineError, OnGroup, RolloutEngine, Sampling
from lgrpo.engines.ledger import Sent, SyncRecord
from lgrpo.engines.transformers import TransformersEngine
from lgrpo.rewards import FailedScore
from lgrpo.types import RECORDED, Completion, PolicyWeights, Prompt

if TYPE_CHECKING:  # vLLM's servers import this room, and need no tasks
    from lgrpo.tasks.recording import RecordedGroup, Recording


@final
class ReplayEngine(RolloutEngine):
    """Answers prompts with what was recorded for them; another engine samples the rest, and for validation.

    Whether a position of the run is answered from the recording, and with which group, follows from the seed and the
    position alone. Where the recording has the same prompt at the same position, that very group is taken: a run
    replayed with its own settings sees what it saw. Elsewhere one of the prompt's groups is drawn.
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
    ) -> None:
        """
        Args:
            path: A folder that ``RolloutRecorder`` wrote, a .parquet, .jsonl or .json file, or several of them.
            engine: Samples what is not recorded, and for validation; by default the embedded one.
            share: Of a rollout's groups that are recorded, from 0 to 1, spread evenly over the positions of the run.
            siblings: How many completions of such a group are recorded, at its end; the others are sampled. By default
                all.
            rewards: Recorded completions keep the reward they were recorded with, or the task scores them again.
            missing: What becomes of a prompt with too few recorded completions where one is to be recorded.
        """
        super().__init__()
        if not 0 <= share <= 1:
            raise ValueError(f"the engine's share is {share}; it is a share of a rollout's groups, from 0 to 1")
        if siblings is not None and siblings < 1:
            raise ValueError(f"the engine's siblings is {siblings}; at least 1 completion of a recorded group is")
        self.path = path
        self.engine: RolloutEngine = TransformersEngine() if engine is None else engine
        if self.engine.replays:
            raise ValueError("a ReplayEngine inside another one: give path a list instead")
        self.can_overlap = self.engine.can_overlap
        self.share = share
        self.siblings = siblings
        self.rewards: Literal["recorded", "task"] = rewards
        self.missing: Literal["error", "sample"] = missing
        self._recording: Recording | None = None
        self._by_prompt: dict[str, list[RecordedGroup]] = {}
        self._num_without_logprobs = 0

    # What is recorded

    def prepare(
        self, tokenizer: PreTrainedTokenizerBase, prompts: Iterable[Prompt], group_size: int, sampling: Sampling
    ) -> None:
        from lgrpo.engines.recorded import check_lengths, check_sampling, tokenised
        from lgrpo.tasks.recording import Recording

        wanted = group_size if self.siblings is None else self.siblings
        if wanted > group_size:
            raise ValueError(f"the engine's siblings is {wanted}, but data.group_size is only {group_size}")
        recording = Recording.read(self.path)
        recording.check_tokenizer(tokenizer)
        check_sampling(recording, sampling)
        recording.table = tokenised(recording, tokenizer)
        check_lengths(recording, sampling.max_tokens)
        if self.rewards == "recorded" and (unscored := recording.table["reward"].null_count):
            raise ValueError(
                f"{unscored} of {len(recording.table)} recorded completions in {recording.name} have no reward: add "
                "them (lgrpo score FILE --config …), or have the task score them here (data.engine.rewards: task)"
            )
        self._num_without_logprobs = recording.table["logprobs"].null_count
        self._by_prompt = {}
        for group in recording.groups:
            self._by_prompt.setdefault(group.prompt, []).append(group)
        self._recording = recording
        self._check_prompts(prompts, wanted)

    @property
    def num_without_logprobs(self) -> int:
        return self._num_without_logprobs

    def _check_prompts(self, prompts: Iterable[Prompt], wanted: int) -> None:
        """Refuses before the run what it would meet in it."""
        if self.missing == "sample":
            return
        total, lacking = 0, []
        for prompt in prompts:
            total += 1
            if self._is_due(prompt) and self._num_recorded(prompt) < wanted:
                lacking.append(prompt)
        if lacking:
            raise ValueError(self._too_few(lacking[0], wanted, f"{len(lacking)} of {total} prompts, such as"))

    def _num_recorded(self, prompt: Prompt) -> int:
        return sum(len(group.rows) for group in self._by_prompt.get(prompt.text, []))

    def _too_few(self, prompt: Prompt, wanted: int, which: str) -> str:
        return (
            f"{which} {prompt.text[:60]!r}, have fewer than {wanted} recorded completions in {self._recorded.name} "
            f"(this one {self._num_recorded(prompt)}). Train on the recorded prompts (data.task: "
            "lgrpo.tasks.RecordedPrompts, which can leave out those with few), have fewer siblings recorded "
            "(data.group_size, data.engine.siblings), or sample what is missing (data.engine.missing: sample)"
        )

    @property
    def _recorded(self) -> Recording:
        if self._recording is None:
            raise EngineError("the recording is not read yet: prepare comes first")
        return self._recording

    def _is_due(self, prompt: Prompt) -> bool:
        """Whether the share puts a recorded group at this position: of n in a row, n · share rounded up or down."""
        return math.floor((prompt.position + 1) * self.share) > math.floor(prompt.position * self.share)

    def _is_recorded(self, prompt: Prompt, wanted: int) -> bool:
        """Whether the group at a position comes from the recording."""
        if not self._is_due(prompt):
            return False
        if self._num_recorded(prompt) >= wanted:
            return True
        if self.missing == "sample":
            return False
        raise EngineError(self._too_few(prompt, wanted, "the prompt"))

    def _chosen(self, prompt: Prompt, wanted: int, seed: int) -> list[int]:
        """Rows of the recording: a whole group of it where one is large enough, else out of all of the prompt's."""
        chance = random.Random(f"{seed} {prompt.position}")
        groups = self._by_prompt[prompt.text]
        whole = [group.rows for group in groups if len(group.rows) >= wanted]
        same = [group.rows for group in groups if group.position == prompt.position and len(group.rows) >= wanted]
        rows = chance.choice(same or whole) if whole else [row for group in groups for row in group.rows]
        return rows if len(rows) == wanted else sorted(chance.sample(rows, wanted))

    def _completions(self, prompt: Prompt, rows: list[int]) -> list[Completion]:
        found = []
        for one in self._recorded.table.take(rows).to_pylist():
            if one["prompt_token_ids"] not in (None, prompt.token_ids):
                raise EngineError(
                    f"prompt {prompt.text[:60]!r} was recorded as {len(one['prompt_token_ids'])} tokens and has "
                    f"{len(prompt.token_ids)} here: the task renders it differently"
                )
            reward: float | None = one["reward"] if self.rewards == "recorded" else None
            if reward is not None and one["failed"]:
                reward = FailedScore(reward, "errors", "it failed when it was recorded")
            found.append(
                Completion(
                    token_ids=one["token_ids"],
                    logprobs=one["logprobs"] or [math.nan] * len(one["token_ids"]),
                    text=one["completion"],
                    finish_reason=one["finish_reason"],
                    behaviour_step=RECORDED,
                    version=RECORDED,
                    reward=reward,
                )
            )
        return found

    def generate(
        self,
        prompts: Sequence[Prompt],
        num_samples: int,
        sampling: Sampling,
        seed: int,
        tokenizer: PreTrainedTokenizerBase,
        on_group: OnGroup | None = None,
    ) -> list[list[Completion]]:
        if self.version == BORROWED:  # a validation: of the policy alone
            return self.engine.generate(prompts, num_samples, sampling, seed, tokenizer, on_group)
        wanted = num_samples if self.siblings is None else self.siblings
        recorded = {
            place: self._completions(prompt, self._chosen(prompt, wanted, seed))
            for place, prompt in enumerate(prompts)
            if self._is_recorded(prompt, wanted)
        }
        groups: dict[int, list[Completion]] = {}

        def complete(place: int, sampled: list[Completion]) -> None:
            groups[place] = [*sampled, *recorded.get(place, [])]
            if on_group is not None:
                on_group(place, groups[place])

        counts = {place: num_samples - len(recorded.get(place, [])) for place in range(len(prompts))}
        for place in (place for place, count in counts.items() if count == 0):
            complete(place, [])
        for count in sorted(set(counts.values()) - {0}):
            places = [place for place in counts if counts[place] == count]
            self.engine.generate(
                [prompts[place] for place in places],
                count,
                sampling,
                seed,
                tokenizer,
                lambda index, sampled, places=places: complete(places[index], sampled),  # type: ignore[misc]
            )
        return [groups[place] for place in range(len(prompts))]

    # Weights are the other engine's

    def load_weights(self, weights: PolicyWeights, step: int, num_rollouts: int | None = None) -> SyncRecord:
        record = self.engine.load_weights(weights, step, num_rollouts)
        self._follow()
        return record

    @contextmanager
    def holding(self, weights: PolicyWeights, step: int) -> Iterator[None]:
        try:
            with self.engine.holding(weights, step):
                self._follow()
                yield
        finally:
            self._follow()

    def state_dict(self) -> dict[str, Any]:
        recording = None if self._recording is None else self._recording.fingerprint
        return self.engine.state_dict() | {"recording": recording}

    def load_state_dict(self, state: dict[str, Any], policy: PolicyWeights | None = None) -> None:
        recorded = state.get("recording")
        if recorded is not None and recorded != self._recorded.fingerprint:
            raise ValueError(
                f"the recorded completions in {self._recorded.name} are not those this run began with: it would go on "
                "as another run. Give it the same files, or begin anew"
            )
        self.engine.load_state_dict(state, policy)
        self._follow()

    def forget(self) -> None:
        self.engine.forget()
        self._follow()

    def rest(self) -> None:
        self.engine.spent = self.spent
        self.engine.rest()

    def receive(self, weights: PolicyWeights, version: int) -> Sent:
        return self.engine.receive(weights, version)

    def held_checksums(self, sent: Sent) -> dict[str, int]:
        return self.engine.held_checksums(sent)

    def held_weights(self) -> dict[str, Tensor]:
        return self.engine.held_weights()

    def held_config(self) -> PretrainedConfig:
        return self.engine.held_config()

    def close(self) -> None:
        self.engine.close()
        self._follow()

    def _follow(self) -> None:
        inner = self.engine
        self.ledger, self.step, self.version = inner.ledger, inner.step, inner.version
        self.num_rollouts, self.spent = inner.num_rollouts, inner.spent
