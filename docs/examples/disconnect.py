"""Show a server's reaction to a client that leaves: ``python docs/examples/disconnect.py``.

The server is at http://127.0.0.1:8000 (``trioserve serve``), or at the URL in the first argument.
"""

import sys
import time

import httpx

BODY = {"prompt": "Once upon a time", "max_tokens": 1000, "ignore_eos": True, "stream": True}


def measure(client: httpx.Client) -> tuple[int, int, int]:
    """Return the numbers of running requests, of aborted ones, and of tokens so far."""
    found: dict[str, float] = {}
    for line in client.get("/metrics").text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            kind = "abort" if 'finished_reason="abort"' in name else ""
            found[name.split("{")[0] + kind] = float(value)
    return (
        int(found["trioserve:num_requests_running"]),
        int(found["trioserve:request_success_totalabort"]),
        int(found["trioserve:generation_tokens_total"]),
    )


def main(url: str) -> None:
    with httpx.Client(base_url=url, timeout=60) as client:
        _, aborted, _ = measure(client)
        with client.stream("POST", "/v1/completions", json=BODY) as response:
            events = response.iter_lines()
            for _ in range(6):
                next(events)
            print("while it streams:", measure(client)[0], "runs")
        # Leaving the block has closed the connection. The server learns nothing else.
        left = time.monotonic()
        while measure(client)[1] == aborted:
            time.sleep(0.001)
        seconds = time.monotonic() - left
        tokens = measure(client)[2]
        time.sleep(0.2)
        print(f"noticed within {seconds:.3f} s, aborted: {measure(client)[1] - aborted}")
        print(f"tokens computed since then: {measure(client)[2] - tokens}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
