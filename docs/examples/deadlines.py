"""Four ways to end a request early: ``python docs/examples/deadlines.py``.

Each of them is the end of a scope, and frees all that the request held.
"""

import trio

import trioserve

STORY = "Once upon a time"


async def by_its_own_deadline(engine: trioserve.Engine) -> None:
    try:
        await engine.complete(STORY, max_tokens=2000, ignore_eos=True, timeout=0.5)
    except trioserve.DeadlineExceeded as error:
        print("deadline:", error)


async def by_a_scope_around_it(engine: trioserve.Engine) -> None:
    text = ""
    with trio.move_on_after(0.5) as scope:
        async with engine.generate(STORY, max_tokens=2000, ignore_eos=True) as stream:
            async for chunk in stream:
                text += chunk.text
    print(f"move_on_after: {scope.cancelled_caught}, and {len(text)} characters are ours to keep")


async def by_leaving_the_block(engine: trioserve.Engine) -> None:
    async with engine.generate(STORY, max_tokens=2000, ignore_eos=True) as stream:
        async for chunk in stream:
            if "." in chunk.text:
                break
    print("break: after", stream.usage.completion_tokens, "tokens")


async def by_a_sibling(engine: trioserve.Engine) -> None:
    async with trio.open_nursery() as nursery:

        async def generate() -> None:
            await engine.complete(STORY, max_tokens=2000, ignore_eos=True)

        nursery.start_soon(generate)
        await trio.sleep(0.2)
        nursery.cancel_scope.cancel()  # as if a sibling had failed
    print("cancelled with its nursery")


async def main() -> None:
    async with trioserve.open_engine("smollm2-135m") as engine:
        for end in (by_its_own_deadline, by_a_scope_around_it, by_leaving_the_block, by_a_sibling):
            await end(engine)
        print("sequences that run:", engine.statistics().scheduler.num_running)


if __name__ == "__main__":
    trio.run(main)
