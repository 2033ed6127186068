"""The console's modules without the page, tested by Node's own test runner."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "modules"
STATIC = (Path(__file__).parents[2] / "trioserve/http/api/console/static").resolve()


def test_the_modules_without_a_page() -> None:
    node = shutil.which("node")
    if node is None:
        pytest.fail("the console's modules are tested with Node.js: apt install nodejs")
    files = sorted(map(str, FOLDER.glob("*.test.mjs")))
    run = subprocess.run([node, "--test", *files], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout
    number = re.search(r"^# pass (\d+)$", run.stdout, re.MULTILINE)
    assert number is not None
    assert int(number[1]) >= 30


def test_every_module_is_imported_by_another_or_by_the_page() -> None:
    used = {STATIC / "main.js"}
    for path in STATIC.rglob("*.js"):
        names = re.findall(r'^(?:import|\}) .*from "([^"]+)";$', path.read_text(), re.MULTILINE)
        assert all(name.startswith(".") for name in names), f"{path} imports what isn't here"
        used |= {(path.parent / name).resolve() for name in names}
    assert used == set(STATIC.rglob("*.js"))


def test_every_stylesheet_is_the_pages_and_text_is_never_markup() -> None:
    page = (STATIC / "index.html").read_text()
    linked = set(re.findall(r'href="console/static/(css/[a-z]+\.css)"', page))
    assert linked == {f"css/{path.name}" for path in (STATIC / "css").iterdir()}
    for path in STATIC.rglob("*.js"):
        code = re.sub(r"/\*\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", code)


def test_the_page_on_the_console_lists_the_keys() -> None:
    source = (STATIC / "shortcuts.js").read_text()
    listed = re.findall(r'\{ key: "([^"]+)", does: "([^"]+)"', source)
    page = (STATIC.parents[4] / "docs/console.md").read_text()
    assert re.findall(r"^\| `(.+)` \| (.+) \|$", page, re.MULTILINE) == listed
