"""The server to ask, which ``tests/clients/test_clients.py`` has started."""

from __future__ import annotations

import os
import re
import time
import urllib.request

URL = os.environ["SERVER_URL"]
KEY = os.environ["SERVER_KEY"]
MODEL = os.environ["SERVER_MODEL"]


def wait_until_idle() -> None:
    """Return when the server computes nothing any more."""
    request = urllib.request.Request(f"{URL}/metrics", headers={"Authorization": f"Bearer {KEY}"})
    deadline = time.monotonic() + 60
    while True:
        with urllib.request.urlopen(request, timeout=60) as answer:
            metrics = answer.read().decode()
        (count,) = re.findall(r"^trioserve:num_requests_running\S* (\S+)$", metrics, re.M)
        if not float(count):
            return
        assert time.monotonic() < deadline
        time.sleep(0.02)
