"""The project's own files agree with each other."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shlex
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import trioserve
from tests.support.source_files import ROOT, imports_of, modules_of
from trioserve.config import EngineConfig, ServerConfig
from trioserve.config.options import options_of

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
README = (ROOT / "README.md").read_text()
SESSIONS = {
    "serve",
    "wheel",
    "tests",
    "thorough",
    "lint",
    "bench",
    "bench_peers",
    "gpu",
    "docs",
    "fuzz",
    "simulate",
}


def requirements() -> list[Requirement]:
    lines = [*PROJECT["project"]["dependencies"]]
    for group in PROJECT["dependency-groups"].values():
        lines += group
    return [Requirement(line) for line in lines]


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    stated = [line for line in lines if line and not line.startswith("#")]
    pairs = [line.split("==") for line in stated]
    assert all(len(pair) == 2 for pair in pairs)
    return {canonicalize_name(name): version for name, version in pairs}


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_the_pins_satisfy_what_the_project_asks_for(requirement: Requirement) -> None:
    pinned = pins()[canonicalize_name(requirement.name)]
    assert requirement.specifier.contains(Version(pinned)), f"{requirement} is pinned to {pinned}"


@pytest.mark.parametrize(
    ("name", "version", "advisory"),
    [
        ("h11", "0.15.0", "CVE-2025-43859"),
        ("h2", "4.4.0", "CVE-2026-71554"),
        ("jinja2", "3.1.5", "CVE-2025-27516"),
        ("quart", "0.19.6", "CVE-2024-49767"),
        ("werkzeug", "3.1.3", "CVE-2025-66221"),
        ("ray", "2.53.0", "CVE-2026-27482"),
        ("torch", "2.9.1", "CVE-2026-24747"),
        ("transformers", "5.9.0", "CVE-2026-9856"),
    ],
)
def test_releases_with_advisories_are_out_of_bounds(name: str, version: str, advisory: str) -> None:
    found = [each for each in requirements() if canonicalize_name(each.name) == name]
    assert found
    assert not any(each.specifier.contains(version) for each in found)
    assert advisory in (ROOT / "docs/security.md").read_text()


def test_hypercorn_is_pinned_exactly_and_torch_to_what_resolves_without_a_gpu() -> None:
    assert "hypercorn==0.18.0" in PROJECT["project"]["dependencies"]
    assert pins()["torch"] == "2.13.0"
    extras = {"bench", "cuda12", "cuda13", "media", "otel", "ray", "tls", "transformers"}
    assert set(PROJECT["project"]["optional-dependencies"]) == extras


def test_every_third_party_import_is_a_dependency() -> None:
    stated = {Requirement(line).name for line in PROJECT["project"]["dependencies"]}
    known = {name.replace("-", "_") for name in stated} | sys.stdlib_module_names
    known |= {"trioserve", "gpu"}
    extras = {"cryptography", "cupy", "matplotlib", "opentelemetry", "ray", "transformers"}
    extras |= {"PIL", "av", "soundfile", "soxr"}
    known |= extras
    for path in (*modules_of("trioserve"), *modules_of("gpu")):
        names = {name.partition(".")[0] for name in imports_of(path)}
        assert names <= known, f"{path} imports {names - known}"


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sessions_of_the_noxfile() -> list[str]:
    tree = ast.parse((ROOT / "noxfile.py").read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [
        node.name
        for node in functions
        if any(ast.unparse(decorator) == "nox.session" for decorator in node.decorator_list)
    ]


def test_the_noxfile_has_every_session() -> None:
    assert set(sessions_of_the_noxfile()) == SESSIONS


def commands_of_the_readme() -> list[str]:
    return re.findall(r"^python -m pip install nox && .*$", README, re.MULTILINE)


def test_the_readme_opens_with_the_two_commands() -> None:
    serve, test = commands_of_the_readme()
    assert README.index(test) < 400
    assert serve == "python -m pip install nox && python -m nox -s serve"
    sessions = shlex.split(test.partition("-s ")[2])
    assert set(sessions) <= SESSIONS
    assert sessions[-1] == "tests"


def test_ci_runs_the_readmes_command() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert commands_of_the_readme()[1] in script.read_text().splitlines()


def test_the_readme_names_options_that_exist_with_their_defaults() -> None:
    options = {o.flag: o for cls in (EngineConfig, ServerConfig) for o in options_of(cls)}
    rows = re.findall(r"^\| (`--.*?) \| (.*?) \|", README, re.MULTILINE)
    assert rows
    for flags, default in rows:
        for flag in re.findall(r"`(--.*?)`", flags):
            assert flag in options
            known = options[flag].default_text
            assert known is None or known in default, f"{flag} has the default {known}"


def test_the_documentation_lists_every_option() -> None:
    table = "\n".join(load(ROOT / "docs" / "_ext" / "options_table.py").table_lines())
    for cls in (EngineConfig, ServerConfig):
        for option in options_of(cls):
            assert f"`{option.flag}`" in table
            assert f"`{option.environment}`" in table
            assert option.help[1:] in table
    assert "<!-- table: options -->" in (ROOT / "docs" / "options.md").read_text()


def test_links_of_the_readme_lead_somewhere() -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_the_version_is_one() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", trioserve.__version__)
    assert PROJECT["tool"]["hatch"]["version"]["path"] == "trioserve/protocol/version.py"


def test_the_public_names_all_exist_and_are_documented() -> None:
    text = (ROOT / "docs" / "reference.md").read_text()
    documented = set(re.findall(r":: trioserve\.(\w+)\b", text))
    for name in set(trioserve.__all__) - {"__version__"}:
        value = getattr(trioserve, name)
        if not (isinstance(value, type) and issubclass(value, Exception)):
            assert name in documented


def test_nothing_names_a_package_host() -> None:
    hosts = re.compile(r"index-url|find-links|pypi\.|download\.pytorch")
    for name in ("pyproject.toml", "constraints.txt", "noxfile.py", ".ci/run", "README.md"):
        assert hosts.search((ROOT / name).read_text()) is None
