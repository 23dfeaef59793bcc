"""Reports on runs: an HTML page, a PNG of curves, summaries of checkpoints, intervals over seeds."""

from lgrpo.report.curves import draw_curves
from lgrpo.report.evaluations import find_checkpoints, headlines, write_summary
from lgrpo.report.intervals import Interval, mean_interval, paired_difference
from lgrpo.report.names import metric_names
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
    "paired_difference",
    "read_series",
    "write_page",
    "write_summary",
]
