"""A server at work, watched: no request makes it unpickle, evaluate, open or fetch anything.

Every process of it, the worker and the one that tries out grammars too, has an audit hook from its
first line on. Besides, what requests point to is watched: a listener, a file, a folder.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import httpx
import pytest

from tests.support.source_files import ROOT
from tests.support.tiny_models import make_tiny


class Bomb:
    """Unpickled, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@attrs.frozen
class Bait:
    """Targets of requests: a file, an address, and a folder that only code would make."""

    file: Path
    folder: Path
    url: str

    @property
    def pickled(self) -> str:
        return base64.b64encode(pickle.dumps(Bomb(self.folder))).decode()

    @property
    def expression(self) -> str:
        return f"__import__('os').mkdir({str(self.folder)!r})"


def chat(content: Any = "hello", **fields: Any) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": content}]
    return "/v1/chat/completions", {"messages": messages, "max_tokens": 2, **fields}


def generate(text: str = "hello", **fields: Any) -> tuple[str, dict[str, Any]]:
    parameters = {"max_new_tokens": 2, **fields.pop("sampling_params", {})}
    return "/generate", {"text": text, "sampling_params": parameters, **fields}


def requests_with(bait: Bait) -> Iterator[tuple[str, dict[str, Any]]]:
    """Requests that other servers have fetched, opened, unpickled or evaluated something for."""
    template = (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}{% include '" + str(bait.file) + "' %}"
    )
    for target in (bait.url, f"file://{bait.file}", str(bait.file)):
        for kind in ("image_url", "video_url", "audio_url", "input_audio", "file"):
            yield chat([{"type": kind, kind: {"url": target}}])
        yield chat(target, model=target)
        yield chat(documents=[{"url": target}], tools=[_tool({"$ref": target})])
        schema = {"type": "object", "properties": {"a": {"$ref": target}}}
        for wanted in ({"$ref": target}, schema, {"$schema": target, "$id": target, **schema}):
            format_ = {"type": "json_schema", "json_schema": {"name": "a", "schema": wanted}}
            yield chat(response_format=format_)
            yield chat(tools=[_tool(wanted)], tool_choice="required")
            yield generate(sampling_params={"json_schema": json.dumps(wanted)})
        for grammar in (f"%import {target}\nstart: /a/", f'start: <{target}>\n%include "{target}"'):
            yield chat(structured_outputs={"grammar": grammar})
        yield chat(chat_template=target, chat_template_kwargs={"x": target})
        yield chat(mm_processor_kwargs={"url": target}, media_io_kwargs={"path": target})
        yield chat(vllm_xargs={"path": target}, cache_salt=target, metadata={"url": target})
        yield chat(kv_transfer_params={"remote_host": target}, bootstrap_host=target)
        yield chat(lora_path=target)
        for name in ("image_data", "audio_data", "video_data", "encoder_urls", "lora_path"):
            yield generate(**{name: target})
        yield generate(external_trace_header={"traceparent": target}, rid=target[:100])
        yield "/v1/completions", {"prompt": target, "max_tokens": 2, "model": target}
        yield "/v1/completions", {"prompt": target, "max_tokens": 2, "suffix": target}
        yield "/tokenize", {"prompt": target, "model": target}
    for code in (bait.pickled, bait.expression, template, "{% for x in range(9**9) %}{% endfor %}"):
        yield chat(code)
        yield chat(logits_processors=[code], chat_template=code)
        yield chat(logits_processors=[{"qualname": "os.system", "args": [code]}])
        yield chat(chat_template_kwargs={"messages": code, "x": code, code[:60]: code})
        yield chat(tools=[_tool({"default": code, "description": code})], tool_choice="auto")
        yield generate(code, custom_logit_processor=code)
        yield generate(sampling_params={"custom_params": {"code": code}, "stop": [code[:100]]})
        yield "/v1/completions", {"prompt": code, "max_tokens": 2, "vllm_xargs": {"code": code}}
    for pattern in ("(a+)+$", "(?{print(1)})", r"(?P<x>a)(?P=x)", "(" * 500, "a{1000}{1000}"):
        yield chat("a" * 50, stop_regex=pattern)
        yield chat(structured_outputs={"regex": pattern})


