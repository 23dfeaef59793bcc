"""The policy of the engine tests, and two servers that all tests share, because they take long to start."""

from __future__ import annotations

import pytest
import torch

from lgrpo.engines import Timeouts, VLLMServerEngine
from tests.helpers import MODEL, tiny_policy


def build_policy(**changes):
    torch.manual_seed(0)
    policy = tiny_policy(config=MODEL | changes)
    policy.build()
    return policy


@pytest.fixture(scope="module")
def policy():
    return build_policy()


@pytest.fixture(scope="session")
def two_servers():
    engine = VLLMServerEngine(
        num_servers=2,
        timeouts=Timeouts(generate=60),
        options={"worker_extension_cls": "tests.engines.faulty.FaultyWorker"},
    )
    engine.load_weights(build_policy().weights(), step=3)
    yield engine
    engine.close()
