"""Scores that separate gains in format and length from reasoning, for the study on a real model.

A run with the callback ``HeldOut`` evaluates the final policy once more, with a higher limit of tokens than it was
trained with, on the validation problems and on MATH-500, and writes every completion to ``held_out/`` of its folder.
``judged`` reads these files and those of ``data.evaluation.results``, scores the answers a second time with an
extractor that forgives the format, and counts truncated completions.
"""

from __future__ import annotations

import json
import re
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from safetensors.torch import load_file, save_file

from lgrpo.data import RolloutDataModule
from lgrpo.data.evaluation import Evaluation, Evaluator
from lgrpo.data.prompts import load_prompts
from lgrpo.data.scorer import Scorer
from lgrpo.engines import Sampling
from lgrpo.hooks import policy_owner
from lgrpo.rewards.match import last_number
from lgrpo.rewards.math import last_boxed
from lgrpo.run.folder import run_folder
from lgrpo.tasks import MATH500, Task, Template

FOLDER, ERROR = "held_out", "error.txt"
MATH_PROMPT = "{question}\n\nThink step by step, and put the final answer in \\boxed{{}}."
SEPARATORS = re.compile(r"(?<=\d)(?:\{,\}|\\,|\\!|,)(?=\d{3}(?!\d))")
"""Separators of thousands."""
ANSWER = re.compile(r"####|answer", re.IGNORECASE)
BOLD = re.compile(r"\*\*(.+?)\*\*")
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


class HeldOut(L.Callback):
    """Evaluates the final policy with a higher limit of tokens than in training; prompts that leave less are left out.

    One completion is sampled for as many problems as a validation of the run has.
    """

    def __init__(self, max_tokens: int = 448, max_model_len: int = 640, math500: str | None = None) -> None:
        """
        Args:
            max_tokens: Upper limit of a completion's length.
            max_model_len: Limit of prompt and completion together, that of the engine.
            math500: Folder or file of MATH-500; by default it is not evaluated.
        """
        self.max_prompt_tokens = max_model_len - max_tokens
        self.sampling = Sampling(temperature=1.0, max_tokens=max_tokens)
        self.math500 = math500

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        data = trainer.datamodule  # type: ignore[attr-defined]
        assert isinstance(data, RolloutDataModule)
        tasks: dict[str, Task] = {"task": data.task}
        if self.math500 is not None:
            chat = data.task.template.chat
            tasks["math500"] = MATH500(self.math500, template=Template(prompt=MATH_PROMPT, chat=chat))
        folder = run_folder(trainer) / FOLDER
        folder.mkdir(exist_ok=True)
        for name, task in tasks.items():
            start = time.perf_counter()
            try:
                table = self.evaluate(name, task, data, trainer)
            except Exception:  # the run itself has succeeded
                (folder / ERROR).write_text(traceback.format_exc())
                return
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
            print(f"{name}: {len(table)} problems evaluated in {time.perf_counter() - start:.1f} s", flush=True)

    def evaluate(self, name: str, task: Task, data: RolloutDataModule, trainer: L.Trainer) -> list[dict[str, Any]]:
        """Return a row for each problem, as in ``evaluations/`` of a run folder."""
        scorer = Scorer(task.reward, data.scoring)
        evaluator = Evaluator(
            name=name,
            task=task,
            settings=Evaluation(num_samples=1, num_problems=data.evaluation.num_problems),
            prompts=load_prompts(
                task, "validation", data.tokenizer, max_tokens=self.max_prompt_tokens, overlong="drop"
            ),
            scorer=scorer,
            sampling=self.sampling,
            engine=data.engine,
            tokenizer=data.tokenizer,
            trainer=trainer,
        )
        data.schedule.wait()
        try:
            table = evaluator.sample(policy_owner(trainer).policy_weights()).table()
        finally:
            scorer.close()
        data.schedule.rest_engine()
        return table


class LoadWeights(L.Callback):
    """Replaces the policy's weights before the first validation by those of a Hugging Face folder."""

    def __init__(self, folder: str) -> None:
        """
        Args:
            folder: Folder with safetensors files of the same architecture.
        """
        self.folder = folder

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        model = policy_owner(trainer).policy.model
        files = sorted(Path(self.folder).glob("*.safetensors"))
        weights = {name: tensor for path in files for name, tensor in load_file(path).items()}
        missing, unexpected = model.load_state_dict(weights, strict=False)
        tied = getattr(model, "_tied_weights_keys", None) or {}
        if unexpected or set(missing) - set(tied):
            raise ValueError(f"{self.folder} has other weights than the policy: {[*missing, *unexpected][:5]}")


