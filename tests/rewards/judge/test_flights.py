"""Concurrent requests for the same thing, made once."""

from __future__ import annotations

import asyncio

import pytest

from lgrpo.rewards.judge.flights import SingleFlight


class Work:
    """Counts how often it runs, waits to be released, and notices when it is cancelled."""

    def __init__(self):
        self.num_runs = 0
        self.num_cancelled = 0
        self.released = asyncio.Event()

    async def __call__(self):
        self.num_runs += 1
        try:
            await self.released.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if self.num_runs == 3:
            raise ValueError("the third run")
        return self.num_runs


async def started(flight, work, *keys):
    tasks = [asyncio.create_task(flight(key, work)) for key in keys]
    await asyncio.sleep(0.01)
    return tasks


def test_once_for_all_that_wait():
    async def main():
        flight, work = SingleFlight(), Work()
        tasks = await started(flight, work, "a", "a", "a")
        work.released.set()
        assert await asyncio.gather(*tasks) == [1, 1, 1]
        assert await flight("a", work) == 2, "what is over is asked again"
        with pytest.raises(ValueError, match="the third run"):
            await flight("a", work)

    asyncio.run(main())


def test_other_keys():
    async def main():
        flight, work = SingleFlight(), Work()
        tasks = await started(flight, work, "a", "b")
        work.released.set()
        await asyncio.gather(*tasks)
        assert work.num_runs == 2

    asyncio.run(main())


def test_the_work_ends_with_the_last_that_waits():
    async def main():
        flight, work = SingleFlight(), Work()
        first, second = await started(flight, work, "a", "a")
        first.cancel()
        await asyncio.sleep(0.01)
        assert (work.num_cancelled, second.done()) == (0, False)
        second.cancel()
        await asyncio.sleep(0.01)
        assert work.num_cancelled == 1

    asyncio.run(main())


def test_what_is_being_cancelled_is_asked_again():
    """It may take a while to end, as a connection that is closed does."""

    async def main():
        flight, closed = SingleFlight(), asyncio.Event()

        async def slow_to_end():
            try:
                await asyncio.sleep(60)
            finally:
                await closed.wait()

        work = Work()
        work.released.set()
        (first,) = await started(flight, slow_to_end, "a")
        first.cancel()
        await asyncio.sleep(0.01)
        second = asyncio.create_task(flight("a", work))
        await asyncio.sleep(0.01)
        closed.set()
        assert await second == 1
        assert not flight._tasks

    asyncio.run(main())


def test_several_event_loops():
    """As in threads that score groups in the trainer's process."""
    flight = SingleFlight()

    async def main():
        work = Work()
        work.released.set()
        return await flight("a", work)

    assert [asyncio.run(main()) for _ in range(2)] == [1, 1]
