"""A run turned into something people look at."""

from lgrpo.report.curves import draw_curves
from lgrpo.report.series import closing_line, read_series

__all__ = ["closing_line", "draw_curves", "read_series"]
