"""Predicts the step time on machines that were not measured, from stages measured on one GPU and the loop's rules.

No GPU is needed: ``python -m tests.benchmarks.simulation MEASURED.json --gpus 8 64``.
"""

from tests.benchmarks.simulation.costs import Costs, Layout, Machine, Workload, decode_seconds, parse_layout
from tests.benchmarks.simulation.loop import Loop, Run, Schedule, Span
from tests.benchmarks.simulation.measured import Measured, SimulationError, read_measured
from tests.benchmarks.simulation.outcome import Prediction, predict, table

__all__ = [
    "Costs",
    "Layout",
    "Loop",
    "Machine",
    "Measured",
    "Prediction",
    "Run",
    "Schedule",
    "SimulationError",
    "Span",
    "Workload",
    "decode_seconds",
    "parse_layout",
    "predict",
    "read_measured",
    "table",
]
