"""The thorough tests passed with the kernels and the tests of kernels that are here."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.thorough import NOTE, ROOT, SOURCES, digest


def test_the_kernels_passed_the_thorough_tests() -> None:
    assert NOTE.read_text().strip() == digest(), (
        "kernels or their tests have changed: run python -m nox -s thorough"
    )


def test_any_change_is_noticed(tmp_path: Path) -> None:
    for pattern in SOURCES:
        first = min(file for file in ROOT.glob(pattern) if file.is_file())
        copy = tmp_path / first.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        before = digest(tmp_path)
        shutil.copy(first, copy)
        copied = digest(tmp_path)
        copy.write_bytes(first.read_bytes() + b" ")
        assert len({before, copied, digest(tmp_path)}) == 3
