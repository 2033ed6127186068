"""The pages on moving from another server name options, routes and metrics that we have.

The left column is theirs, the right one ours.
"""

from __future__ import annotations

import re

import pytest

import trioserve
from gpu.cpu.products import GGUF_KINDS
from tests.support.doc_blocks import ROOT
from trioserve import EngineConfig, ServerConfig
from trioserve.cli.equivalents import equivalents
from trioserve.cli.worker_options import WorkerOptions
from trioserve.config.options import options_of
from trioserve.http.api.openapi import openapi_path
from trioserve.http.api.routes import ROUTES
from trioserve.model_files.gguf_header import TENSOR_TYPES
from trioserve.observability.metrics.definitions import DEFINITIONS

PAGES = {
    "from-vllm": ("vLLM", "vllm:"),
    "from-sglang": ("SGLang", "sglang:"),
    "from-llama-cpp": ("llama.cpp", "llamacpp:"),
}
COMMANDS = (EngineConfig, ServerConfig, WorkerOptions)
FLAGS = {option.flag for cls in COMMANDS for option in options_of(cls)}
FLAGS |= {"--no-enable-prefix-caching"}
PATHS = {openapi_path(rule) for route in ROUTES for rule in route.rules}
METRICS = {definition.exposed_name for definition in DEFINITIONS}
NOT_THERE = re.compile(r"not (needed|there)")


def rows(page: str, section: str) -> list[tuple[str, str]]:
    """Return the rows of a section's table: what is on the left, and on the right."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    (body,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    lines = [line for line in body.splitlines() if line.startswith("| ")]
    assert lines[0] == f"| {PAGES[page][0]} | trioserve |"
    found = [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in lines[2:]]
    assert len(found) > 5
    assert all(len(row) == 2 for row in found), found
    return found  # type: ignore[return-value]


def names(cell: str) -> list[str]:
    """Return what stands in a cell as code."""
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.parametrize("page", PAGES)
def test_the_options_are_those_of_the_command_line_s_hints(page: str) -> None:
    """Tables are written by hand in trioserve/cli/equivalents.toml, and copied to the pages."""
    server = page.removeprefix("from-")
    wanted = [
        (", ".join(f"`{flag}`" for flag in row.flags), row.here)
        for row in equivalents()
        if row.server == server
    ]
    assert rows(page, "Options") == wanted


@pytest.mark.parametrize("page", PAGES)
def test_options(page: str) -> None:
    for theirs, ours in rows(page, "Options"):
        flags = [name for name in names(ours) if name.startswith("--")]
        assert set(flags) <= FLAGS, theirs
        told = flags or NOT_THERE.match(ours) or "first argument" in ours
        assert told or "request" in ours or "HF_HUB_OFFLINE" in ours, theirs
        if "the same:" in ours:
            assert flags == names(theirs)


@pytest.mark.parametrize("page", PAGES)
def test_endpoints(page: str) -> None:
    for theirs, ours in rows(page, "Endpoints"):
        paths = [name for name in names(ours) if name.startswith("/")]
        assert set(paths) <= PATHS, theirs
        assert paths or NOT_THERE.match(ours), theirs
        if ours.startswith("the same"):
            assert paths == names(theirs)
        # What is told to be missing is.
        if NOT_THERE.match(ours):
            assert not set(names(theirs)) & PATHS


@pytest.mark.parametrize("page", PAGES)
def test_metrics(page: str) -> None:
    for theirs, ours in rows(page, "Metrics"):
        assert all(name.startswith(PAGES[page][1]) for name in names(theirs))
        assert names(ours)
        assert set(names(ours)) <= METRICS, theirs


def test_formats() -> None:
    text = (ROOT / "docs" / "from-llama-cpp.md").read_text(encoding="utf-8")
    (body,) = re.findall(r"^## Formats\n(.*?)(?=^## )", text, re.MULTILINE | re.DOTALL)
    formats = [names(row.split(" | ")[0]) for row in body.splitlines() if row.startswith("| `")]
    assert {name for row in formats for name in row} == {
        kind.name for kind in TENSOR_TYPES.values()
    }
    assert set(formats[0]) == set(GGUF_KINDS)


@pytest.mark.parametrize("page", ["from-vllm", "from-sglang", "from-tensorrt-llm"])
def test_programs(page: str) -> None:
    """Every name of ours behind a dot exists."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    ours = re.findall(r"^\|.*\| (.*) \|$", text, re.MULTILINE)
    for cell in ours:
        for name in re.findall(r"\btrioserve\.(\w+)", cell):
            assert hasattr(trioserve, name), name
        for name in re.findall(r"\bengine\.(\w+)", cell):
            assert hasattr(trioserve.Engine, name), name


def test_what_goes_by_vllms_names() -> None:
    """A dashboard that was made for vLLM finds what the page says it does."""
    for theirs, ours in rows("from-vllm", "Metrics"):
        if not NOT_THERE.match(ours):
            plain = [name.removeprefix("vllm:") for name in names(theirs)]
            assert [name.removesuffix("_total") for name in names(ours)] == [
                name.removesuffix("_total") for name in plain
            ]
