"""Building the CPU's kernels: what is kept, what is built again, and what is said when it fails."""

from __future__ import annotations

import ctypes
import shutil
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gpu.cpu import build as building
from gpu.cpu.build import BuildError, build, is_temporary
from trioserve.machine import Machine, compiler_version

pytestmark = pytest.mark.skipif(compiler_version() is None, reason="no C++ compiler")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine that has the instructions, wherever the test runs."""
    root = tmp_path / "machine"
    (root / "proc").mkdir(parents=True)
    flags = "fpu avx2 avx512f avx512_bf16 avx512_vnni"
    (root / "proc/cpuinfo").write_text(f"model name : One\nflags : {flags}\n")
    return Machine(root)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "seven.h").write_text("inline int seven() { return 7; }\n")
    for name in ("one", "two"):
        text = f'#include "seven.h"\nextern "C" int {name}() {{ return seven(); }}\n'
        (folder / f"{name}.cpp").write_text(text)
    return folder


def call(library: Path, name: str = "one") -> int:
    return int(getattr(ctypes.CDLL(str(library)), name)())


def test_all_sources_are_in_the_library(sources: Path, machine: Machine, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    library = build(
        lambda done, total: seen.append((done, total)),
        sources=sources,
        folder=tmp_path / "cache",
        machine=machine,
    )
    assert call(library, "one") == call(library, "two") == 7
    assert seen == [(0, 2), (1, 2), (2, 2)]
    assert not is_temporary(library)
    kept = sorted(path.suffix for path in (tmp_path / "cache").iterdir())
    assert kept == ["", ".sha256", ".so"]  # and the lock


def test_a_library_is_found_again(
    sources: Path, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build(sources=sources, folder=tmp_path, machine=machine)
    monkeypatch.setattr(building, "_build", None)  # would fail if it were called
    assert build(sources=sources, folder=tmp_path, machine=machine) == first


def test_a_damaged_library_is_built_again(sources: Path, machine: Machine, tmp_path: Path) -> None:
    library = build(sources=sources, folder=tmp_path, machine=machine)
    library.write_bytes(library.read_bytes()[:-100])
    assert build(sources=sources, folder=tmp_path, machine=machine) == library
    assert call(library) == 7


def test_a_change_of_source_or_processor_makes_another(
    sources: Path, machine: Machine, tmp_path: Path
) -> None:
    first = build(sources=sources, folder=tmp_path, machine=machine)
    (sources / "seven.h").write_text("inline int seven() { return 8; }\n")
    second = build(sources=sources, folder=tmp_path, machine=machine)
    assert call(second) == 8
    cpuinfo = machine.root / "proc/cpuinfo"
    cpuinfo.write_text(cpuinfo.read_text().replace("fpu", "fpu sse9"))
    third = build(sources=sources, folder=tmp_path, machine=machine)
    assert len({first, second, third}) == 3


def test_a_source_that_is_refused(sources: Path, machine: Machine, tmp_path: Path) -> None:
    (sources / "two.cpp").write_text("int two() { return nothing; }\n")
    with pytest.raises(BuildError, match=r"status 1: .*two\.cpp:1:.*nothing") as caught:
        build(sources=sources, folder=tmp_path / "cache", machine=machine)
    assert "\n" not in str(caught.value)
    (lock,) = (tmp_path / "cache").iterdir()
    assert lock.name.startswith(".lock-")


def test_a_compiler_that_is_broken(
    sources: Path, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\n[ $1 = -dumpfullversion ] && exec echo 1.2\nexit 3\n")
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(BuildError, match="broken failed with status 3: nothing"):
        build(sources=sources, folder=tmp_path, machine=machine)


def test_no_compiler(
    sources: Path, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match=r"no C\+\+ compiler: install"):
        build(sources=sources, folder=tmp_path, machine=machine)


def test_a_processor_without_the_instructions(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("flags : avx2 avx512f\n")
    with pytest.raises(BuildError, match="has no avx512_bf16, avx512_vnni"):
        build(sources=sources, folder=tmp_path, machine=Machine(tmp_path))


def test_a_folder_that_cannot_be_made(
    sources: Path, machine: Machine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    library = build(sources=sources, folder=tmp_path / "file" / "cache", machine=machine)
    assert is_temporary(library)
    assert call(library) == 7
    assert "can't be kept" in caplog.text
    shutil.rmtree(library.parent)


def test_two_at_once_build_once(sources: Path, machine: Machine, tmp_path: Path) -> None:
    compiled = []
    libraries = []

    def one() -> None:
        libraries.append(
            build(lambda *_: compiled.append(1), sources=sources, folder=tmp_path, machine=machine)
        )

    threads = [threading.Thread(target=one) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(libraries)) == 1
    assert len(libraries) == 3
    assert len(compiled) == 3  # (0, 2), (1, 2) and (2, 2), of one of them


def test_a_builder_that_was_killed_leaves_nobody_waiting(
    sources: Path, machine: Machine, tmp_path: Path
) -> None:
    library = build(sources=sources, folder=tmp_path, machine=machine)
    (lock,) = tmp_path.glob(".lock-*")
    library.unlink()
    program = (
        "import fcntl, sys\n"
        f"fcntl.flock(open({str(lock)!r}, 'w'), fcntl.LOCK_EX)\n"
        "print('locked', flush=True)\n"
        "sys.stdin.read()\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"locked\n"
    timer = threading.Timer(0.2, holder.kill)
    timer.start()
    assert call(build(sources=sources, folder=tmp_path, machine=machine)) == 7
    holder.wait()
    timer.join()
