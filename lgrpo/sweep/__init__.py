"""Sweeps: settings × seeds. A grid file is read and checked, every run is a process, and the results are compared."""

from lgrpo.sweep.check import check_grid
from lgrpo.sweep.grid import Arm, SweepError, read_grid
from lgrpo.sweep.results import Results, draw_results
from lgrpo.sweep.runs import list_runs, run_all

__all__ = ["Arm", "Results", "SweepError", "check_grid", "draw_results", "list_runs", "read_grid", "run_all"]
