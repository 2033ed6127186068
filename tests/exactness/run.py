"""One configuration of the matrix: serves the probes in it, and checks that it was what it says."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import httpx
import psutil

from tests.exactness.dimensions import Configuration
from tests.exactness.probes import NUM_OTHERS, facts_of, others, probes
from trioserve.model_files import locate, open_model

_PAGE_SIZE = 16
_MAX_MODEL_LEN = 256
_MANY_PAGES = 40 * _MAX_MODEL_LEN // _PAGE_SIZE
_PAGES = {"preempted": 2 * _MAX_MODEL_LEN // _PAGE_SIZE, "host pages": 64}
"""Pages for some of the requests, so that others are preempted, or have to leave for the host."""
_TOKENS_BEFORE = 40
"""Tokens that are generated before a disturbance."""
_TIMEOUT = 120.0
_KEY = "the-admin-key"
_HEADERS = {"Authorization": f"Bearer {_KEY}"}
_NO_LIMITS = httpx.Limits(max_connections=None)


class NotReached(Exception):
    """A configuration that wasn't what it is named after, such as a kill after the end."""


@attrs.define
class _Served:
    url: str
    process: psutil.Process
    client: httpx.Client

    def ask(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = self.client.post(f"{self.url}/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def control(self, path: str, **body: str) -> None:
        answer = self.client.post(self.url + path, json=body)
        assert answer.status_code == 200, answer.text

    def count(self, name: str) -> float:
        """Return the value of a metric, of all its labels together."""
        lines = self.client.get(f"{self.url}/metrics").text.splitlines()
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name)]
        return sum(values)

    def worker(self) -> psutil.Process:
        """Return the worker process."""
        children = self.process.children(recursive=True)
        return next(each for each in children if "gpu" in each.cmdline())


def run(configuration: Configuration, model: str) -> list[str]:
    """Return the facts of all probes in one configuration.

    Raises:
        NotReached: The configuration wasn't reached.
    """
    vocab_size = open_model(locate(model)).config.vocab_size
    asked = probes(vocab_size)
    with _serving(configuration, model) as served:
        if configuration.cache != "cold":
            for body in asked:
                served.ask(body)
        if configuration.cache == "host pages":
            seed = 100
            while not served.count("trioserve:kv_cache_offloaded_pages_total"):
                for body in others(vocab_size, seed)[:4]:
                    served.ask(body)
                seed += 1
        answers = _disturbed(configuration, served, asked, vocab_size)
        _check_reached(configuration, served, answers)
    return [facts_of(answer) for answer in answers]


def _disturbed(
    configuration: Configuration, served: _Served, asked: list[dict[str, Any]], vocab_size: int
) -> list[dict[str, Any]]:
    """Ask the probes in the company and with the disturbance of the configuration."""
    alone = configuration.company == "alone"
    with ThreadPoolExecutor(NUM_OTHERS + len(asked) + 1) as pool:
        before = served.count("trioserve:generation_tokens_total")
        disturbance = pool.submit(_disturb, configuration.disturbance, served, before)
        if alone:
            answers = [served.ask(body) for body in asked]
        else:
            together = [*asked, *others(vocab_size, 1)]
            answers = list(pool.map(served.ask, together))[: len(asked)]
        disturbance.result()
    return answers


def _disturb(disturbance: str, served: _Served, before: float) -> None:
    if disturbance not in ("worker killed", "paused"):
        return
    deadline = time.monotonic() + _TIMEOUT
    while served.count("trioserve:generation_tokens_total") < before + _TOKENS_BEFORE:
        assert time.monotonic() < deadline
    if disturbance == "worker killed":
        served.worker().kill()
    else:
        served.control("/pause_generation", mode="retract")
        served.control("/continue_generation")


def _check_reached(
    configuration: Configuration, served: _Served, answers: list[dict[str, Any]]
) -> None:
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    # A killed worker's cache is lost, and few pages keep little of it.
    loses = configuration.disturbance in ("worker killed", "preempted")
    reached = {
        "cold": True,
        "prefix hit": any(cached) or loses,
        "host pages": served.count("trioserve:kv_cache_onloaded_pages_total") > 0 or loses,
        "off": True,
        "suffix": served.count("trioserve:spec_decode_num_accepted_tokens_total") > 0,
        "ngram": served.count("trioserve:spec_decode_num_accepted_tokens_total") > 0,
        "draft_model": served.count("trioserve:spec_decode_num_accepted_tokens_total") > 0,
        "none": True,
        "preempted": served.count("trioserve:num_preemptions_total") > 0,
        "worker killed": served.count("trioserve:worker_restarts_total") > 0,
        "paused": True,
    }
    for value in (configuration.cache, configuration.speculation, configuration.disturbance):
        if not reached[value]:
            raise NotReached(f"{value} wasn't reached: {configuration}")


def _options(configuration: Configuration, model: str) -> list[str]:
    few = [_PAGES.get(value, _MANY_PAGES) for value in attrs.asdict(configuration).values()]
    options = {
        "--quantization": configuration.quantization,
        "--num-threads": configuration.threads,
        "--max-plans-in-flight": configuration.plans,
        "--data-parallel-size": configuration.workers,
        "--max-num-batched-tokens": configuration.chunks,
        "--api-server-count": configuration.front_ends,
        "--block-size": str(_PAGE_SIZE),
        "--max-model-len": str(_MAX_MODEL_LEN),
        "--num-gpu-blocks-override": str(min(few)),
    }
    if configuration.cache == "host pages":
        options["--kv-offloading-bytes"] = str(64 << 20)
    if configuration.speculation != "off":
        method = configuration.speculation
        drafts: dict[str, Any] = {"method": method, "adaptive": False, "prompt_lookup_min": 1}
        if method == "draft_model":
            drafts |= {"model": model, "num_speculative_tokens": 5}
        options["--speculative-config"] = json.dumps(drafts)
    return [word for pair in options.items() for word in pair]


@contextlib.contextmanager
def _serving(configuration: Configuration, model: str) -> Iterator[_Served]:
    """Serve the model by a process of its own, which is killed at the end."""
    command = [sys.executable, "-m", "trioserve", "serve", model, "--port", "0"]
    command += ["--dtype", "bfloat16", "--device", "cpu", "--admin-api-key", _KEY]
    command += _options(configuration, model)
    root = Path(__file__).parents[2]
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=root
        ) as process,
        httpx.Client(timeout=_TIMEOUT, limits=_NO_LIMITS, headers=_HEADERS) as client,
    ):
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[-1]
            yield _Served(url, psutil.Process(process.pid), client)
        finally:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