def _tool(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


@attrs.frozen
class Event:
    """Actions of a process; ``warm`` once every kind of request has come."""

    process: int
    name: str
    arguments: list[str]
    warm: bool


FETCHES = {
    *("socket.connect", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname"),
    *("urllib.Request", "http.client.connect", "ftplib.connect"),
}
RUNS = {"os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "pty.spawn"}
WHEN_WARM = {"compile", "exec", "marshal.loads", "ctypes.dlopen"}
"""Actions of imports too, which end when every kind of request has come once."""


def faults_of(events: list[Event], bait: Bait) -> list[str]:
    """Return what the processes did that no request may make them do."""
    faults = []
    for event in events:
        shown = f"{event.name} {event.arguments}"[:300]
        text = " ".join(event.arguments)
        opened = event.name == "open" and str(bait.file) in text
        written = event.name == "open" and _writes(*event.arguments)
        started = event.name == "subprocess.Popen" and "grammar_trial" not in text
        bad = event.name in FETCHES | RUNS | {"pickle.find_class"} or opened or written or started
        if bad or (event.warm and event.name in WHEN_WARM):
            faults.append(shown)
    return faults


def _writes(path: str, mode: str, flags: str) -> bool:
    """Return whether a regular file is opened for writing, or made."""
    made = int(flags) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    return bool(made) and not path.isdigit() and not path.startswith("/dev/")


@contextlib.contextmanager
def audited(model: str, log: Path, *options: str) -> Iterator[tuple[str, Any]]:
    """Open a server whose processes are watched: its URL, and what marks a point in the log."""
    environment = {
        **os.environ,
        "AUDIT_LOG": str(log),
        "PYTHONPATH": os.pathsep.join(
            (str(ROOT / "tests" / "support" / "audited_python"), str(ROOT))
        ),
    }
    with subprocess.Popen(
        [sys.executable, "-m", "tests.support.audited_server", model, *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        url = process.stdout.readline().strip()

        def mark() -> None:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "marked\n"

        try:
            yield url, mark
        finally:
            process.stdin.close()
            assert process.wait(120) == 0


def events_of(log: Path) -> list[Event]:
    """Return what was done since the first mark; after the second, imports are over."""
    marks, events = 0, []
    for line in log.read_text().splitlines():
        process, name, arguments = json.loads(line)
        marks += name == "mark"
        if marks and name != "mark":
            events.append(Event(process, name, arguments, warm=marks > 1))
    return events


def answers_to(url: str, bait: Bait) -> list[tuple[str, dict[str, Any], int, str]]:
    """Send everything; each answer is one that a client is to blame for, or a success."""
    answers = []
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        for path, body in requests_with(bait):
            response = client.post(path, json=body)
            assert response.status_code in (200, 400, 404), (path, body, response.text)
            assert "Traceback" not in response.text
            answers.append((path, body, response.status_code, response.text))
        for name in ("../../etc/passwd", f"file://{bait.file}", bait.url):
            assert client.get(f"/v1/models/{name}").status_code == 404
    return answers


@contextlib.contextmanager
def baited(folder: Path) -> Iterator[tuple[Bait, socket.socket]]:
    """Open a bait, with a listener behind its URL."""
    file = folder / "bait.json"
    file.write_text('{"type": "integer"}')
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/bait.json"
        yield Bait(file, folder / "code-ran", url), listener


def was_called(listener: socket.socket) -> bool:
    try:
        listener.accept()[0].close()
    except BlockingIOError:
        return False
    return True


@pytest.mark.parametrize("kind", ["fake", "real"])
def test_requests_fetch_open_unpickle_and_evaluate_nothing(kind: str, tmp_path: Path) -> None:
    model = kind if kind == "fake" else str(make_tiny("llama2", tmp_path / "model"))
    log = tmp_path / "audit"
    with baited(tmp_path) as (bait, listener):
        with audited(model, log) as (url, mark):
            mark()
            answers = answers_to(url, bait)
            mark()
            answers += answers_to(url, attrs.evolve(bait, url=bait.url + "?again"))
        assert not was_called(listener)
    assert not bait.folder.exists()
    events = events_of(log)
    assert faults_of(events, bait) == []
    assert '"open"' in log.read_text(), "the audit saw nothing at all"
    statuses = [status for _, _, status, _ in answers]
    assert statuses.count(200) > 20
    assert statuses.count(400) > 100
    if kind == "real":
        elsewhere = [status for _, body, status, _ in answers if asks_for_schema_elsewhere(body)]
        assert set(elsewhere) == {400}, "such a schema is refused, not left out"


def asks_for_schema_elsewhere(body: dict[str, Any]) -> bool:
    """Return whether the output is to follow a schema at an address."""
    parameters = body.get("sampling_params", {})
    held = "response_format" in body or "json_schema" in parameters
    held = held or body.get("tool_choice") == "required"
    text = json.dumps(body)
    return held and "$ref" in text and "$id" not in text


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("pickle", "pickle.find_class"),
        ("eval", "compile"),
        ("fetch", "urllib.Request"),
        ("open", "open"),
        ("run", "subprocess.Popen"),
    ],
)
def test_the_audit_finds_what_is_planted(
    kind: str, fault: str, planted_faults: dict[str, list[str]]
) -> None:
    assert any(found.startswith(fault) for found in planted_faults[kind])


@pytest.fixture(scope="module")
def planted_faults(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    folder = tmp_path_factory.mktemp("planted")
    faults = {}
    with baited(folder) as (bait, listener):
        planted = {
            "pickle": bait.pickled,
            "eval": "1 + 1",
            "fetch": bait.url,
            "open": str(bait.file),
            "run": "/bin/true",
        }
        log = folder / "audit"
        with audited("fake", log, "plant") as (url, mark):
            mark()
            mark()
            for kind, value in planted.items():
                before = len(log.read_text().splitlines())
                httpx.post(
                    f"{url}/v1/completions",
                    json={"prompt": f"PLANT:{kind}|{value}|", "max_tokens": 1},
                    timeout=30,
                )
                lines = log.read_text().splitlines()[before:]
                events = [Event(*json.loads(line), warm=True) for line in lines]
                faults[kind] = faults_of(events, bait)
        assert was_called(listener)
    assert bait.folder.exists()
    return faults
