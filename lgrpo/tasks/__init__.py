"""Tasks: rows of data, a template that turns them into prompts, and a reward."""

from lgrpo.tasks.base import Split, Task
from lgrpo.tasks.countdown import Countdown, GeneratedCountdown
from lgrpo.tasks.dataset import DatasetTask, RowTask
from lgrpo.tasks.environment import EnvironmentTask
from lgrpo.tasks.generated import Arithmetic, SortDigits
from lgrpo.tasks.mathematics import AIME24, GSM8K, MATH, MATH500, DeepScaleR
from lgrpo.tasks.reasoning_gym import ReasoningGym
from lgrpo.tasks.rows import LocatedRow, Row, RowStream
from lgrpo.tasks.template import Template

__all__ = [
    "AIME24",
    "GSM8K",
    "MATH",
    "MATH500",
    "Arithmetic",
    "Countdown",
    "DatasetTask",
    "DeepScaleR",
    "EnvironmentTask",
    "GeneratedCountdown",
    "LocatedRow",
    "ReasoningGym",
    "Row",
    "RowStream",
    "RowTask",
    "SortDigits",
    "Split",
    "Task",
    "Template",
]
