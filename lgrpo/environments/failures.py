"""Count of failed episodes, with the first one as an example."""

from __future__ import annotations

import threading
import warnings

from lgrpo.environments.episodes import EpisodeFailure


class EpisodeFailures:
    """Counts failed episodes, and shows the first one to the user. Thread-safe.

    Call ``add_start`` after each reset that succeeded and ``add`` for each episode that failed, and ``check`` from time
    to time, such as after each generation.
    """

    def __init__(self, name: str) -> None:
        """
        Args:
            name: Name of the environment's class.
        """
        self.name = name
        self._lock = threading.Lock()
        self._num_started = self._num_failed = self._num_failed_resets = 0
        self._first: EpisodeFailure | None = None
        self._has_warned = False

    def add_start(self) -> None:
        """Count an episode whose reset succeeded."""
        with self._lock:
            self._num_started += 1

    def add(self, failure: EpisodeFailure) -> None:
        """Count an episode that failed."""
        with self._lock:
            self._num_failed += 1
            self._num_failed_resets += failure.method == "reset"
            self._first = self._first or failure

    def check(self) -> None:
        """Warn of the first failure; raise an error if no episode has ever started."""
        with self._lock:
            first, has_warned = self._first, self._has_warned
            num_failed, num_resets = self._num_failed, self._num_failed_resets
            num_episodes = self._num_started + num_resets
            self._has_warned = first is not None
        if first is None:
            return
        if num_resets and num_resets == num_episodes:
            raise RuntimeError(f"{self.name} failed in the reset of each of the first {num_resets} episodes: {first}")
        if not has_warned:
            warnings.warn(
                f"{self.name} failed in {num_failed} of {num_episodes} episodes; the first failure, in a "
                f"{first.method}: {first}. From now on environment/failures counts them",
                stacklevel=2,
            )
