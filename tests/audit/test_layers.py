"""Each folder imports only what the table of layers allows, and no modules import in a circle."""

from __future__ import annotations

import pytest

from tests.audit.layers import (
    MAY_IMPORT,
    Import,
    all_imports,
    circles,
    forbidden,
    imports_in,
    layer_of,
    module_name,
)
from tests.support.source_files import ROOT, modules_of

MAX_ENTRIES = 16
USUAL = {"__init__.py", "__main__.py", "__pycache__", "py.typed"}
AT_THE_ROOT = {
    *("trioserve", "gpu", "tests", "bench", "docs", "pyproject.toml", "noxfile.py"),
    *("README.md", "LICENSE", "CHANGELOG.md", "constraints.txt"),
}
MADE_BY_TOOLS = {"__pycache__", "fuzz-findings"}


@pytest.fixture(scope="module")
def imports() -> list[Import]:
    return all_imports()


def test_a_folder_imports_what_its_layer_may(imports: list[Import]) -> None:
    assert [str(each) for each in forbidden(imports)] == []


def test_a_layer_may_import_lower_ones_only() -> None:
    for folders in MAY_IMPORT.values():
        below: set[str] = set()
        for folder, allowed in folders.items():
            assert set(allowed.split()) <= below, folder
            below.add(folder)


def test_every_module_is_in_a_layer() -> None:
    for package in MAY_IMPORT:
        outside = {module_name(path) for path in modules_of(package)} - {package}
        assert {name for name in outside if layer_of(name) is None} <= {"trioserve.__main__"}


def test_no_modules_import_in_a_circle(imports: list[Import]) -> None:
    assert circles(imports) == []


def test_an_import_of_a_higher_layer_is_found() -> None:
    planted = Import("trioserve.protocol.wire", "trioserve.engine.engine")
    assert list(forbidden([planted])) == [planted]
    planted = Import("gpu.runner", "trioserve.engine.engine")
    assert list(forbidden([planted])) == [planted]
    assert not list(forbidden([Import("gpu.runner", "trioserve.protocol.wire")]))


def test_a_circle_under_type_checking_is_found() -> None:
    first = "if TYPE_CHECKING:\n    from gpu import runner\n"
    second = "def late():\n    from gpu.slots import Slot\n"
    modules = ["gpu.slots", "gpu.runner"]
    found = [*imports_in(first, "gpu.slots", modules), *imports_in(second, "gpu.runner", modules)]
    assert circles(found) == [["gpu.runner", "gpu.slots"]]
    assert circles(found[:1]) == []


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_has_few_entries(package: str) -> None:
    entries = {path.name for path in (ROOT / package).iterdir()} - USUAL
    assert len(entries) <= MAX_ENTRIES


def test_the_root_holds_the_project_and_the_usual_files() -> None:
    shown = {path.name for path in ROOT.iterdir() if path.name[0] != "."}
    assert shown <= AT_THE_ROOT | MADE_BY_TOOLS


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_folder_says_what_it_is_for(package: str) -> None:
    for path in (ROOT / package).rglob("__init__.py"):
        text = path.read_text().strip()
        assert text.startswith('"""') or path.parent.name == "gpu", path
