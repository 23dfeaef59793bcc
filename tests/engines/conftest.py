"""The policy whose weights the engines are given, and the two servers all tests share: they take long to start."""

from __future__ import annotations

import pytest
import torch

from lgrpo.engines import VLLMServerEngine
from tests.helpers import tiny_policy


def build_policy():
    torch.manual_seed(0)
    policy = tiny_policy()
    policy.build()
    return policy


@pytest.fixture(scope="module")
def policy():
    return build_policy()


@pytest.fixture(scope="session")
def two_servers():
    engine = VLLMServerEngine(
        num_servers=2, timeout=60, options={"worker_extension_cls": "tests.engines.faulty.FaultyWorker"}
    )
    engine.load_weights(build_policy().weights(), step=3)
    yield engine
    engine.close()
