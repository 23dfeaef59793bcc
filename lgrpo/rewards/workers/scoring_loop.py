"""Main loop of a worker process that scores completions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from lgrpo.rewards.base import NOT_YET, AsyncReward, Score, checked_rewards, checked_score, notes_of
from lgrpo.rewards.workers.loop import WorkerLoop, failed
from lgrpo.types import Completion, Prompt


class ScoringLoop(WorkerLoop):
    """Scores the jobs that arrive at its pipe, with the reward that the fork server has loaded."""

    def serve(self) -> None:
        if isinstance(self.served, AsyncReward):
            asyncio.run(self._serve_concurrently(self.served))
        else:
            self._serve_one_by_one()

    def _serve_one_by_one(self) -> None:
        while True:
            job, prompts, completions = self.pipe.recv()
            try:
                answer = scored(checked_rewards(self.served, prompts, completions))
            except Exception as error:
                answer = failed(error)
            self.answer({"job": job} | answer)

    async def _serve_concurrently(self, reward: AsyncReward) -> None:
        loop, running = asyncio.get_running_loop(), set()
        while True:
            job = await loop.run_in_executor(None, self.pipe.recv)
            task = asyncio.create_task(self._score(reward, *job))
            running.add(task)
            task.add_done_callback(running.discard)

    async def _score(
        self, reward: AsyncReward, job: int, prompts: Sequence[Prompt], completions: Sequence[Completion]
    ) -> None:
        (prompt,), (completion,) = prompts, completions
        try:
            value = await asyncio.wait_for(reward.score_with_retries(prompt, completion), self.timeout)
            answer = scored([checked_score(type(reward).__name__, value, prompt, completion)])
        except TimeoutError:
            answer = {
                "kind": "timeouts",
                "error": f"a score took longer than {self.timeout:g} s (data.scoring.timeout)",
            }
        except Exception as error:
            answer = failed(error)
        self.answer({"job": job} | answer)


def scored(scores: Sequence[Score]) -> dict[str, Any]:
    """Return an answer with scores and their notes."""
    values = [None if score is NOT_YET else score for score in scores]
    return {"scores": values, "notes": [notes_of(score) for score in scores]}
