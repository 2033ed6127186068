"""``transformers serve`` with continuous batching, in an environment of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from bench.hf_folder import write_folder
from bench.servers import MODEL, Server

__all__ = ["transformers_server"]

_REQUIREMENTS = Path(__file__).with_name("requirements-transformers.txt")
# Where peers and what they need are kept between runs.
_KEPT = Path(__file__).parents[1] / ".peers"

_ASK_VERSIONS = """
import importlib.metadata, json, sys
print(json.dumps({"python": sys.version.split()[0], **{
    name: importlib.metadata.version(name) for name in ("transformers", "torch")}}))
"""


def transformers_server(dtype: str, python: str | None = None) -> Server:
    """The peer on the default model, of which a Hugging Face folder is written first.

    ``python`` is that of an environment that has it; by default one is made, which takes minutes.
    """
    python = python or _environment()
    folder = write_folder(MODEL, _KEPT / f"{MODEL}-bfloat16")
    versions = subprocess.run(
        [python, "-c", _ASK_VERSIONS], check=True, capture_output=True, text=True
    )
    return Server(
        name="transformers",
        argv=lambda port: [
            *(python, "-m", "transformers.cli.transformers", "serve", str(folder)),
            *("--continuous-batching", "--device", "cpu", "--dtype", dtype),
            *("--host", "127.0.0.1", "--port", str(port)),
        ],
        # Its last event always has the usage, and nothing in its folder ends a sequence.
        fields={"temperature": 0},
        versions=json.loads(versions.stdout),
        env={"HF_HUB_OFFLINE": "1"},
    )


def _environment() -> str:
    """The python of the peer's environment, made anew when its requirements have changed."""
    folder = _KEPT / "transformers"
    python = folder / "bin" / "python"
    note = folder / "installed.txt"
    wanted = f"{sys.version}\n{_REQUIREMENTS.read_text()}"
    if not (note.exists() and note.read_text() == wanted):
        print(f"installing {_REQUIREMENTS.name}, torch included: some minutes", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--requirement", str(_REQUIREMENTS)], check=True)
        note.write_text(wanted)
    return str(python)
