"""A client that only wants its tokens, as a process: ``python -m tests.attacks.witness URL MODEL``.

It streams one short completion after another, each on a connection of its own, until its standard
input ends. Then it prints the longest time that it waited for a connection or for the next event,
in seconds, and the number of completions.
"""

from __future__ import annotations

import http.client
import json
import ssl
import sys
import threading
import time
from urllib.parse import urlsplit

__all__: list[str] = []

HEADERS = {"Content-Type": "application/json", "Authorization": "Bearer secret"}


def connection_to(url: str) -> http.client.HTTPConnection:
    """Return a connection that isn't open yet; a server's certificate isn't looked at."""
    parts = urlsplit(url)
    if parts.scheme == "http":
        return http.client.HTTPConnection(parts.netloc, timeout=120)
    trust = ssl.create_default_context()
    trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE
    return http.client.HTTPSConnection(parts.netloc, timeout=120, context=trust)


def complete(url: str, model: str) -> float:
    """Return the longest wait of one completion, in seconds.

    Raises:
        AssertionError: the answer isn't a whole stream.
    """
    body = {"model": model, "prompt": "The witness says", "max_tokens": 16, "stream": True}
    body |= {"ignore_eos": True, "temperature": 0}
    longest, last = 0.0, time.monotonic()
    connection = connection_to(url)
    connection.request("POST", "/v1/completions", json.dumps(body), HEADERS)
    response = connection.getresponse()
    assert response.status == 200, response.read()
    line = b""
    for line in response:
        now = time.monotonic()
        longest, last = max(longest, now - last), now
        if line == b"data: [DONE]\n":
            break
    connection.close()
    assert line == b"data: [DONE]\n", "the stream was cut off"
    return longest


def main(url: str, model: str) -> None:
    ended = threading.Event()

    def wait_for_the_end() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    longest, count = 0.0, 0
    while not ended.is_set() or not count:
        longest = max(longest, complete(url, model))
        count += 1
        if count == 1:
            print("ready", flush=True)
            longest = 0.0
    print(longest, count, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
