"""The first start as a new user sees it: progress, then how to use the server."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import urllib.request
from pathlib import Path

from tests.support.doc_blocks import ROOT
from tests.support.pseudo_terminals import person_at
from tests.support.tiny_encoders import make_encoder
from trioserve.cli.welcome import welcome
from trioserve.config import EngineConfig, ServerConfig

URL = "http://127.0.0.1:8000"
COMMAND = [sys.executable, "-m", "trioserve", "serve", "--mock-worker", "1ms", "--port", "0"]


def told(model: str = "smollm2-135m", url: str = URL, **options: object) -> list[str]:
    return welcome(ServerConfig(engine=EngineConfig(model), **options), url)  # type: ignore[arg-type]


def test_the_console_and_a_first_request() -> None:
    console, request, end = told()
    assert console == f"Console: {URL}/console"
    assert request.startswith(f"Try: curl {URL}/v1/chat/completions ")
    assert end.startswith("Ctrl-C")
    assert told(url="unix:/tmp/socket") == []
    assert "Bearer KEY" in told(api_key=("secret",))[1]
    assert "secret" not in "".join(told(api_key=("secret",)))
    assert told(console=False)[0].startswith("Try: ")


def test_an_encoder_is_asked_to_embed(tmp_path: Path) -> None:
    folder = make_encoder("bert", tmp_path)
    assert f"curl {URL}/v1/embeddings " in told(str(folder))[1]


def test_a_model_of_speech_is_asked_to_transcribe(tmp_path: Path) -> None:
    names = {"architectures": ["WhisperForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(names))
    line = told(str(tmp_path))[1]
    assert line == f"Try: curl {URL}/v1/audio/transcriptions -F file=@speech.wav"


def test_the_request_that_a_terminal_shows_is_answered() -> None:
    with person_at(COMMAND) as person:
        person.wait_for("Serving smollm2-135m at http://")
        person.wait_for("Console: ")
        url = person.wait_for("/console")
        person.wait_for("Try: ")
        words = shlex.split(re.sub(r"\s*\r\n", "", person.wait_for("Ctrl-C stops it.")))
        body = words[words.index("-d") + 1].encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(words[1], data=body, headers=headers)
        with urllib.request.urlopen(request) as response:
            assert json.load(response)["choices"][0]["message"]["content"]
        assert words[1].startswith(url)
        person.type("\x03")
        assert person.wait() == 0


def test_a_pipe_gets_one_line() -> None:
    with subprocess.Popen(COMMAND, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("Serving smollm2-135m at http://127.0.0.1:")
        process.terminate()
        assert process.stdout.read() == ""


def test_nothing_looks_like_an_error_and_pip_is_not_silent() -> None:
    """nox says "uv binary not found" where there is none, whatever environments it is to make."""
    text = (ROOT / "noxfile.py").read_text()
    assert '"install", "--quiet"' not in text
    # nox itself is in the environment of the Python that runs it.
    program = """
import logging, sys, types

sys.modules["nox"] = types.SimpleNamespace(
    options=types.SimpleNamespace(), session=lambda function: function, Session=object
)
import noxfile

logging.basicConfig(level=logging.INFO)
logging.getLogger("nox").info("uv binary not found.")
logging.getLogger("nox").info("shown")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "shown" in done.stderr
    assert "uv binary" not in done.stderr
