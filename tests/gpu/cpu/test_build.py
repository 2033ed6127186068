"""Building the CPU's kernels: what is kept, what is built again, and what is said when it fails."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gpu._util import private_files
from gpu._util.private_files import NotPrivateError, check_private, make_private_folder
from gpu.cpu import build as building
from gpu.cpu.build import LibraryBuildError, build, is_temporary
from gpu.cpu.library import load_library
from tests.support.tiny_models import make_tiny
from trioserve.protocol.machine import compiler_version

pytestmark = pytest.mark.skipif(compiler_version() is None, reason="no C++ compiler")


ISAS = ("avx2",)


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


def test_all_sources_are_in_the_library(sources: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    library = build(
        ISAS,
        lambda done, total: seen.append((done, total)),
        sources=sources,
        folder=tmp_path / "cache",
    )
    assert call(library, "one") == call(library, "two") == 7
    assert seen == [(0, 2), (1, 2), (2, 2)]
    assert not is_temporary(library)
    kept = sorted(path.suffix for path in (tmp_path / "cache").iterdir())
    assert kept == ["", ".sha256", ".so"]  # and the lock


def test_a_library_is_found_again(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build(ISAS, sources=sources, folder=tmp_path)
    monkeypatch.setattr(building, "_build", None)  # would fail if it were called
    assert build(ISAS, sources=sources, folder=tmp_path) == first


def test_a_damaged_library_is_built_again(sources: Path, tmp_path: Path) -> None:
    library = build(ISAS, sources=sources, folder=tmp_path)
    library.write_bytes(library.read_bytes()[:-100])
    assert build(ISAS, sources=sources, folder=tmp_path) == library
    assert call(library) == 7


def plant(library: Path) -> None:
    """Put another library in the place of ``library``, and its digest beside it."""
    planted = library.with_name("planted.cpp")
    planted.write_text('extern "C" int one() { return 13; }\n')
    subprocess.run(["g++", "-shared", "-fPIC", planted, "-o", library], check=True)
    digest = hashlib.sha256(library.read_bytes()).hexdigest()
    library.with_suffix(".sha256").write_text(digest)


@pytest.mark.parametrize("opened", ["file", "folder", "parent"])
@pytest.mark.parametrize("mode", [0o777, 0o757])
def test_a_planted_library_is_not_loaded(
    opened: str,
    mode: int,
    sources: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = tmp_path / "cache" / "cpu"
    library = build(ISAS, sources=sources, folder=folder)
    plant(library)
    found = {"file": library, "folder": folder, "parent": folder.parent}[opened]
    found.chmod(mode)
    again = build(ISAS, sources=sources, folder=folder)
    assert call(again) == 7
    if opened == "file":
        assert again == library
        assert not library.stat().st_mode & 0o022
    else:
        assert is_temporary(again)
        assert f"other users can write to {found} (chmod go-w" in caplog.text


def test_a_planted_folder_of_another_user_is_not_used(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache"
    library = build(ISAS, sources=sources, folder=folder)
    plant(library)
    if os.geteuid() == 0:
        os.chown(folder, 4242, 4242)
    else:
        owner = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(NotPrivateError, match=r"belongs to another user \(id \d+\)"):
        check_private(library)
    if os.geteuid() == 0:
        again = build(ISAS, sources=sources, folder=folder)
        assert is_temporary(again)
        assert call(again) == 7


class TestPrivateFiles:
    def test_links_are_followed_step_by_step(self, tmp_path: Path) -> None:
        private, open_folder = tmp_path / "private", tmp_path / "open"
        private.mkdir(mode=0o700)
        open_folder.mkdir()
        (private / "file").write_text("")
        (open_folder / "link").symlink_to("../private/file")
        (private / "way").symlink_to(open_folder / "link")
        check_private(private / "way")
        open_folder.chmod(0o777)
        check_private(private / "file")
        with pytest.raises(NotPrivateError, match=f"write to {open_folder} "):
            check_private(private / "way")

    def test_links_in_a_circle(self, tmp_path: Path) -> None:
        (tmp_path / "a").symlink_to("b")
        (tmp_path / "b").symlink_to("a")
        with pytest.raises(OSError, match="symbolic links"):
            check_private(tmp_path / "a")

    def test_a_folder_like_tmp(self, tmp_path: Path) -> None:
        shared = tmp_path / "shared"
        shared.mkdir()
        shared.chmod(0o1777)
        make_private_folder(shared / "own" / "deep")
        check_private(shared / "own" / "deep")
        with pytest.raises(NotPrivateError):
            check_private(shared)

    def test_a_group_of_others(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(private_files, "_is_own_group", lambda group: False)
        tmp_path.chmod(0o770)
        with pytest.raises(NotPrivateError):
            check_private(tmp_path)
        monkeypatch.setattr(private_files, "_is_own_group", lambda group: True)
        check_private(tmp_path)


def test_a_change_of_source_or_instruction_set_makes_another(sources: Path, tmp_path: Path) -> None:
    first = build(ISAS, sources=sources, folder=tmp_path)
    (sources / "seven.h").write_text("inline int seven() { return 8; }\n")
    second = build(ISAS, sources=sources, folder=tmp_path)
    assert call(second) == 8
    third = build(["avx512"], sources=sources, folder=tmp_path)
    assert third.name.startswith("kernels-avx512-")
    assert len({first, second, third}) == 3


def test_a_source_that_is_refused(sources: Path, tmp_path: Path) -> None:
    (sources / "two.cpp").write_text("int two() { return nothing; }\n")
    with pytest.raises(LibraryBuildError, match=r"status 1: .*two\.cpp:1:.*nothing") as caught:
        build(ISAS, sources=sources, folder=tmp_path / "cache")
    assert "\n" not in str(caught.value)
    (lock,) = (tmp_path / "cache").iterdir()
    assert lock.name.startswith(".lock-")


def test_a_compiler_that_is_broken(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\n[ $1 = -dumpfullversion ] && exec echo 1.2\nexit 3\n")
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(LibraryBuildError, match="broken failed with status 3: nothing"):
        build(ISAS, sources=sources, folder=tmp_path)


def test_no_compiler(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(LibraryBuildError, match=r"no C\+\+ compiler: install"):
        build(ISAS, sources=sources, folder=tmp_path)


def test_a_folder_that_cannot_be_made(
    sources: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    library = build(ISAS, sources=sources, folder=tmp_path / "file" / "cache")
    assert is_temporary(library)
    assert call(library) == 7
    assert "can't be kept" in caplog.text
    shutil.rmtree(library.parent)


def test_two_at_once_build_once(sources: Path, tmp_path: Path) -> None:
    compiled = []
    libraries = []

    def one() -> None:
        libraries.append(
            build(ISAS, lambda *_: compiled.append(1), sources=sources, folder=tmp_path)
        )

    threads = [threading.Thread(target=one) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(libraries)) == 1
    assert len(libraries) == 3
    assert len(compiled) == 3  # (0, 2), (1, 2) and (2, 2), of one of them


def test_a_builder_that_was_killed_leaves_nobody_waiting(sources: Path, tmp_path: Path) -> None:
    library = build(ISAS, sources=sources, folder=tmp_path)
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
    assert call(build(ISAS, sources=sources, folder=tmp_path)) == 7
    holder.wait()
    timer.join()


def test_what_a_killed_builder_left_is_removed(sources: Path, tmp_path: Path) -> None:
    library = build(ISAS, sources=sources, folder=tmp_path)
    library.unlink()
    left, of_another = tmp_path / f".{library.stem}-abc", tmp_path / ".kernels-0123-abc"
    for folder in (left, of_another):
        folder.mkdir()
        (folder / "one.o").touch()
    assert build(ISAS, sources=sources, folder=tmp_path) == library
    assert not left.exists()
    assert of_another.exists()


def test_a_compiler_with_arguments(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "env SOME=thing g++ -g0")
    assert call(build(ISAS, sources=sources, folder=tmp_path)) == 7


def test_a_compiler_that_is_no_program(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = tmp_path / "odd"
    odd.write_bytes(b"\0\1\2")
    odd.chmod(0o755)
    for name in (str(odd), "g++ 'without an end"):
        monkeypatch.setenv("CXX", name)
        with pytest.raises(LibraryBuildError, match=r"no C\+\+ compiler"):
            build(ISAS, sources=sources, folder=tmp_path)


def test_a_user_without_a_home(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def homeless(_: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", homeless)
    library = build(ISAS, sources=sources)
    assert is_temporary(library)
    shutil.rmtree(library.parent)
    with pytest.raises(LibraryBuildError, match="no home: set XDG_CACHE_HOME"):
        building.built(ISAS)


FULL = """
import resource, sys
from gpu.cpu.compiled import CompiledModel
from gpu.cpu.library import load_library
from gpu.cpu.sampling import CompiledSampler
from trioserve.protocol.errors import ModelLoadError
from trioserve.model_files import open_model
from pathlib import Path
library, config = load_library(), open_model(Path(sys.argv[1])).config
used = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + (100 << 20),) * 2)
for make in (
    lambda: CompiledModel(library, config, "none", 64),
    lambda: CompiledSampler(library, 300, 64),
):
    try:
        make()
    except ModelLoadError as error:
        print(error)
"""


def test_no_room_for_another_thread_is_an_error(tmp_path: Path) -> None:
    """Refuse a thread its stack: the threads started before end, and the process goes on."""
    try:
        load_library()
    except LibraryBuildError as error:
        pytest.skip(f"no compiled kernels: {error}")
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(make_tiny("qwen3", tmp_path))],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("no room for 64 threads: free some memory, or lower --num") == 2
