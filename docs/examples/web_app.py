"""A web app with its routes and the engine in one nursery: ``python docs/examples/web_app.py``.

Then ``curl -N http://127.0.0.1:8001/stories/whales``. OpenAI's API is beside it, below ``/llm``.
"""

from collections.abc import AsyncIterator

import trio
from hypercorn.config import Config
from hypercorn.middleware.dispatcher import TrioDispatcherMiddleware
from hypercorn.trio import serve
from quart import Response
from quart_trio import QuartTrio

import trioserve
from trioserve.http import create_app


def app_of(engine: trioserve.Engine, told: trio.MemorySendChannel[str]) -> QuartTrio:
    app = QuartTrio(__name__)

    @app.get("/stories/<path:subject>")
    async def story(subject: str) -> Response:
        prompt = f"Once upon a time, there was a story about {subject}. It"

        async def body() -> AsyncIterator[bytes]:
            # Closing the page cancels this, which aborts the request.
            async with engine.generate(prompt, max_tokens=100, seed=1) as stream:
                async for chunk in stream:
                    yield chunk.text.encode()
            await told.send(subject)

        return Response(body(), content_type="text/plain; charset=utf-8")

    return app


async def keep_book(subjects: trio.MemoryReceiveChannel[str]) -> None:
    """Run beside the server: a task of your own program."""
    async for subject in subjects:
        print("told of", subject, flush=True)


async def main(
    port: int = 8001, *, task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED
) -> None:
    config = Config()
    config.bind = [f"127.0.0.1:{port}"]
    told, subjects = trio.open_memory_channel[str](100)
    async with trioserve.open_engine("smollm2-135m") as engine, trio.open_nursery() as nursery:
        nursery.start_soon(keep_book, subjects)
        app = TrioDispatcherMiddleware({"/llm": create_app(engine), "/": app_of(engine, told)})
        binds = await nursery.start(serve, app, config)
        task_status.started(binds)


if __name__ == "__main__":
    trio.run(main)
