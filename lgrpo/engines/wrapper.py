"""Base class of engines that change what another engine samples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from lgrpo.engines.base import EngineState, RolloutEngine
from lgrpo.engines.manifest import SyncRecord, WeightManifest
from lgrpo.engines.recovery import Faults
from lgrpo.environments import Environment
from lgrpo.run.resume import ResumeSettings
from lgrpo.weights import PolicyWeights


class WrapperEngine(RolloutEngine):
    """Samples through an inner engine, whose weights, state and faults are its own. Subclasses define ``sample``."""

    def __init__(self, engine: RolloutEngine) -> None:
        super().__init__()
        self.engine = engine
        self.can_overlap, self.has_own_device = engine.can_overlap, engine.has_own_device
        self.dtype, self.returns_kept, self.max_contexts = engine.dtype, engine.returns_kept, engine.max_contexts

    def check_installed(self) -> None:
        self.engine.check_installed()

    def set_environment(self, environment: Environment) -> bool:
        return self.engine.set_environment(environment)

    @property
    def has_turns(self) -> bool:
        return self.engine.has_turns

    @property
    def environment_seconds(self) -> float:
        return self.engine.environment_seconds

    def resume_settings(self) -> ResumeSettings:
        return self.engine.resume_settings()

    def tool_schemas(self) -> list[dict[str, Any]]:
        return self.engine.tool_schemas()

    def adopt(self, other: RolloutEngine) -> bool:
        return type(other) is type(self) and isinstance(other, WrapperEngine) and self.engine.adopt(other.engine)

    @property
    def state(self) -> EngineState:
        return self.engine.state

    @property
    def faults(self) -> Faults:
        return self.engine.faults

    def load_weights(self, weights: PolicyWeights, step: int, num_rollouts: int | None = None) -> SyncRecord:
        return self.engine.load_weights(weights, step, num_rollouts)

    @contextmanager
    def holding(self, weights: PolicyWeights, step: int) -> Iterator[None]:
        with self.engine.holding(weights, step):
            yield

    def state_dict(self) -> dict[str, Any]:
        return self.engine.state_dict()

    def load_state_dict(self, state: dict[str, Any], policy: PolicyWeights | None = None) -> None:
        self.engine.load_state_dict(state, policy)

    def wake(self) -> None:
        self.engine.wake()

    def sleep(self) -> None:
        self.engine.sleep()

    def receive_weights(self, weights: PolicyWeights, step: int, version: int) -> WeightManifest:
        return self.engine.receive_weights(weights, step, version)

    def held_checksums(self, manifest: WeightManifest) -> dict[str, int]:
        return self.engine.held_checksums(manifest)

    def held_weights(self) -> dict[str, Tensor]:
        return self.engine.held_weights()

    def end_episodes(self) -> None:
        self.engine.end_episodes()

    def close(self) -> None:
        self.engine.close()
