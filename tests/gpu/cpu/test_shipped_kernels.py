"""Kernels that come compiled in a wheel, and the compilers that take their place."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu.cpu.build import ISAS_OF, KERNELS, LibraryBuildError, _in_words_of, build, built
from gpu.cpu.isa import ISAS
from gpu.cpu.wheel_kernels import compile_for_wheel
from tests.support.doc_blocks import ROOT
from trioserve.cli.doctor import machine_facts
from trioserve.protocol import shipped_kernels
from trioserve.protocol.machine import (
    KERNEL_FEATURES,
    Machine,
    compiler_command,
    compiler_version,
    zig_command,
)
from trioserve.protocol.shipped_kernels import (
    DIGEST,
    kernels_obstacle,
    library_name,
    sources_digest,
)


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the only folder of the PATH; it is empty."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    return folder


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of shipped kernels: those of ``avx2``, and nothing that could be loaded."""
    folder = tmp_path / "built"
    folder.mkdir()
    (folder / library_name("avx2")).write_bytes(b"")
    (folder / DIGEST).write_text(sources_digest())
    monkeypatch.setattr(shipped_kernels, "SHIPPED", folder)
    monkeypatch.setattr(Machine, "cpu_features", lambda _: list(KERNEL_FEATURES["avx2"]))
    return folder


def test_every_kernel_belongs_to_an_architecture() -> None:
    assert {isa for isas in ISAS_OF.values() for isa in isas} == set(KERNELS)


def test_shipped_kernels_come_before_any_compiler(no_compiler: Path, shipped: Path) -> None:
    library = shipped / library_name("avx2")
    assert build(["avx2"]) == built(["avx2"]) == library
    assert kernels_obstacle() is None
    with pytest.raises(LibraryBuildError, match=r"no C\+\+ compiler"):
        build(["avx512"])
    with pytest.raises(LibraryBuildError, match=r"no C\+\+ compiler"):
        build(["avx2"], sources=no_compiler)
    facts = {fact.name: fact for fact in machine_facts(Machine())}
    assert facts["CPU kernels"].value == "avx2, compiled in this installation"
    assert facts["C++ compiler"].value == "none, and none is needed"
    assert all(fact.state == "ok" for fact in facts.values())


@pytest.mark.parametrize("change", ["other sources", "no digest"])
def test_kernels_of_other_sources_are_not_used(
    change: str, no_compiler: Path, shipped: Path
) -> None:
    if change == "other sources":
        (shipped / DIGEST).write_text("0" * 64)
    else:
        (shipped / DIGEST).unlink()
    with pytest.raises(LibraryBuildError, match=r"no C\+\+ compiler"):
        build(["avx2"])
    assert "ziglang" in str(kernels_obstacle())


def test_the_digest_is_of_sources_and_options(tmp_path: Path) -> None:
    package = tmp_path / "cpu"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "gpu" / "cpu", package, ignore=ignored)
    assert sources_digest(package) == sources_digest()
    (package / "csrc" / "isa.h").open("a").write("\n")
    changed = sources_digest(package)
    (package / "build.py").open("a").write("\n")
    assert len({sources_digest(), changed, sources_digest(package)}) == 3


def test_an_architecture_without_kernels(tmp_path: Path) -> None:
    with pytest.raises(LibraryBuildError, match="no kernels for riscv64: choose from x86_64"):
        compile_for_wheel("riscv64", tmp_path / "kernels")


class TestCompilers:
    def program(self, folder: Path, name: str, text: str) -> None:
        path = folder / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def test_gcc_comes_first(self, no_compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("clang++", "c++", "g++"):
            self.program(no_compiler, name, f"echo {name}")
            assert compiler_command() == [name]
        monkeypatch.setenv("CXX", "other -g0")
        assert compiler_command() == ["other", "-g0"]

    def test_clang_knows_only_the_short_version(self, no_compiler: Path) -> None:
        self.program(no_compiler, "clang++", "[ $1 = -dumpversion ] && echo 17.0.1")
        assert compiler_version() == "clang++ 17.0.1"

    def test_zig_comes_last(self, no_compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert compiler_version() is None
        monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "ziglang")
        monkeypatch.setattr("importlib.metadata.version", lambda name: f"of {name}")
        assert compiler_command() == zig_command()
        assert str(compiler_version()).endswith(" -g0 -s of ziglang")
        assert kernels_obstacle() in (None, Machine().obstacle_to_kernels())
        self.program(no_compiler, "c++", "echo 1")
        assert compiler_command() == ["c++"]

    def test_zig_has_words_of_its_own_for_arm(self) -> None:
        options = ["-O3", "-march=armv8.2-a+dotprod+bf16"]
        assert _in_words_of(["g++"], options) == options
        assert _in_words_of(zig_command("aarch64"), options) == [
            "-O3",
            "-mcpu=generic+v8_2a+dotprod+bf16",
        ]

    def test_without_any_the_quick_way_is_named(self, no_compiler: Path) -> None:
        with pytest.raises(
            LibraryBuildError, match=r"the quick way is `.* -m pip install ziglang`"
        ):
            build(["avx2"])


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a wheel with the kernels of the fastest instruction set here, by this compiler.

    `nox -s wheel` compiles all of them with another, which takes minutes.
    """
    pytest.importorskip("hatchling")
    isas = Machine().kernel_isas()
    if not isas or compiler_version() is None:
        pytest.skip("no compiled kernels")
    isa = ISAS[isas[-1]].kernels
    folder = tmp_path_factory.mktemp("wheel")
    kernels = folder / "x86_64"
    kernels.mkdir()
    shutil.copy(build([isa]), kernels / library_name(isa))
    (kernels / DIGEST).write_text(sources_digest())
    run_pip(
        "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", str(folder), str(ROOT),
        TRIOSERVE_WHEEL_KERNELS=str(kernels),
    )  # fmt: skip
    (found,) = folder.glob("*.whl")
    return found


def run_pip(*arguments: str, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_wheel_holds_all_that_the_packages_have(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-linux_x86_64.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "trioserve", "gpu"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    expected = {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}
    assert expected <= names
    added = {name for name in names - expected if ".dist-info/" not in name}
    assert {Path(name).parent.as_posix() for name in added} == {"gpu/cpu/built"}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


@pytest.fixture
def served(wheel: Path, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Serve the default model from the wheel, with no compiler; yield the URL and the log."""
    run_pip("install", "--no-deps", "--target", str(tmp_path / "site"), str(wheel))
    (tmp_path / "bin").mkdir()
    log = tmp_path / "log"
    environment = {name: value for name, value in os.environ.items() if name != "CXX"}
    environment |= {
        "PATH": str(tmp_path / "bin"),
        "PYTHONPATH": str(tmp_path / "site"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "trioserve", "serve", "smollm2-135m", "--port", "0"]
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip(), log
        finally:
            process.terminate()


def test_a_model_is_served_from_a_wheel_without_a_compiler(
    served: tuple[str, Path], tmp_path: Path
) -> None:
    line, log = served
    assert line.startswith("Serving smollm2-135m at http://"), log.read_text()
    request = urllib.request.Request(
        f"{line.rpartition(' ')[2]}/v1/completions",
        data=json.dumps({"model": "smollm2-135m", "prompt": "One", "max_tokens": 2}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        assert json.load(response)["usage"]["completion_tokens"] == 2
    assert f"compiled kernels ({Machine().kernel_isas()[-1]})" in log.read_text()
    assert not (tmp_path / "cache" / "trioserve" / "cpu").exists()
