"""The file of metrics survives a kill, a full disk and a deleted folder."""

import multiprocessing
import resource
import shutil
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger

from lgrpo.report import read_series
from lgrpo.report.series import read_metrics
from lgrpo.run.metrics_logger import MetricsLogger

FIRST = [(step, float(step)) for step in range(40)]


def write(logger, step, **metrics):
    logger.log_metrics(metrics, step=step)
    logger.save()


def logger_with_rows(folder, kind=MetricsLogger):
    logger = kind(folder, name="metrics")
    for step, value in FIRST:
        write(logger, step, loss=value)
    return logger


def size(folder):
    return (Path(folder) / "metrics" / "version_0" / "metrics.csv").stat().st_size


@contextmanager
def files_limited_to(num_bytes):
    """A write beyond the limit fails in the middle, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def log_and_be_killed(folder, kind, metrics):
    logger = logger_with_rows(folder, kind)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # the write that reaches the limit ends the process
    resource.setrlimit(resource.RLIMIT_FSIZE, (size(folder) - 20 if "extra" in metrics else size(folder) + 3,) * 2)
    write(logger, 40, **metrics)


@pytest.mark.parametrize("metrics", [{"loss": 40.0}, {"loss": 40.0, "extra": 1.0}], ids=["row", "new column"])
def test_killed_while_it_writes(tmp_path, metrics):
    process = multiprocessing.get_context("fork").Process(
        target=log_and_be_killed, args=(tmp_path, MetricsLogger, metrics)
    )
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGXFSZ
    assert read_series(tmp_path)["loss"] == FIRST


def test_lightnings_logger_loses_rows(tmp_path):
    """The reason for a logger of our own. If this fails, Lightning's is safe now and ours can go."""
    metrics = {"loss": 40.0, "extra": 1.0}
    process = multiprocessing.get_context("fork").Process(target=log_and_be_killed, args=(tmp_path, CSVLogger, metrics))
    process.start()
    process.join(60)
    assert read_series(tmp_path)["loss"] != FIRST


@pytest.mark.parametrize("metrics", [{"loss": 40.0}, {"loss": 40.0, "extra": 1.0}], ids=["row", "new column"])
def test_disk_that_is_full_for_a_while(tmp_path, metrics):
    logger = logger_with_rows(tmp_path)
    with files_limited_to(size(tmp_path) + 3), pytest.raises(OSError, match="File too large"):
        write(logger, 40, **metrics)
    assert read_metrics(tmp_path) == ({"loss": FIRST}, [], [])
    assert [path.name for path in (tmp_path / "metrics" / "version_0").iterdir()] == ["metrics.csv"]
    write(logger, 41, loss=41.0, other=2.0)
    series, notes, _ = read_metrics(tmp_path)
    assert not notes
    assert series["loss"] == [*FIRST, (40, 40.0), (41, 41.0)]  # also the row that could not be written
    assert series["other"] == [(41, 2.0)]
    assert series.get("extra") == ([(40, 1.0)] if "extra" in metrics else None)


def test_folder_that_was_deleted(tmp_path):
    logger = logger_with_rows(tmp_path)
    shutil.rmtree(tmp_path / "metrics")
    write(logger, 40, loss=40.0)
    assert read_series(tmp_path) == {"loss": [(40, 40.0)]}
