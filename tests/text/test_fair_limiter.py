"""Turns are shared between tenants, and neither cheap nor expensive ones starve."""

from __future__ import annotations

import attrs
import trio
import trio.testing

from trioserve.text.fair_limiter import FairLimiter

EXPENSIVE = 100


@attrs.define
class Case:
    """Holders of turns by name, in the order in which they came to have one."""

    nursery: trio.Nursery
    limiter: FairLimiter
    held: list[str] = attrs.field(factory=list)

    async def hold(self, name: str, tenant: str, cost: int) -> None:
        await self.limiter.acquire(name, tenant, cost)
        self.held.append(name)

    async def ask(self, *asked: tuple[str, str, int]) -> list[str]:
        """Have holders ask one after another; returns all that had a turn so far."""
        for name, tenant, cost in asked:
            self.nursery.start_soon(self.hold, name, tenant, cost)
            await trio.testing.wait_all_tasks_blocked()
        return self.held

    async def release(self, name: str) -> str:
        """End a turn; returns the holder that has the next one."""
        before = len(self.held)
        self.limiter.release(name)
        await trio.testing.wait_all_tasks_blocked()
        return " ".join(self.held[before:])


async def test_no_tenant_takes_all() -> None:
    async with trio.open_nursery() as nursery:
        case = Case(
            nursery, FairLimiter(3, max_per_tenant=2, max_expensive=2, expensive_above=EXPENSIVE)
        )
        assert await case.ask(*((f"a{n}", "a", 1) for n in range(4))) == ["a0", "a1"]
        assert await case.ask(("b0", "b", 1), ("b1", "b", 1)) == ["a0", "a1", "b0"]
        assert await case.release("a0") == "a2"  # a waits for longer than b's second
        assert await case.release("a2") == "b1"
        assert await case.release("b0") == "a3"
        for name in ("a1", "a3", "b1"):
            case.limiter.release(name)
        assert case.limiter.num_held == 0


async def test_without_a_name_all_may_be_taken_but_not_by_expensive_ones() -> None:
    async with trio.open_nursery() as nursery:
        case = Case(
            nursery, FairLimiter(3, max_per_tenant=2, max_expensive=2, expensive_above=EXPENSIVE)
        )
        assert await case.ask(*((f"d{n}", "", EXPENSIVE + 1) for n in range(3))) == ["d0", "d1"]
        assert await case.ask(("c0", "", EXPENSIVE), ("c1", "", 1)) == ["d0", "d1", "c0"]
        assert await case.release("c0") == "c1"
        assert await case.release("d0") == "d2"
        for name in ("d1", "d2", "c1"):
            case.limiter.release(name)


async def test_the_cheapest_and_the_oldest_come_alternately() -> None:
    async with trio.open_nursery() as nursery:
        case = Case(
            nursery, FairLimiter(1, max_per_tenant=1, max_expensive=1, expensive_above=EXPENSIVE)
        )
        await case.ask(("first", "a", 1), ("expensive", "a", 90), ("c1", "a", 1), ("c2", "a", 2))
        assert await case.release("first") == "c1"
        assert await case.release("c1") == "expensive"
        assert await case.release("expensive") == "c2"
        case.limiter.release("c2")


async def test_one_that_leaves_leaves_nothing_behind() -> None:
    limiter = FairLimiter(1, max_per_tenant=1, max_expensive=1, expensive_above=EXPENSIVE)
    await limiter.acquire("first", "a", 1)
    with trio.move_on_after(0) as scope:
        await limiter.acquire("second", "b", 1)
    assert scope.cancelled_caught
    async with trio.open_nursery() as nursery:
        nursery.start_soon(limiter.acquire, "third", "b", 1)
        await trio.testing.wait_all_tasks_blocked()
        limiter.release("first")
        nursery.cancel_scope.cancel()  # too late: it has its turn
    limiter.release("third")
    assert limiter.num_held == 0
    await limiter.acquire("fourth", "a", 1)
