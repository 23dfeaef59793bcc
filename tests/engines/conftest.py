"""The policy whose weights the engines are given."""

from __future__ import annotations

import pytest
import torch

from tests.helpers import tiny_policy


@pytest.fixture(scope="module")
def policy():
    torch.manual_seed(0)
    policy = tiny_policy()
    policy.build()
    return policy
