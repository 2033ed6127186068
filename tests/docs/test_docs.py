"""The programs in the documentation run as they stand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.doc_blocks import ROOT, Block, blocks

EXPECTED: dict[str, list[tuple[str, ...]]] = {
    "README": [(), (" ",)],
    "benchmarking": [("ms to the first token",)],
    "options": [()],
    "structured-concurrency": [
        ("both run\ntwo has counted\none has counted\nboth have ended\n",),
        ("sequences that run: 0\n",),
    ],
    "tutorial": [
        ("The capital of France is Paris",),
        ("Once upon a time", "The sea was", "In the city", "all told"),
        ("cut off: True\n", "sequences that still run: 0\n"),
        (" is in ",),
    ],
    "web-app": [("read '", "sequences that run: 0")],
    "quickstart": [()],
    "api": [("0: ", "1: ", "done")],
    "embedding": [
        ("Once upon a time", "The sea was", "In the city", "Paris"),
        ("serving at http://127.0.0.1:",),
        ("France is Paris",),
    ],
    "from-tensorrt-llm": [("France: Paris", "done: True True True")],
    "kv-cache": [
        ("found 2", "pages given away:"),
        ("found 3", "offloaded: "),
    ],
    "live": [("France: finished, ", "Italy: finished, ", "pages are held")],
    "observability": [("4 tokens of prompts, 4 of outputs, 0 records lost",)],
    "embeddings": [
        ("(3, 384)", "0.7"),
        ("France is a country",),
        ("[(0,",),
        ("Thank you so much! yes 0.", "Go away. yes 0."),
    ],
    "output-tensors": [("(5, 576) (3, 576)\nTrue\n",), ("context_logits (5, 49152)", "(3, 576)")],
    "prompt-embeds": [("4 tokens in the prompt",), ("4 embeddings, 8 tokens",)],
    "lora": [
        (
            "an untrained adapter says the same: True",
            "a wild one says the same: False",
            "loaded: ['untrained']",
        )
    ],
    "other-frameworks": [
        ("requests that run: 0",),
        ("requests that run: 0",),
        ("RGB color model", " Paris"),
        ("requests that run: 0",),
    ],
    "operating": [
        ("paused with 1 request", "the city of"),
        ("the weights that serve: step 1200", "60 tokens, none of them twice"),
        ("a worker is there: False", "and it computes: "),
    ],
    "sessions": [("3 turns, ",)],
    "beam-search": [("Paris",)],
    "shutdown": [("requests that were cut off: 0",)],
}
"""Outputs of each page's programs, in parts."""
ELSEWHERE = {
    "dialects": ("clients/test_anthropic.py", "clients/test_ollama.py"),
    "logits-processors": ("docs/test_processor.py",),
    "responses": ("clients/test_openai_responses.py",),
    "simulation": ("testing/test_virtual.py",),
    "speech": ("engine/test_speech.py",),
    "tools": ("clients/test_openai.py",),
}
"""Pages whose programs other tests run, with what is particular about them."""
SERVER = "http://127.0.0.1:8000"
"""Address in the pages' programs and commands; ``test_server.py`` serves there."""


def expected_programs(*, asking: bool) -> list[tuple[Block, tuple[str, ...]]]:
    """Return the programs of EXPECTED and their outputs: those that ask a server, or the rest."""
    return [
        (block, EXPECTED[block.page][block.number])
        for block in blocks("python")
        if block.page in EXPECTED and asking == (SERVER in block.text)
    ]


def run_program(text: str, folder: Path, *arguments: str) -> str:
    """Return what a program prints."""
    program = folder / "program.py"
    program.write_text(text)
    done = subprocess.run(
        [sys.executable, str(program), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("block", "texts"), expected_programs(asking=False), ids=str)
def test_a_program_runs_as_it_stands(block: Block, texts: tuple[str, ...], tmp_path: Path) -> None:
    printed = run_program(block.text, tmp_path)
    for text in texts:
        assert text in printed
