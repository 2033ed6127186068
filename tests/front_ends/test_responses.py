"""Responses that are kept by a server of several processes: any of them finds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.cli.test_shutdown_process import start, tiny
from tests.front_ends.test_server import MOCK, front_ends, until
from tests.support.http_stub import http_client
from tests.support.responses import RESPONSES, checked, checked_events

__all__ = ["start", "tiny"]

MANY = 10
"""Connections, so many that both front ends get some of them, but for one time in five hundred."""


async def request(url: str, method: str, path: str = "", key: str = "one", **body: Any) -> Any:
    """Return an answer over a connection of its own."""
    headers = {"Authorization": f"Bearer {key}"}
    async with http_client(url, headers=headers) as client:
        return await client.request(method, RESPONSES + path, json=body or None, timeout=60)


async def test_every_front_end_finds_what_any_has_kept(start: Any, tiny: Path) -> None:
    server = start(tiny, *MOCK, "--api-key", "one", "--api-key", "two")
    server.wait_until_it_serves()
    options = {"max_output_tokens": 4, "temperature": 0, "ignore_eos": True}
    ids = []
    previous: dict[str, Any] = {}
    sizes = []
    for number in range(MANY):
        body = {"input": f"{number}", **options, **previous, "stream": number % 2 == 0}
        answer = await request(server.url, "POST", **body)
        assert answer.status_code == 200, answer.text
        if number % 2:
            reply = checked(answer.json())
        else:
            reply = checked_events(answer.text)[-1]["response"]
        sizes.append(reply["usage"]["input_tokens"])
        ids.append(reply["id"])
        previous = {"previous_response_id": reply["id"]}
    assert sizes == sorted(set(sizes))
    for id in ids:
        assert (await request(server.url, "GET", f"/{id}")).json()["id"] == id
        stranger = await request(server.url, "GET", f"/{id}", key="two")
        assert stranger.status_code == 404
    assert (await request(server.url, "DELETE", f"/{ids[0]}")).json()["deleted"]
    gone: list[httpx.Response] = [
        await request(server.url, "GET", f"/{ids[0]}") for _ in range(MANY)
    ]
    assert {answer.status_code for answer in gone} == {404}

    # They outlive the front end that has kept them.
    victim, other = front_ends(server)
    victim.kill()

    async def replaced() -> bool:
        found: list[psutil.Process] = front_ends(server)
        return len(found) == 2 and found[0].pid == other.pid

    await until(replaced)
    answer = await request(server.url, "POST", input="And now?", **options, **previous)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["input_tokens"] > sizes[-1]
