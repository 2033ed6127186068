"""The programs in the documentation run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROGRAMS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "embedding.md").read_text(), re.S)
EXPECTED = [
    ("Once upon a time", "The sea was", "In the city", "Paris"),
    ("serving at http://127.0.0.1:",),
    ("France is Paris",),
]
"""What each program prints, in parts."""


def test_there_are_three_programs() -> None:
    assert len(PROGRAMS) == len(EXPECTED) == 3


@pytest.mark.parametrize("number", range(3))
def test_a_program_of_the_embedding_page(number: int, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAMS[number])
    done = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    for text in EXPECTED[number]:
        assert text in done.stdout
