"""How long a step takes on machines one does not have yet: measured stages, the loop's own rules, no GPU."""

from lgrpo.simulation.command import simulate
from lgrpo.simulation.costs import Costs, Layout, Machine, Workload, decode_seconds, parse_layout
from lgrpo.simulation.figures import Figures, figures, table
from lgrpo.simulation.loop import Loop, Run, Schedule, Span
from lgrpo.simulation.measured import Measured, SimulationError, read_measured

__all__ = [
    "Costs",
    "Figures",
    "Layout",
    "Loop",
    "Machine",
    "Measured",
    "Run",
    "Schedule",
    "SimulationError",
    "Span",
    "Workload",
    "decode_seconds",
    "figures",
    "parse_layout",
    "read_measured",
    "simulate",
    "table",
]
