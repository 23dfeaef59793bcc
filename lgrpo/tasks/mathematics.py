"""Mathematics datasets that papers train and test on.

Each reads its data from the hub or from your files, with the fields of the hub or with ``question``, ``answer`` and
``solution``. All settings of ``DatasetTask`` are available.
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
from lgrpo.tasks.source import Data, open_source
from lgrpo.tasks.template import Template

_BOXED = Template(prompt="{question}\n\nThink step by step, and put the final answer in \\boxed{{}}.\n")
_ANNOTATION = re.compile(r"<<[^<>]*>>")
_BARE_BOX = re.compile(r"\\boxed\s+([^\s$.,]+)")


@final
class GSM8K(RowTask):
    """Grade-school problems with integer answers.

    The hub's ``answer`` is a solution that ends in ``#### 42``. It is split into ``solution`` and ``answer``, without
    the calculator annotations (``<<6*7=42>>``) and thousands separators.
    """

    def __init__(
        self,
        train: Data | None = "openai/gsm8k",
        validation: Data | None = None,
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
            validation: Likewise; the default is the test split of ``train``.
            subset: Subset of the hub dataset.
            template: Template that turns a row into a prompt.
            reward: Reward of a completion.
            settings: Settings of ``DatasetTask``.
        """
        super().__init__(reward, train, validation, subset=subset, template=template, **settings)

    def read(self, row: Row, split: Split) -> Row:
        solution, mark, answer = str(row.get("answer")).rpartition("####")
        if not mark:
            return row
        return {**row, "solution": _ANNOTATION.sub("", solution).strip(), "answer": answer.strip().replace(",", "")}


class _BoxedAnswers(RowTask):
    """Task whose answers are in ``\\boxed{…}``, in completions as in solutions.

    A missing ``answer`` is read from the solution's last box; a row with an empty box is left out.
    """

    def __init__(
        self,
        train: Data | None,
        validation: Data | None,
        template: Template = _BOXED,
        reward: BatchReward | None = None,
        **settings: Any,
    ) -> None:
        """
        Args:
            train: Hub name, folder, file or rows.
            validation: Likewise; the default is the test split of ``train``.
            template: Template that turns a row into a prompt.
            reward: Reward of a completion; the default is ``MathVerify``.
            settings: Settings of ``DatasetTask``.
        """
        super().__init__(reward or MathVerify(), train, validation, template=template, **settings)

    def read(self, row: Row, split: Split) -> Row | None:
        row = _with_question(row)
        if row.get("answer") not in (None, ""):
            return row
        if not isinstance(solution := row.get("solution"), str):
            raise ValueError(f"the row has neither an answer nor a solution, only {sorted(row)}")
        answer = boxed_answer(solution)
        if answer is None:
            raise ValueError(f"the row has no answer, and its solution no \\boxed{{…}}: {solution[-80:]!r}")
        return {**row, "answer": answer.strip()} if answer.strip() else None


@final
class MATH(_BoxedAnswers):
    """Competition problems of Hendrycks et al., with their split into 7,500 and 5,000."""

    def __init__(
        self,
        train: Data | None = "DigitalLearningGmbH/MATH-lighteval",
        validation: Data | None = None,
        answer_from_solution: bool = False,
        **settings: Any,
    ) -> None:
        """
        Args:
            train: Hub name, folder, file or rows.
            validation: Likewise; the default is the test split of ``train``.
            answer_from_solution: Read the answer from the solution's box even if the data has an ``answer``: in some
                copies of the data it lacks backslashes and spaces.
            settings: Settings of ``DatasetTask``.
        """
        super().__init__(train, validation, **settings)
        self.answer_from_solution = answer_from_solution

    def read(self, row: Row, split: Split) -> Row | None:
        return super().read({**row, "answer": None} if self.answer_from_solution else row, split)


