"""Silence Lightning and block the network for every test."""

from __future__ import annotations

import logging
import os
import signal
from functools import cache, partial
from pathlib import Path

import pytest
from docstring_parser.attrdoc import AttributeDocstrings
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "2")
# A background job of a shell ignores SIGINT, and so would every process that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


# The tests parse hundreds of command lines, and half of that is reading the source of the same classes.
read_attributes = cache(partial(AttributeDocstrings.get_attr_docs, AttributeDocstrings()))
AttributeDocstrings.get_attr_docs = lambda self, component: read_attributes(component)


@pytest.fixture(autouse=True)
def quiet_lightning():
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)


settings.register_profile("repeatable", derandomize=True)  # a failing example fails again
settings.load_profile("repeatable")


@pytest.fixture(scope="session", autouse=True)
def a_clean_repository():
    """Fail if a test leaves a file in the root of the repository, where it might be committed."""
    root = Path(__file__).parent.parent
    before = set(root.iterdir())
    yield
    new = {path.name for path in set(root.iterdir()) - before} - {".pytest_cache", ".hypothesis"}
    assert not new, f"files left by a test: {sorted(new)}"
