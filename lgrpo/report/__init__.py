"""A run turned into something people look at."""

from lgrpo.report.checkpoints import find_checkpoints, headlines, write_summary
from lgrpo.report.command import report
from lgrpo.report.curves import draw_curves
from lgrpo.report.intervals import Interval, mean_interval, paired_difference
from lgrpo.report.names import metric_names, nearest
from lgrpo.report.page import write_page
from lgrpo.report.series import Series, closing_line, read_series

__all__ = [
    "Interval",
    "Series",
    "closing_line",
    "draw_curves",
    "find_checkpoints",
    "headlines",
    "mean_interval",
    "metric_names",
    "nearest",
    "paired_difference",
    "read_series",
    "report",
    "write_page",
    "write_summary",
]
