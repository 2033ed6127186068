"""Traffic to a rented GPU and back: the prepared folder, the results and the pages."""

from __future__ import annotations

import importlib.metadata
import io
import json
import re
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from bench.kernels.all import all_cases
from bench.kernels.planted import NAMES, planted_source
from bench.lease import __main__ as command_line
from bench.lease import call, prepare
from bench.lease.archive import pack
from bench.lease.collect import collect
from bench.lease.goals import KERNEL_GOALS, goals_page
from bench.lease.manifest import Manifest, PreparedError
from bench.lease.plan import CONTROLS, ROOT
from gpu.kernels import nvrtc
from gpu.kernels.cubins import CubinCache

# What the rented machine has: torch, CuPy, transformers, pytest, hypothesis, and what these need.
BROUGHT = ("torch", "transformers", "accelerate", "cupy-cuda13x", "pytest", "hypothesis", "psutil")
BROUGHT_TOO = {
    *("aiofiles", "attrs", "click", "h11", "httpx", "ml-dtypes", "prometheus-client", "requests"),
    *("rich", "sortedcontainers", "werkzeug", "tabulate", "ninja"),
}


def needs(names: Sequence[str], known: set[str]) -> set[str]:
    """Return ``names`` and the packages that they need, without those behind ``known``."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in found or name in known:
            continue
        found.add(name)
        try:
            required = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # of another platform
        for text in required:
            one = Requirement(text)
            if one.marker is None or one.marker.evaluate({"extra": ""}):
                waiting.append(one.name)
    return found


def pins(text: str) -> dict[str, str]:
    return dict(line.split("==") for line in prepare.packages_in(text))


class TestRequirements:
    def test_they_are_what_the_other_machine_lacks(self) -> None:
        there = needs(BROUGHT, set()) | BROUGHT_TOO
        lacking = needs(["trioserve", "trustme"], there) - {"trioserve"}
        assert lacking <= pins(prepare.REQUIREMENTS.read_text()).keys()

    def test_versions_are_those_that_are_known_to_work_together(self) -> None:
        known = pins((ROOT / "constraints.txt").read_text())
        carried = pins(prepare.REQUIREMENTS.read_text())
        assert carried["flashinfer-python"]
        assert {n: v for n, v in carried.items() if n in known and known[n] != v} == {}


class TestPrepare:
    def prepare(self, folder: Path, wheel: bytes = b"wheel") -> Manifest:
        def download(command: Sequence[str]) -> None:
            assert command[command.index("--python-version") + 1] == "3.12"
            (Path(command[command.index("--dest") + 1]) / "a-1-py3-none-any.whl").write_bytes(wheel)

        return prepare.prepare(
            folder,
            python="3.12",
            target="sm_90a",
            run=download,
            kernels=[planted_source(NAMES[0])],
            show=lambda line: None,
        )

    def test_what_was_prepared_is_found_there(self, tmp_path: Path) -> None:
        manifest = self.prepare(tmp_path / "lease")
        assert Manifest.read(tmp_path / "lease") == manifest
        assert sorted(manifest.files) == ["cubins.tar.gz", "wheels/a-1-py3-none-any.whl"]
        with tarfile.open(tmp_path / "lease" / "cubins.tar.gz") as tar:
            tar.extractall(tmp_path / "kernels", filter="data")
        cubin, note = CubinCache(tmp_path / "kernels").files(planted_source(NAMES[0]), "sm_90a")
        assert cubin.read_bytes().startswith(b"\x7fELF")
        assert note.exists()

    def test_what_is_carried_is_unpacked_and_installed_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        manifest = self.prepare(tmp_path / "lease")
        monkeypatch.setattr(call.platform, "python_version_tuple", lambda: ("3", "12", "3"))
        monkeypatch.setattr(call, "_compiler", lambda: "NVRTC 1.2.3")
        asked = call.Call(
            part=1, on="gpu", out=tmp_path, prepared=tmp_path / "lease", scratch=tmp_path
        )
        site, cache = tmp_path / "site", tmp_path / "cache"
        command = call._set_up(asked, site, cache)
        assert command[-1] == str(tmp_path / "lease" / "wheels" / "a-1-py3-none-any.whl")
        assert "here is NVRTC 1.2.3, which compiles them again" in capsys.readouterr().out
        built = CubinCache(cache / "trioserve" / "kernels").files(
            planted_source(NAMES[0]), "sm_90a"
        )
        assert all(path.exists() for path in built)
        # The command leaves a note when it ends well, and is not needed again.
        run = ["sh", "-c", command[2], command[3]]
        subprocess.run([*run, "false"], check=False)
        assert call._set_up(asked, site, cache) == command
        site.mkdir()
        subprocess.run([*run, "true"], check=True)
        assert (site / f"installed-{manifest.digest}").exists()
        assert call._set_up(asked, site, cache) == ()

    def test_a_damaged_folder_and_another_python_are_refused(self, tmp_path: Path) -> None:
        folder = tmp_path / "lease"
        self.prepare(folder)
        asked = call.Call(part=1, on="gpu", out=tmp_path, prepared=folder, scratch=tmp_path)
        if ".".join(call.platform.python_version_tuple()[:2]) != "3.12":
            with pytest.raises(PreparedError, match="prepare again with --python 3"):
                call.run_part(asked, 0.0)
        (folder / "wheels" / "a-1-py3-none-any.whl").write_bytes(b"half")
        with pytest.raises(PreparedError, match="differs from its manifest"):
            call.run_part(asked, 0.0)
        (folder / "cubins.tar.gz").unlink()
        with pytest.raises(PreparedError, match=r"cubins\.tar\.gz is missing"):
            Manifest.read(folder)

    def test_more_than_can_be_carried_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(prepare, "CARRIED_BYTES", prepare.tree_bytes() + (1 << 20))
        with pytest.raises(PreparedError, match="MiB would be carried, and"):
            self.prepare(tmp_path / "lease", b"x" * (2 << 20))

    def test_the_tree_leaves_room_for_the_wheels(self) -> None:
        assert prepare.tree_bytes() < 24 << 20


@pytest.mark.parametrize("name", NAMES)
def test_each_planted_fault_compiles(name: str) -> None:
    build = nvrtc.build(nvrtc.unit(planted_source(name), "sm_90a"))
    assert name.encode() in build.cubin
    assert name in CONTROLS.values()


def result(**fields: Any) -> dict[str, Any]:
    facts = {"time": "2026-12-01T10:00:00+00:00", "device": "NVIDIA H200", "commit": "abc"}
    return {**facts, "table": "| a |\n|---|\n| 1 |", **fields}


def case(shape: str, reached: float, met: bool) -> dict[str, Any]:
    target = {"target": "≥ 0.95 of the floor", "reached": reached, "met": met}
    return {"kernel": "decode_attention", "shape": shape, "targets": [target]}


def step(rows: int, seconds: float, idle: float) -> dict[str, Any]:
    return {
        "scenario": {"rows": rows, "context": 1024},
        "graphs": True,
        "in_flight": 2,
        "times": {"step": seconds},
        "floor_seconds": 1.0,
        "idle_share": idle,
    }


class TestCollect:
    def archive(self, folder: Path, number: int, files: dict[str, dict[str, Any]]) -> Path:
        work = folder / f"work-{number}"
        (work / "results").mkdir(parents=True)
        for name, content in files.items():
            (work / "results" / name).write_text(json.dumps(content))
        (work / "summary.md").write_text(f"part {number} went well\n")
        pack(work, folder / f"part-{number}.tar.gz")
        return folder / f"part-{number}.tar.gz"

    def pages(self, folder: Path) -> Path:
        docs = folder / "docs"
        docs.mkdir()
        for page in ("kernels.md", "performance.md"):
            (docs / page).write_text((ROOT / "docs" / page).read_text())
        return docs

    def test_results_and_tables_are_where_they_belong(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        first = self.archive(
            tmp_path, 1, {"decode-step-20261201-100000.json": result(steps=[step(1, 1.05, 0.01)])}
        )
        more = result(cases=[case("b32x1k", 0.91, False)], table="| a |\n|---|\n| 2 |")
        second = self.archive(
            tmp_path,
            2,
            {
                "kernels-20261201-101000.json": result(cases=[case("b32x8k", 0.97, True)]),
                "kernels-20261201-102000.json": more,
                "kernels-emulated-20261201-103000.json": result(cases=[]),
            },
        )
        docs, results = self.pages(tmp_path), tmp_path / "results"
        third = {"decode-step-20261201-104000.json": result(steps=[step(32, 1.2, 0.03)])}
        archives = [first, second, self.archive(tmp_path, 3, third)]
        assert collect(archives, results=results, docs=docs) == 0
        assert sorted(path.name for path in results.iterdir()) == [
            "decode-step-20261201-104000.json",
            "kernels-20261201-102000.json",
        ]
        goals = re.sub(" +", " ", (docs / "kernels.md").read_text())
        assert "≥ 0.95 of the copy rate | 0.91 (b32x1k): **missed** |" in goals
        assert "≤ 1.10 floors | 1.20 floors (32x1024): **missed** |" in goals
        assert "at the runner | < 2 % | 3.0% (32x1024): **missed** |" in goals
        assert "HTTP clients | < 2 % | not yet measured on a GPU |" in goals
        page = (docs / "performance.md").read_text()
        table = "| a |\n|---|\n| 1 |\n| 2 |\n\nNVIDIA H200, 2026-12-01, revision abc."
        assert f"<!-- figures: gpu_kernels -->\n\n{table}" in page
        assert "part 2 went well" in capsys.readouterr().out

    def test_an_archive_without_figures_changes_no_page(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        docs = self.pages(tmp_path)
        before = (docs / "kernels.md").read_text()
        archive = self.archive(tmp_path, 1, {})
        assert collect([archive], results=tmp_path / "results", docs=docs) == 1
        assert "the archives have no figures" in capsys.readouterr().err
        assert (docs / "kernels.md").read_text() == before

    def test_no_member_leaves_the_folder_of_results(self, tmp_path: Path) -> None:
        path = tmp_path / "part-1.tar.gz"
        with tarfile.open(path, "w:gz") as tar:
            for name in ("results/../../kernels-20261201-100000.json", "results/evil.json"):
                entry = tarfile.TarInfo(name)
                entry.size = 2
                tar.addfile(entry, io.BytesIO(b"{}"))
        assert collect([path], results=tmp_path / "results", docs=tmp_path) == 1
        assert list((tmp_path / "results").iterdir()) == []

    def test_a_damaged_archive_is_one_line(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "part-1.tar.gz").write_bytes(b"not an archive")
        assert command_line.main(["collect", str(tmp_path / "part-1.tar.gz")]) == 1
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith(f"bench.lease: {tmp_path}/part-1.tar.gz can't be read")


class TestGoals:
    def test_every_target_of_a_kernel_has_a_row(self) -> None:
        assert {(c.kernel, t.text) for c in all_cases(tiny=False) for t in c.targets} == set(
            KERNEL_GOALS
        )

    def test_the_page_has_these_goals(self) -> None:
        def goals(text: str) -> list[list[str]]:
            rows = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| ")]
            return [[cell.strip() for cell in row] for row in rows]

        page = (ROOT / "docs" / "kernels.md").read_text()
        block = page.partition("<!-- figures: gpu_goals -->")[2].partition("<!-- end -->")[0]
        assert goals(block) == goals(goals_page([]))


@pytest.mark.parametrize("command", [[], ["run"], ["prepare"], ["collect"]])
def test_help_names_the_commands(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_line.main([*command, "--help"])
    said = capsys.readouterr().out
    assert said.startswith(" ".join(["usage: python -m bench.lease", *command]))
    assert max(map(len, said.splitlines())) <= 100


def test_a_bound_that_is_too_long_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_line.main(["run", "--part", "1", "--seconds", "600"])
    assert "600 is not within 15 and 560" in capsys.readouterr().err
