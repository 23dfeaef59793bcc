"""Quiet Lightning for every test; no test reaches for a network."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "2")
# a shell's background job ignores Ctrl-C, and so would every process the tests start
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def quiet_lightning():
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)


settings.register_profile("repeatable", derandomize=True)  # a red run must stay red when it is run again
settings.load_profile("repeatable")


@pytest.fixture(scope="session", autouse=True)
def a_clean_repository():
    """No test leaves a file in the repository's root, where it would be committed with the next change."""
    root = Path(__file__).parent.parent
    before = set(root.iterdir())
    yield
    new = {path.name for path in set(root.iterdir()) - before} - {".pytest_cache", ".hypothesis"}
    assert not new, f"left behind by a test: {sorted(new)}"
