"""Traffic to a rented GPU and back: the prepared folder, the results and the pages."""

from __future__ import annotations

import importlib.metadata
import io
import json
import re
import shutil
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from bench.kernels.__main__ import all_cases
from bench.kernels.planted import NAMES, planted_source
from bench.lease import __main__ as command_line
from bench.lease import call, prepare
from bench.lease.call import LeaseError, pack
from bench.lease.collect import collect
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
    return dict(line.split("==") for line in text.splitlines() if "==" in line)


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
    @pytest.fixture(autouse=True)
    def one_wheel_and_one_kernel(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def download(python: str, folder: Path) -> None:
            assert python == "3.12"
            (folder / "a-1-py3-none-any.whl").write_bytes(b"x" * (2 << 20))

        monkeypatch.setattr(prepare, "download", download)
        monkeypatch.setattr(prepare, "sources", lambda: [])
        monkeypatch.setattr(prepare, "NAMES", NAMES[:1])

    def test_what_is_carried_is_unpacked_and_installed_once(self, tmp_path: Path) -> None:
        folder, site, cache = (tmp_path / name for name in ("lease", "site", "cache"))
        prepare.prepare(folder, python="3.12", target="sm_90a")
        command = call.set_up(folder, site, cache)
        assert command[-1] == str(folder / "wheels" / "a-1-py3-none-any.whl")
        kernels = CubinCache(cache / "trioserve" / "kernels")
        cubin, note = kernels.files(planted_source(NAMES[0]), "sm_90a")
        assert cubin.read_bytes().startswith(b"\x7fELF")
        assert note.exists()
        # The command leaves a note when it ends well, and is not needed again.
        run = ["sh", "-c", command[2], command[3]]
        subprocess.run([*run, "false"], check=False)
        assert call.set_up(folder, site, cache) == command
        site.mkdir()
        subprocess.run([*run, "true"], check=True)
        assert call.set_up(folder, site, cache) == ()

    def test_more_than_can_be_carried_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(prepare, "CARRIED_BYTES", prepare.tree_bytes() + (1 << 20))
        with pytest.raises(LeaseError, match="MiB would be carried, and"):
            prepare.prepare(tmp_path / "lease", python="3.12", target="sm_90a")

    def test_the_tree_leaves_room_for_the_wheels(self) -> None:
        assert prepare.tree_bytes() < 24 << 20


@pytest.mark.parametrize("name", NAMES)
def test_each_planted_fault_compiles(name: str) -> None:
    build = nvrtc.build(nvrtc.unit(planted_source(name), "sm_90a"))
    assert name.encode() in build.cubin
    assert name in CONTROLS.values()


def result(*rows: int) -> dict[str, Any]:
    facts = {"time": "2026-12-01T10:00:00+00:00", "device": "NVIDIA H200", "commit": "abc"}
    return {**facts, "table": "", "rows": [{"a": row} for row in rows]}


class TestCollect:
    def archive(self, folder: Path, number: int, files: dict[str, dict[str, Any]]) -> Path:
        work = folder / f"work-{number}"
        (work / "results").mkdir(parents=True)
        for name, content in files.items():
            (work / "results" / name).write_text(json.dumps(content))
        (work / "summary.md").write_text(f"part {number} went well\n")
        pack(work, folder / f"part-{number}.tar.gz")
        return folder / f"part-{number}.tar.gz"

    @pytest.fixture
    def page(self, tmp_path: Path) -> Path:
        return Path(shutil.copy(ROOT / "docs" / "performance.md", tmp_path))

    def test_results_and_tables_are_where_they_belong(
        self, tmp_path: Path, page: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        parts = (
            {"decode-step-20261201-100000.json": result(1)},
            {
                "kernels-20261201-101000.json": result(1),
                "kernels-20261201-102000.json": result(2),
                "kernels-emulated-20261201-103000.json": result(3),
            },
            {"decode-step-20261201-104000.json": result(2, 3)},
        )
        archives = [self.archive(tmp_path, number, files) for number, files in enumerate(parts)]
        results = tmp_path / "results"
        assert collect(archives, results=results, page=page) == 0
        found = {path.name: json.loads(path.read_text()) for path in results.iterdir()}
        assert found.keys() == {"decode-step-20261201-104000.json", "kernels-20261201-102000.json"}
        assert [row["a"] for row in found["decode-step-20261201-104000.json"]["rows"]] == [1, 2, 3]
        table = "| a |\n| --- |\n| 1 |\n| 2 |\n\nNVIDIA H200, 2026-12-01, revision abc."
        assert f"<!-- figures: gpu_kernels -->\n\n{table}" in page.read_text()
        assert "part 2 went well" in capsys.readouterr().out

    def test_an_archive_without_figures_changes_no_page(
        self, tmp_path: Path, page: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        before = page.read_text()
        archive = self.archive(tmp_path, 1, {})
        assert collect([archive], results=tmp_path / "results", page=page) == 1
        assert "the archives have no figures" in capsys.readouterr().err
        assert page.read_text() == before

    def test_no_member_leaves_the_folder_of_results(self, tmp_path: Path) -> None:
        path = tmp_path / "part-1.tar.gz"
        with tarfile.open(path, "w:gz") as tar:
            for name in ("results/../../kernels-20261201-100000.json", "results/evil.json"):
                entry = tarfile.TarInfo(name)
                entry.size = 2
                tar.addfile(entry, io.BytesIO(b"{}"))
        assert collect([path], results=tmp_path / "results", page=tmp_path) == 1
        assert list((tmp_path / "results").iterdir()) == []

    def test_a_damaged_archive_is_one_line(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "part-1.tar.gz").write_bytes(b"not an archive")
        assert command_line.main(["collect", str(tmp_path / "part-1.tar.gz")]) == 1
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith(f"bench.lease: {tmp_path}/part-1.tar.gz can't be read")


def test_the_page_has_the_targets_of_every_kernel() -> None:
    page = (ROOT / "docs" / "kernels.md").read_text()
    rows = re.findall(r"^\| `(\w+)`: [^|]* \| (.*) \|$", page, re.MULTILINE)
    targets = {(case.kernel, each.text) for case in all_cases(tiny=False) for each in case.targets}
    assert set(rows) == targets
    assert len(rows) == len(targets)


@pytest.mark.parametrize("command", [[], ["run"], ["prepare"], ["collect"]])
def test_help_names_the_commands(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_line.main([*command, "--help"])
    said = capsys.readouterr().out
    assert said.startswith(" ".join(["usage: python -m bench.lease", *command]))
    assert max(map(len, said.splitlines())) <= 100
