"""Mathematics in words: the sets that papers train and test on.

Each takes its data from the hub, or from files of one's own: with the hub's fields, or with ``question``, ``answer``
and ``solution`` apart. Every other setting of ``DatasetTask`` works here too.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any, final

from lgrpo.rewards import BatchReward, MathVerify, NumericMatch
from lgrpo.rewards.math import last_boxed
from lgrpo.tasks.base import Split
from lgrpo.tasks.dataset import RowTask
from lgrpo.tasks.rows import Row
from lgrpo.tasks.source import open_source
from lgrpo.tasks.template import Template

_BOXED = Template(prompt="{question}\n\nThink step by step, and put the final answer in \\boxed{{}}.\n")
_ANNOTATION = re.compile(r"<<[^<>]*>>")
_BARE_BOX = re.compile(r"\\boxed\s+([^\s$.,]+)")


@final
class GSM8K(RowTask):
    """Grade-school problems whose answers are whole numbers.

    The hub's ``answer`` is a solution that ends in ``#### 42``: the two are taken apart, and the calculator's notes
    (``<<6*7=42>>``) and thousands separators are left out.
    """

    def __init__(
        self,
        train: str | list[dict[str, Any]] | None = "openai/gsm8k",
        validation: str | list[dict[str, Any]] | None = None,
        subset: str | None = "main",
        template: Template = Template(  # noqa: B008
            prompt="{question}\n\nThink step by step, and end with the answer, a plain number.\n",
            example_answer="{solution}\nThe answer is {answer}.",
        ),
        reward: BatchReward = NumericMatch(),  # noqa: B008
        **settings: Any,
    ) -> None:
        """
        Args:
            train: Hub name, folder, file or rows.
            validation: Likewise; by default the test split of ``train``.
            subset: Subset of the hub dataset.
            template: How a row becomes a prompt.
            reward: How an answer is scored.
            settings: As in ``DatasetTask``.
        """
        super().__init__(reward, train, validation, subset=subset, template=template, **settings)

    def read(self, row: Row, split: Split) -> Row:
        solution, mark, answer = str(row.get("answer")).rpartition("####")
        if not mark:
            return row
        return {
            **row,
            "solution": _ANNOTATION.sub("", solution).strip(),
            "answer": answer.strip().replace(",", ""),
        }


@final
class MATH(RowTask):
    """Competition problems of Hendrycks et al., with their own split into 7,500 and 5,000.

    Where there is no ``answer``, it is what the solution's last ``\\boxed{…}`` holds; a row with nothing in it is left
    out.
    """

    def __init__(
        self,
        train: str | list[dict[str, Any]] | None = "DigitalLearningGmbH/MATH-lighteval",
        validation: str | list[dict[str, Any]] | None = None,
        answer_from_solution: bool = False,
        template: Template = _BOXED,
        reward: BatchReward | None = None,
        **settings: Any,
    ) -> None:
        """
        Args:
            train: Hub name, folder, file or rows.
            validation: Likewise; by default the test split of ``train``.
            answer_from_solution: Take the answer from the solution's box even where the data has one apart, as some
                copies of the data have lost backslashes and spaces there.
            template: How a row becomes a prompt.
            reward: How an answer is scored; by default ``MathVerify``.
            settings: As in ``DatasetTask``.
        """
        super().__init__(reward or MathVerify(), train, validation, template=template, **settings)
        self.answer_from_solution = answer_from_solution

    def read(self, row: Row, split: Split) -> Row | None:
        return _with_boxed_answer({**row, "answer": None} if self.answer_from_solution else row)


@final
class MATH500(RowTask):
    """The 500 problems of MATH's test split that papers test on."""

    def __init__(
        self,
        validation: str | list[dict[str, Any]] | None = "HuggingFaceH4/MATH-500",
        train: str | list[dict[str, Any]] | None = None,
        template: Template = _BOXED,
        reward: BatchReward | None = None,
        **settings: Any,
    ) -> None:
        """
        Args:
            validation: Hub name, folder, file or rows.
            train: Likewise; by default there is nothing to train on.
            template: How a row becomes a prompt.
            reward: How an answer is scored; by default ``MathVerify``.
            settings: As in ``DatasetTask``.
        """
        super().__init__(reward or MathVerify(), train, validation, template=template, **settings)

    def read(self, row: Row, split: Split) -> Row | None:
        return _with_boxed_answer(row)


