"""A server to be watched, as a process: ``audited_server.py fake|MODEL [plant]``.

It prints its URL, writes a mark into ``$AUDIT_LOG`` for each line that comes on standard input, and
ends with it. With ``plant``, it does everything that it must not do with what a client sends.
"""

from __future__ import annotations

import base64
import contextlib
import os
import pickle
import subprocess
import sys
import urllib.request
from typing import Any

import trio

from trioserve import open_engine
from trioserve.config import EngineConfig, ServerConfig
from trioserve.http import create_app
from trioserve.http.api import service
from trioserve.http.server.server import serve_app
from trioserve.testing.fake_engine import open_fake_engine


def misuse(body: bytes) -> None:
    """Commit faults for the audit to find, one in each line."""
    text = body.decode(errors="replace")
    for planted in text.split("PLANT:")[1:]:
        kind, value, *_ = planted.split("|")
        with contextlib.suppress(Exception):
            match kind:
                case "pickle":
                    pickle.loads(base64.b64decode(value))
                case "eval":
                    eval(value)
                case "fetch":
                    urllib.request.urlopen(value, timeout=1)
                case "open":
                    open(value).close()
                case "run":
                    subprocess.run([value], check=False)


def plant() -> None:
    """Make every request do it."""
    real = service.parse_body

    def parse(request_type: Any, body: bytes, ignored: Any) -> Any:
        misuse(body)
        return real(request_type, body, ignored)

    service.parse_body = parse


async def main(model: str) -> None:
    config = ServerConfig(engine=EngineConfig(model), port=0)
    if model == "fake":
        opened = open_fake_engine(max_model_len=1000)
    else:
        opened = open_engine(
            model, device="cpu", dtype="float32", num_threads=1, num_gpu_blocks_override=64
        )
    log = os.open(os.environ["AUDIT_LOG"], os.O_WRONLY | os.O_APPEND)
    async with opened as engine, trio.open_nursery() as nursery:
        (url,) = await nursery.start(serve_app, create_app(engine, config), config)
        print(url, flush=True)
        async for _ in trio.lowlevel.FdStream(os.dup(0)):
            os.write(log, b'[0, "mark", []]\n')
            print("marked", flush=True)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    if "plant" in sys.argv[2:]:
        plant()
    trio.run(main, sys.argv[1])
