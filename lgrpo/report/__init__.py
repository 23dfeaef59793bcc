"""A run turned into something people look at."""

from lgrpo.report.checkpoints import find_checkpoints, headlines, write_summary
from lgrpo.report.command import report
from lgrpo.report.curves import draw_curves
from lgrpo.report.page import write_page
from lgrpo.report.series import closing_line, read_series

__all__ = [
    "closing_line",
    "draw_curves",
    "find_checkpoints",
    "headlines",
    "read_series",
    "report",
    "write_page",
    "write_summary",
]