@final
class AIME24(RowTask):
    """The 30 problems of both American Invitational Mathematics Examinations of 2024, to test on."""

    def __init__(
        self,
        validation: str | list[dict[str, Any]] | None = "HuggingFaceH4/aime_2024",
        validation_split: str | None = "train",
        train: str | list[dict[str, Any]] | None = None,
        template: Template = _BOXED,
        reward: BatchReward | None = None,
        **settings: Any,
    ) -> None:
        """
        Args:
            validation: Hub name, folder, file or rows.
            validation_split: Split of the hub dataset; its only one is called train.
            train: Hub name, folder, file or rows; by default there is nothing to train on.
            template: How a row becomes a prompt.
            reward: How an answer is scored; by default ``MathVerify``.
            settings: As in ``DatasetTask``.
        """
        super().__init__(
            reward or MathVerify(),
            train,
            validation,
            validation_split=validation_split,
            template=template,
            **settings,
        )

    def read(self, row: Row, split: Split) -> Row | None:
        return _with_boxed_answer(row)


@final
class DeepScaleR(RowTask):
    """About 40,000 competition problems to train on.

    Seven of them are in MATH-500, by their letters and digits: ``exclude`` it when testing on it.
    """

    def __init__(
        self,
        train: str | list[dict[str, Any]] | None = "agentica-org/DeepScaleR-Preview-Dataset",
        validation: str | list[dict[str, Any]] | None = None,
        validation_split: str | None = None,
        exclude: str | None = None,
        exclude_split: str = "test",
        template: Template = _BOXED,
        reward: BatchReward | None = None,
        **settings: Any,
    ) -> None:
        """
        Args:
            train: Hub name, folder, file or rows.
            validation: Likewise; by default none.
            validation_split: Split of a hub dataset to validate on; by default none of ``train`` and test of another.
            exclude: Hub name, folder or file of problems not to train on, whatever their spaces, case and punctuation.
            exclude_split: Split of it.
            template: How a row becomes a prompt.
            reward: How an answer is scored; by default ``MathVerify``.
            settings: As in ``DatasetTask``.
        """
        super().__init__(
            reward or MathVerify(),
            train,
            validation,
            validation_split=validation_split,
            template=template,
            **settings,
        )
        self.exclude = exclude
        self.exclude_split = exclude_split

    def read(self, row: Row, split: Split) -> Row | None:
        problem = _with_question(row)
        is_excluded = split == "train" and plain_words(str(problem.get("question"))) in self._excluded
        return None if is_excluded else problem

    @cached_property
    def _excluded(self) -> set[str]:
        if self.exclude is None:
            return set()
        found = set()
        for place, row in open_source(self.exclude, None, self.exclude_split):
            problem = _with_question(row)
            if "question" not in problem:
                raise ValueError(f"{place}: a row of task.exclude has no question or problem, only {sorted(row)}")
            found.add(plain_words(str(problem["question"])))
        if not found:
            raise ValueError(f"the set to leave out is empty: {self.exclude}")
        return found


def plain_words(text: str) -> str:
    r"""A problem's letters and digits, so that two prints of one problem are equal.

    >>> plain_words("Find  $x+1$.\n") == plain_words("find $x + 1$")
    True
    """
    return "".join(character for character in text.casefold() if character.isalnum())


def boxed_answer(solution: str) -> str | None:
    r"""What the last box of a solution holds, with or without braces; None where there is no box.

    >>> [boxed_answer(text) for text in (r"\boxed{\frac{1}{2}}.", r"$\boxed 7$", r"\fbox{B}", "seven")]
    ['\\frac{1}{2}', '7', 'B', None]
    """
    solution = solution.replace("\\fbox{", "\\boxed{")
    braced, bare = solution.rfind("\\boxed{"), list(_BARE_BOX.finditer(solution))
    if bare and bare[-1].start() > braced:
        return bare[-1].group(1)
    return last_boxed(solution)


def _with_question(row: Row) -> Row:
    """The hub calls a question a problem."""
    return {**row, "question": row["problem"]} if "question" not in row and "problem" in row else row


def _with_boxed_answer(row: Row) -> Row | None:
    row = _with_question(row)
    if row.get("answer") not in (None, ""):
        return row
    if not isinstance(solution := row.get("solution"), str):
        raise ValueError(f"the row has neither an answer nor a solution, only {sorted(row)}")
    answer = boxed_answer(solution)
    if answer is None:
        raise ValueError(f"the row has no answer, and its solution no \\boxed{{…}}: {solution[-80:]!r}")
    return {**row, "answer": answer.strip()} if answer.strip() else None
