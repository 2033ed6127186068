"""The commands on two hosts, which are network namespaces here: a cut cable, delay and loss."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import httpx
import pytest

from tests.support.packet_cable import PacketCable, ip, open_cable
from tests.support.tiny_models import make_tiny
from trioserve.workers.remote.certificates import make_certificates

COMMAND = [sys.executable, "-c", "from trioserve.cli.commands import run; run()"]
TIMEOUT = 90.0


@attrs.define
class Hosts:
    """Two hosts with a cable between them: the engine's at 10.77.0.1, the worker's at
    10.77.0.2."""

    names: tuple[str, str]
    cable: PacketCable
    processes: list[subprocess.Popen[bytes]] = attrs.field(factory=list)

    def start(self, side: int, log: Path, *words: str) -> subprocess.Popen[bytes]:
        """Run a command of trioserve on one of them."""
        inside = ["ip", "netns", "exec", self.names[side], *COMMAND, *words]
        with log.open("wb") as file:
            process = subprocess.Popen(inside, stdout=file, stderr=file, start_new_session=True)
        self.processes.append(process)
        return process


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    first, second = (f"ts{os.getpid()}{side}" for side in "ew")
    with contextlib.ExitStack() as stack:
        try:
            for name in (first, second):
                ip("netns", "add", name)
                stack.callback(ip, "netns", "del", name)
                ip("-n", name, "link", "set", "lo", "up")
            opening = open_cable((first, second), ("10.77.0.1/24", "10.77.0.2/24"))
            cable = stack.enter_context(opening)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces or TUN devices can't be made here: {error}")
        made = Hosts((first, second), cable)
        yield made
        for process in made.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def files(tmp_path: Path) -> Path:
    make_tiny("qwen3", tmp_path / "model")
    make_certificates(tmp_path / "tls")
    return tmp_path


def wait_for(condition: Callable[[], bool], logs: Path) -> None:
    end = time.monotonic() + TIMEOUT
    while not condition():
        texts = [path.read_text() for path in sorted(logs.glob("*.log"))]
        assert time.monotonic() < end, "\n".join(texts)
        time.sleep(0.05)


def start_both(hosts: Hosts, files: Path, *options: str) -> tuple[httpx.Client, Any]:
    """Start an engine and a worker; return a client and the worker's agent."""
    model, tls, socket = (str(files / name) for name in ("model", "tls", "http.sock"))
    engine = ["--uds", socket, "--worker-listen", "0.0.0.0:7000", "--worker-tls", tls]
    engine += ["--mock-worker", "10ms", "--worker-link-timeout", "1", "--admin-api-key", "key"]
    hosts.start(0, files / "engine.log", "serve", model, *engine, *options)
    agent = hosts.start(
        1, files / "worker.log", "worker", model, "--join", "10.77.0.1:7000", "--tls", tls
    )
    client = httpx.Client(
        transport=httpx.HTTPTransport(uds=socket),
        base_url="http://localhost",
        headers={"Authorization": "Bearer key"},
        timeout=TIMEOUT,
    )
    wait_for(lambda: "Serving" in (files / "engine.log").read_text(), files)
    return client, agent


def states(client: httpx.Client) -> list[str]:
    return [each["state"] for each in client.get("/workers").json()["workers"]]


def generate(client: httpx.Client, tokens: int) -> Any:
    asked = {"input_ids": [7, 9, 4], "sampling_params": {"max_new_tokens": tokens}}
    asked["sampling_params"] |= {"ignore_eos": True}
    return client.post("/generate", json=asked).json()


def test_a_pulled_cable_is_a_lost_worker_that_joins_again(hosts: Hosts, files: Path) -> None:
    client, agent = start_both(hosts, files)
    wait_for(lambda: states(client) == ["running", "running"], files)
    assert client.delete("/workers/0").status_code == 200
    generate(client, 5)
    hosts.cable.loss = 1.0
    wait_for(lambda: states(client) == ["restarting"], files)
    wait_for(lambda: "the engine was lost" in (files / "worker.log").read_text(), files)
    hosts.cable.loss = 0.0
    wait_for(lambda: states(client) == ["running"], files)
    assert generate(client, 20)["meta_info"]["completion_tokens"] == 20
    agent.terminate()
    assert agent.wait(TIMEOUT) == 0
    assert "nothing was heard of it for 1 s" in (files / "engine.log").read_text()


def test_delay_and_loss_cost_time_only(hosts: Hosts, files: Path) -> None:
    hosts.cable.delay, hosts.cable.loss = 0.02, 0.01
    client, _ = start_both(hosts, files, "--data-parallel-size", "0")
    assert generate(client, 100)["meta_info"]["completion_tokens"] == 100
    (worker,) = client.get("/workers").json()["workers"]
    assert worker["restarts"] == 0
    assert worker["round_trip_ms"] >= 40
    assert hosts.cable.num_dropped
