"""The programs in the documentation run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXPECTED = {
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
    "observability": [("4 tokens of prompts, 4 of outputs, 0 records lost",)],
    "embeddings": [
        ("(3, 384)", "0.7"),
        ("France is a country",),
        ("[(0,",),
        ("Thank you so much! yes 0.", "Go away. yes 0."),
    ],
    "lora": [
        (
            "an untrained adapter says the same: True",
            "a wild one says the same: False",
            "loaded: ['untrained']",
        )
    ],
    "operating": [
        ("paused with 1 request", "the city of"),
        ("the weights that serve: step 1200", "60 tokens, none of them twice"),
        ("a worker is there: False", "and it computes: "),
    ],
    "sessions": [("3 turns, ",)],
    "shutdown": [("requests that were cut off: 0",)],
}
"""What each program of a page prints, in parts."""


def programs_of(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / f"{page}.md").read_text(), re.S)


def test_every_program_is_run() -> None:
    for path in (ROOT / "docs").glob("*.md"):
        programs = programs_of(path.stem)
        if any("trio.run(" in program for program in programs):
            assert len(programs) == len(EXPECTED[path.stem]), path.stem


@pytest.mark.parametrize(
    ("page", "number"),
    [(page, number) for page, parts in EXPECTED.items() for number in range(len(parts))],
)
def test_a_program_runs_as_it_stands(page: str, number: int, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(programs_of(page)[number])
    done = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    for text in EXPECTED[page][number]:
        assert text in done.stdout
