"""The curves of a run as a PNG."""

from __future__ import annotations

from pathlib import Path

from lgrpo.report.downsample import smooth_points
from lgrpo.report.series import Series


def draw_curves(series: Series, path: Path) -> None:
    """Write a PNG with reward and pass@1 above, and the lag of the behaviour policy below."""
    try:
        from matplotlib.figure import Figure  # pyplot would change the backend of a notebook
    except ImportError as error:
        raise ImportError("drawing needs matplotlib: pip install 'lgrpo[tutorials]'") from error
    figure = Figure(figsize=(8, 5), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    reward = series.get("rollout/reward", [])
    if reward:
        steps, values = zip(*reward, strict=True)
        top.plot(steps, values, color="tab:blue", alpha=0.25, linewidth=1)
        top.plot(*zip(*smooth_points(reward, window=15), strict=True), color="tab:blue", label="reward of rollouts")
    if points := series.get("val/pass@1"):
        steps, values = zip(*points, strict=True)
        top.plot(steps, values, "o-", color="tab:orange", label="pass@1, held-out problems")
    top.set_ylabel("reward, pass@1")
    top.grid(alpha=0.3)
    if top.has_data():
        top.legend(loc="lower right", frameon=False)
    if lag := series.get("train/lag"):
        steps, values = zip(*lag, strict=True)
        bottom.fill_between(steps, values, step="mid", color="tab:gray", alpha=0.5, linewidth=0)
    bottom.set_ylabel("lag (steps)")
    bottom.set_xlabel("optimizer step")
    bottom.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
