"""Torch in place of the compiled kernels: what is said of it, and how its threads wait."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.doc_blocks import ROOT
from tests.support.tiny_models import make_tiny
from trioserve.workers.command import worker_command

PROGRAM = """
import sys
import trioserve

if __name__ == "__main__":
    with trioserve.LLM(sys.argv[1]) as llm:
        print(llm.generate([1, 2, 3], max_tokens=2, progress=False)[0].finish_reason)
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("smollm2", tmp_path_factory.mktemp("tiny"), head_dim=32)


@pytest.mark.parametrize(
    "arguments",
    [
        ("-m", "trioserve", "generate", "--max-tokens", "2", "MODEL", "One"),
        ("-c", PROGRAM, "MODEL"),
    ],
    ids=["generate", "LLM"],
)
def test_a_machine_without_compiled_kernels_is_told_once(
    tiny: Path, arguments: tuple[str, ...]
) -> None:
    """Name the way to a compiler, or the instructions that the processor lacks."""
    done = subprocess.run(
        [sys.executable, *[str(tiny) if each == "MODEL" else each for each in arguments]],
        cwd=ROOT,
        env={**os.environ, "CXX": "no-such-compiler"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "compiled kernels" in line]
    assert "which are 2 to 4 times as fast: " in line
    assert "apt install g++" in line or "the processor has no " in line


def test_threads_of_torch_do_not_wait_out_a_time_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the user says how they wait."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    _, environment = worker_command("ipc:///nowhere")
    # What libgomp says of itself when torch loads it: its own default is 300,000.
    done = subprocess.run(
        [sys.executable, "-c", "import torch"],
        env={**environment, "OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "GOMP_SPINCOUNT = '3000'" in done.stderr
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert worker_command("ipc:///nowhere")[1]["GOMP_SPINCOUNT"] == "7"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert "GOMP_SPINCOUNT" not in worker_command("ipc:///nowhere")[1]
