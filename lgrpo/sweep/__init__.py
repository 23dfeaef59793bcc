"""Settings × seeds: what is run, how, and what came of it."""

from lgrpo.sweep.check import check_grid
from lgrpo.sweep.command import sweep
from lgrpo.sweep.grid import Arm, Grid, SweepError, read_grid
from lgrpo.sweep.launch import Launch, launch, launches
from lgrpo.sweep.outcome import Outcome, draw_outcome

__all__ = [
    "Arm",
    "Grid",
    "Launch",
    "Outcome",
    "SweepError",
    "check_grid",
    "draw_outcome",
    "launch",
    "launches",
    "read_grid",
    "sweep",
]