@final
class MATH500(_BoxedAnswers):
    """Subset of 500 problems of MATH's test split that papers test on."""

    def __init__(
        self, validation: Data | None = "HuggingFaceH4/MATH-500", train: Data | None = None, **settings: Any
    ) -> None:
        """
        Args:
            validation: Hub name, folder, file or rows.
            train: Likewise; the default is no training set.
            settings: Settings of ``DatasetTask``.
        """
        super().__init__(train, validation, **settings)


@final
class AIME24(_BoxedAnswers):
    """The 30 problems of both American Invitational Mathematics Examinations of 2024, to test on."""

    def __init__(
        self,
        validation: Data | None = "HuggingFaceH4/aime_2024",
        validation_split: str | None = "train",
        train: Data | None = None,
        **settings: Any,
    ) -> None:
        """
        Args:
            validation: Hub name, folder, file or rows.
            validation_split: Split of the hub dataset, whose only one is called train.
            train: Hub name, folder, file or rows; the default is no training set.
            settings: Settings of ``DatasetTask``.
        """
        super().__init__(train, validation, validation_split=validation_split, **settings)


@final
class DeepScaleR(_BoxedAnswers):
    """About 40,000 competition problems to train on.

    Seven of them are in MATH-500 too, compared by letters and digits: set ``exclude`` when testing on it.
    """

    def __init__(
        self,
        train: Data | None = "agentica-org/DeepScaleR-Preview-Dataset",
        validation: Data | None = None,
        validation_split: str | None = None,
        exclude: str | None = None,
        exclude_split: str = "test",
        **settings: Any,
    ) -> None:
        """
        Args:
            train: Hub name, folder, file or rows.
            validation: Likewise; the default is none.
            validation_split: Split of a hub dataset to validate on; the default is none of ``train``, test of another.
            exclude: Hub name, folder or file of problems not to train on, compared by letters and digits.
            exclude_split: Split of ``exclude``.
            settings: Settings of ``DatasetTask``.
        """
        super().__init__(train, validation, validation_split=validation_split, **settings)
        self.exclude = exclude
        self.exclude_split = exclude_split

    def read(self, row: Row, split: Split) -> Row | None:
        problem = _with_question(row)
        is_excluded = split == "train" and letters_and_digits(str(problem.get("question"))) in self._excluded
        return None if is_excluded else problem

    @cached_property
    def _excluded(self) -> set[str]:
        if self.exclude is None:
            return set()
        found = set()
        for location, row in open_source(self.exclude, None, self.exclude_split):
            problem = _with_question(row)
            if "question" not in problem:
                raise ValueError(f"{location}: a row of task.exclude has no question or problem, only {sorted(row)}")
            found.add(letters_and_digits(str(problem["question"])))
        if not found:
            raise ValueError(f"the set of task.exclude is empty: {self.exclude}")
        return found


def letters_and_digits(text: str) -> str:
    r"""Return the letters and digits of a problem, equal for two versions of the same problem.

    >>> letters_and_digits("Find  $x+1$.\n") == letters_and_digits("find $x + 1$")
    True
    """
    return "".join(character for character in text.casefold() if character.isalnum())


def boxed_answer(solution: str) -> str | None:
    r"""Return the content of the last box of a solution, with or without braces, or None.

    >>> [boxed_answer(text) for text in (r"\boxed{\frac{1}{2}}.", r"$\boxed 7$", r"\fbox{B}", "seven")]
    ['\\frac{1}{2}', '7', 'B', None]
    """
    solution = solution.replace("\\fbox{", "\\boxed{")
    braced, bare = solution.rfind("\\boxed{"), list(_BARE_BOX.finditer(solution))
    if bare and bare[-1].start() > braced:
        return bare[-1].group(1)
    return last_boxed(solution)


def _with_question(row: Row) -> Row:
    """Add ``question`` to a row that has ``problem`` instead, as on the hub."""
    return {**row, "question": row["problem"]} if "question" not in row and "problem" in row else row