class SaveModel(L.Callback):
    """Writes the final policy as a Hugging Face folder in bfloat16."""

    def __init__(self, folder: str) -> None:
        """
        Args:
            folder: Folder that is created.
        """
        self.folder = Path(folder)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        owner = policy_owner(trainer)
        weights = owner.policy_weights()
        unfinished = self.folder.with_name(f"{self.folder.name}.unfinished")
        unfinished.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in weights}
        save_file(tensors, unfinished / "model.safetensors", metadata={"format": "pt"})
        weights.config.save_pretrained(unfinished)
        owner.policy.tokenizer.save_pretrained(unfinished)
        unfinished.rename(self.folder)


def judged(run: Path) -> dict[str, Any]:
    """Return the scores of a run's last evaluation, and of its held-out sets if it evaluated them, by set.

    The error of an evaluation that failed is ``held_out_error``.
    """
    evaluations = {int(path.stem.partition("=")[2]): path for path in run.glob("evaluations/step=*.jsonl")}
    files = {"test": evaluations[max(evaluations)]} if evaluations else {}
    names = {"task": "test_long", "math500": "math500"}
    files |= {names[path.stem]: path for path in sorted(run.glob(f"{FOLDER}/*.jsonl"))}
    found: dict[str, Any] = {name: scores([json.loads(line) for line in path.open()]) for name, path in files.items()}
    if (error := run / FOLDER / ERROR).exists():
        found["held_out_error"] = error.read_text()[-600:]
    return found


def scores(table: list[dict[str, Any]]) -> dict[str, float]:
    """Return pass@1 by the reward and by the forgiving extractor, with standard errors, and what completions lack.

    ``finished`` is pass@1 of the completions that were not truncated.
    """

    def mean(value: Callable[[dict[str, Any], int], float]) -> list[float]:
        return [statistics.fmean(value(row, i) for i in range(len(row["completions"]))) for row in table]

    correct = mean(lambda row, i: row["correct"][i])
    forgiving = mean(lambda row, i: row["correct"][i] or is_answer(row["completions"][i], row["row"]["answer"]))
    ended = [
        correct
        for row in table
        for correct, reason in zip(row["correct"], row["finish_reasons"], strict=True)
        if reason != "length"
    ]
    found = {
        "problems": len(table),
        "pass@1": statistics.fmean(correct),
        "pass@1_stderr": _error(correct),
        "forgiving": statistics.fmean(forgiving),
        "forgiving_stderr": _error(forgiving),
        "truncated": statistics.fmean(mean(lambda row, i: row["finish_reasons"][i] == "length")),
        "no_answer": statistics.fmean(mean(lambda row, i: row["final_answers"][i] is None)),
        "finished": statistics.fmean(ended) if ended else 0.0,
        "tokens": statistics.fmean(mean(lambda row, i: row["num_tokens"][i])),
    }
    return {name: round(value, 4) for name, value in found.items()}


def _error(values: list[float]) -> float:
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def is_answer(text: str, answer: object) -> bool:
    """Return whether any number that a reader could take for the final answer of a text equals the answer.

    These are the last number, those in the last box, in the last bold text and in the last line, and the first one
    after the last word that announces an answer. Answers that are no number are never equal.

    >>> [is_answer(text, "1800") for text in ("It is **1{,}800** m, see 2.", "Answer: 1,800. See 3 * 600", "1 8 0 0")]
    [True, True, False]
    """
    gold = last_number(SEPARATORS.sub("", str(answer)))
    if gold is None or not NUMBER.fullmatch(SEPARATORS.sub("", str(answer)).strip().lstrip("$")):
        return False
    return any(abs(float(number) - gold) <= 1e-6 for number in candidates(SEPARATORS.sub("", text)))


def candidates(text: str) -> set[str]:
    """Return the numbers that a reader could take for the final answer of a text."""
    lines = [line for line in text.splitlines() if NUMBER.search(line)]
    found = NUMBER.findall(lines[-1]) if lines else []
    found += NUMBER.findall(last_boxed(text) or "")
    if bold := [part for part in BOLD.findall(text) if NUMBER.search(part)]:
        found += NUMBER.findall(bold[-1])
    if announced := list(ANSWER.finditer(text)):
        found += NUMBER.findall(text[announced[-1].end() :])[:1]
    return set(found)
