"""A reward that asks another model, and keeps what it answered."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, final

from lgrpo.checks import check_count, check_range, finite_number
from lgrpo.rewards.base import AsyncReward, FailedScore, NotedScore, Notes, Score, notes_of
from lgrpo.rewards.judge.engine import Answer, JudgeEngine, JudgeError
from lgrpo.rewards.judge.flights import SingleFlight
from lgrpo.rewards.judge.metrics import JudgeMetrics
from lgrpo.rewards.judge.server import JudgeServer
from lgrpo.rewards.judge.templates import JudgeTemplate, Rubric
from lgrpo.rewards.judge.verdicts import Verdict, VerdictFolder, readable_scores, verdict_key
from lgrpo.types import Completion, Prompt

_NOTED = 2000
"""Number of characters of an answer, its last ones, in the notes of a score; less if there are more than ten."""


@final
class JudgeReward(AsyncReward):
    """Asks another model for a score between 0 and 1: behind a server with OpenAI's chat route, or in this process.

    A server that is busy, slow or away is asked again. A completion whose verdict cannot be had or read counts as
    failed (``reward/errors``), as with every reward. ``data.scoring.timeout`` limits a completion with all attempts.
    Every score has its verdict as notes, which recordings keep.
    """

    def __init__(
        self,
        url: str | None = None,
        template: JudgeTemplate | None = None,
        model: str | None = None,
        api_key_env: str = "LGRPO_JUDGE_API_KEY",
        temperature: float = 0.0,
        max_tokens: int = 1024,
        votes: int = 1,
        verdicts: str | None = None,
        timeout: float = 60.0,
        concurrency: int = 32,
        max_retries: int = 4,
        retry_delay: float = 1.0,
        request: dict[str, Any] | None = None,
        engine: JudgeEngine | None = None,
        failure_score: float = 0.0,
    ) -> None:
        """
        Args:
            url: Address of the server, such as ``http://localhost:8000``, or with a path, that of all its routes, such
                as ``https://host/api/v1``.
            template: Questions to the judge, and how its answers are read; by default a ``Rubric``.
            model: Name of the model; by default the first one of the server.
            api_key_env: Environment variable with the key of the server, if it needs one.
            temperature: Temperature of the judge.
            max_tokens: Upper limit of tokens in an answer.
            votes: Number of answers to each question, with different seeds; the score is the mean of those that can be
                read. More than one needs a temperature above 0.
            verdicts: Folder that keeps the questions about each completion with the answers, one file each. What it has
                is not asked again, also in later runs, unless it cannot be read.
            timeout: Upper limit of seconds for an answer, and for a pause that the server asks for.
            concurrency: Number of completions that are judged at the same time, in each worker.
            max_retries: Number of further attempts for a question.
            retry_delay: Seconds before the second attempt, doubled before each later one, up to twice as long at
                random.
            request: Further fields of every request, such as ``chat_template_kwargs: {enable_thinking: false}``; null
                removes a field.
            engine: Model in the trainer's process, instead of a server: ``lgrpo.engines.JudgeModel``.
            failure_score: Reward of a completion without a verdict of the engine. With a server it is
                ``data.scoring.failure_score``.
        """
        check_range("JudgeReward's temperature", temperature, at_least=0)
        check_count("JudgeReward's max_tokens", max_tokens, at_least=1)
        check_count("JudgeReward's votes", votes, at_least=1)
        check_range("JudgeReward's timeout", timeout, above=0)
        check_count("JudgeReward's concurrency", concurrency, at_least=1)
        check_count("JudgeReward's max_retries", max_retries, at_least=0)
        check_range("JudgeReward's retry_delay", retry_delay, at_least=0)
        if votes > 1 and temperature == 0:
            raise ValueError(f"JudgeReward's votes is {votes}, but at temperature 0 all answers are equal: raise it")
        if (url is None) == (engine is None):
            raise ValueError("JudgeReward needs a url, the address of a server, or an engine, and not both")
        if "None" in (request or {}).values():
            raise ValueError("JudgeReward's request has the text 'None': write null in a config file, not in an option")
        if engine is not None and (model or request):
            raise ValueError("JudgeReward's model and request are for a server; an engine has its own settings")
        self.url = url
        self.template = Rubric() if template is None else template
        self.model = model
        self.api_key_env = api_key_env
        self.temperature = temperature
        self.max_tokens = max_tokens
        self.votes = votes
        self.verdicts = verdicts
        self.timeout = timeout
        self.concurrency = concurrency
        self.max_retries = max_retries
        self.retry_delay = retry_delay
        self.request = request or {}
        self.engine = engine
        self.failure_score = failure_score
        self._server = None if url is None else JudgeServer(url, api_key_env, timeout, max_retries, retry_delay)
        self._folder = None if verdicts is None else VerdictFolder(verdicts)
        self._lookup = SingleFlight[str]()
        self._flights = SingleFlight[Verdict]()
        self._metrics = JudgeMetrics(
            "unreadable_fraction",
            *(["unanimous_fraction", "vote_std"] if votes > 1 else []),
            *(["order_change_fraction"] if self.template.num_orders > 1 else []),
            *(["cached_fraction"] if verdicts is not None else []),
            "seconds",
        )

    @property
    def is_inline(self) -> bool:  # type: ignore[override]
        return self.engine is not None

    @property
    def can_fail(self) -> bool:
        return True

    def required_fields(self) -> set[str]:
        return self.template.fields()

    def observe(self, scores: Sequence[Score]) -> None:
        for score in scores:
            if (notes := notes_of(score)) is not None:
                self._metrics.add(notes)

    def report(self) -> dict[str, float]:
        return self._metrics.report()

    def close(self) -> None:
        super().close()
        if self.engine is not None:
            self.engine.close()

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Score]:
        scores = super().__call__(prompts, completions) if self.engine is None else self._batch(prompts, completions)
        self.observe(scores)
        return scores

    # A server

    async def score_with_retries(self, prompt: Prompt, completion: Completion) -> Score:
        return await self.score(prompt, completion)  # which repeats requests, not whole scores

    async def score(self, prompt: Prompt, completion: Completion) -> Score:
        assert self._server is not None, "an engine scores whole groups"
        if self.model is None:
            self.model = await self._lookup("", self._server.first_model)
        asked = self._asked(self.model, prompt, completion)
        return self._score(await self._flights(asked["key"], partial(self._ask_server, asked)))

    async def _ask_server(self, asked: dict[str, Any]) -> Verdict:
        """Return the verdict of the folder, or of the server."""
        assert self._server is not None
        kept = self._kept(asked)
        if kept is not None and readable_scores(kept):
            return kept
        start = time.monotonic()
        settings = {name: asked[name] for name in ("model", "temperature", "max_tokens")}
        async with self._server.client() as client:
            try:
                async with asyncio.TaskGroup() as group:  # the first error cancels the others
                    votes = [
                        [
                            group.create_task(self._server.answer(client, self._body(settings, messages, vote)))
                            for messages in asked["questions"]
                        ]
                        for vote in range(self.votes)
                    ]
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None
        answers = [[task.result() for task in vote] for vote in votes]
        return self._keep(asked, answers, time.monotonic() - start, replace=kept is not None)

    def _body(self, settings: dict[str, Any], messages: Any, vote: int) -> dict[str, Any]:
        body = settings | {"messages": messages, "seed": vote} | self.request
        return {name: value for name, value in body.items() if value is not None}

    # An engine

    def _batch(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Score]:
        """Return the scores of completions, whose questions the engine answers together."""
        assert self.engine is not None
        pairs = zip(prompts, completions, strict=True)
        keys: list[str] = []
        asked: dict[str, dict[str, Any]] = {}
        for one in (self._asked(self.engine.name, *pair) for pair in pairs):
            keys.append(one["key"])
            asked[one["key"]] = one
        kept = {key: self._kept(one) for key, one in asked.items()}
        verdicts: dict[str, Verdict | JudgeError] = {
            key: verdict for key, verdict in kept.items() if verdict is not None and readable_scores(verdict)
        }
        new = [one for key, one in asked.items() if key not in verdicts]
        start = time.monotonic()
        questions = [messages for one in new for messages in one["questions"]]
        found = iter(self.engine.answers(questions, self.votes, self.temperature, self.max_tokens) if new else [])
        seconds = (time.monotonic() - start) / max(1, len(new))
        for one in new:
            by_question = [next(found) for _ in one["questions"]]
            errors = [answers for answers in by_question if isinstance(answers, JudgeError)]
            known = [answers for answers in by_question if not isinstance(answers, JudgeError)]
            votes = [list(vote) for vote in zip(*known, strict=True)]
            is_kept = kept[one["key"]] is not None
            verdicts[one["key"]] = errors[0] if errors else self._keep(one, votes, seconds, replace=is_kept)
        return [self._score_or_failure(verdicts[key]) for key in keys]

    def _score_or_failure(self, verdict: Verdict | JudgeError) -> Score:
        """Return a score; in the trainer's process an error would stop the run."""
        try:
            if isinstance(verdict, JudgeError):
                raise verdict
            return self._score(verdict)
        except JudgeError as error:
            return FailedScore(self.failure_score, "errors", f"{type(error).__name__}: {error}", error.notes)

    # Verdicts

    def _asked(self, model: str, prompt: Prompt, completion: Completion) -> dict[str, Any]:
        """Return everything that is asked about a completion, with the key of its verdict."""
        asked: dict[str, Any] = {"model": model, "temperature": self.temperature, "max_tokens": self.max_tokens}
        asked |= {"votes": self.votes, "questions": self.template.questions(prompt, completion)}
        asked |= {"request": self.request} if self.request else {}
        return {"key": verdict_key(asked), **asked}

    def _kept(self, asked: dict[str, Any]) -> Verdict | None:
        """Return the verdict of the folder, read with the current template; None if it has none."""
        verdict = None if self._folder is None else self._folder.find(asked["key"])
        return None if verdict is None else self._read(verdict) | {"is_cached": True}

    def _keep(self, asked: dict[str, Any], answers: list[list[Answer]], seconds: float, replace: bool) -> Verdict:
        """Return the verdict of some answers, or the one that another process kept meanwhile."""
        verdict = self._read(
            {
                **asked,
                "answers": [[answer.text for answer in vote] for vote in answers],
                "complete": [[answer.is_complete for answer in vote] for vote in answers],
                "seconds": round(seconds, 3),
            }
        )
        if self._folder is not None:
            verdict = self._read(self._folder.keep(verdict, replace))
        return verdict | {"is_cached": False}

    def _read(self, verdict: Verdict) -> Verdict:
        """Return the verdict with the scores that its answers mean."""
        votes = [self._read_vote(*vote) for vote in zip(verdict["answers"], verdict["complete"], strict=True)]
        scores, errors, agree = (list(values) for values in zip(*votes, strict=True))
        orders = {"orders_agree": agree} if self.template.num_orders > 1 else {}
        return verdict | {"scores": scores, "errors": errors} | orders

    def _read_vote(self, answers: list[str], complete: list[bool]) -> tuple[float | None, str | None, bool | None]:
        """Return the score of a vote, or the reason why there is none, and whether all orders agree."""
        try:
            if not (all(complete) or self.template.reads_incomplete):
                raise ValueError(f"the judge's answer was cut off after {self.max_tokens} tokens: raise max_tokens")
            score = self.template.read(answers)
            if finite_number(score) is None:
                raise ValueError(f"the template read {score!r} in the judge's answers, not a finite number")
            return float(score), None, self.template.orders_agree(answers)
        except ValueError as error:
            return None, str(error), None

    def _score(self, verdict: Verdict) -> NotedScore:
        """Return the mean score of the votes that can be read, with the verdict as notes."""
        notes = _notes(verdict)
        if not (scores := readable_scores(verdict)):
            raise JudgeError(next(error for error in verdict["errors"] if error), notes)
        return NotedScore(statistics.fmean(scores), notes)


def _notes(verdict: Verdict) -> Notes:
    """Return the part of a verdict that is kept with a score: without the questions, and the end of long answers."""
    names = ("scores", "orders_agree", "errors", "seconds", "is_cached")
    size = min(_NOTED, 10 * _NOTED // sum(map(len, verdict["answers"])))
    answers = [[text if len(text) <= size else f"…{text[-size:]}" for text in vote] for vote in verdict["answers"]]
    notes = {"verdict": verdict["key"], "answers": answers} | {name: verdict[name] for name in names if name in verdict}
    return notes if any(notes["errors"]) else {name: value for name, value in notes.items() if name != "errors"}
