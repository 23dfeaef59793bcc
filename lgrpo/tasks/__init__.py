"""A task = prompts + template + reward."""

from lgrpo.tasks.base import Split, Task
from lgrpo.tasks.dataset import DatasetTask
from lgrpo.tasks.generated import Arithmetic, SortDigits
from lgrpo.tasks.template import Template

__all__ = ["Arithmetic", "DatasetTask", "SortDigits", "Split", "Task", "Template"]
