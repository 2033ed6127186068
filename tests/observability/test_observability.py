"""The Grafana dashboard and its page speak of metrics, fields and attributes that exist."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.http_stub import StubEngine, captured_logs, client_of
from tests.support.metric_samples import Watched
from trioserve.observability.metrics import DEFINITIONS, Metrics
from trioserve.observability.metrics.definitions import GROUPS

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "observability.md").read_text(encoding="utf-8")
DASHBOARD: dict[str, Any] = json.loads((DOCS / "grafana" / "trioserve.json").read_text("utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [
    pytest.param(target["expr"], id=f"{panel['title']}-{target['refId']}")
    for panel in PANELS
    for target in panel["targets"]
]
VARIABLES = {each["name"]: each for each in DASHBOARD["templating"]["list"]}

# What Prometheus itself adds to every sample that it scrapes.
TARGET_LABELS = {"instance", "job"}


def sampled_labels() -> dict[str, set[str]]:
    """Return the labels of every sample of a scrape, by its name without the prefix."""
    metrics = Metrics("m")
    metrics.watch(Watched())
    metrics.observe_response("GET", "/health", 200)
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            found.setdefault(sample.name.removeprefix("trioserve:"), set()).update(sample.labels)
    return found


SAMPLES = sampled_labels()


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_uses_metrics_and_labels_that_exist(query: str) -> None:
    used = re.findall(r"\$\{prefix\}:(\w+)\{([^}]*)\}", query)
    assert len(used) == query.count("${prefix}:") >= 1
    assert "$prefix" not in query
    labels: set[str] = set(TARGET_LABELS)
    for name, selectors in used:
        assert name in SAMPLES
        selected = set(re.findall(r"(\w+)=~", selectors))
        assert selected <= SAMPLES[name] | TARGET_LABELS
        labels |= SAMPLES[name]
    for grouping in re.findall(r"by \(([^)]*)\)", query):
        assert set(re.split(r", *", grouping)) <= labels


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_reads_counters_by_their_rates_and_gauges_as_they_are(query: str) -> None:
    assert query.count("(") == query.count(")")
    rated = set(re.findall(r"(?:rate|increase)\(\$\{prefix\}:(\w+)\{", query))
    named = set(re.findall(r"\$\{prefix\}:(\w+)", query))
    gauges = {each.name for each in DEFINITIONS if each.kind == "gauge"}
    assert rated == named - gauges
    assert query.count("[$__rate_interval]") == len(re.findall(r"rate\(|increase\(", query))
    for name in named:
        if "histogram_quantile" in query and name.endswith("_bucket"):
            assert "by (le)" in query


def test_the_legend_of_a_query_names_labels_that_it_keeps() -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert f"by ({label})" in target["expr"]


def test_data_source_and_prefix_are_variables() -> None:
    assert list(VARIABLES)[:2] == ["datasource", "prefix"]
    assert VARIABLES["prefix"]["query"] == "trioserve"
    assert VARIABLES["datasource"]["query"] == "prometheus"
    text = json.dumps(DASHBOARD)
    assert "trioserve:" not in text
    assert "vllm:" not in text
    sources = re.findall(r'"uid": "(\$[^"]*)"', text)
    assert set(sources) == {"${datasource}"}
    assert len(sources) >= 2 * len(PANELS)
    for name in set(re.findall(r"\$\{?(\w+)", text)) - {"__rate_interval", "__all"}:
        assert name in VARIABLES
    for name in ("instance", "model_name", "engine"):
        (metric, label) = re.findall(r"\$\{prefix\}:(\w+), (\w+)", VARIABLES[name]["definition"])[0]
        assert label == name
        assert name in SAMPLES[metric] | TARGET_LABELS


def test_panels_have_their_own_ids_and_places() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in DASHBOARD["panels"]
        for x, y in itertools.product(range(panel["gridPos"]["w"]), range(panel["gridPos"]["h"]))
    ]
    assert len(set(taken)) == len(taken)
    assert max(x for x, _ in taken) == 23


def tables() -> Any:
    path = DOCS / "_ext" / "metrics_table.py"
    spec = importlib.util.spec_from_file_location("metrics_table", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_lists_every_metric_and_every_panel() -> None:
    rows = "\n".join(tables().metrics_lines())
    for definition in DEFINITIONS:
        assert f"| `{definition.exposed_name}` | {definition.kind} |" in rows
        assert definition.help in rows
        assert definition.group in GROUPS
        assert "|" not in definition.help
    panels = "\n".join(tables().dashboard_lines())
    for panel in PANELS:
        assert f"| {panel['title']} | {panel['description']} |" in panels
    assert "<!-- table: metrics -->" in PAGE
    assert "<!-- table: dashboard -->" in PAGE


def test_the_panels_a_text_points_at_exist() -> None:
    titles = {panel["title"] for panel in PANELS}
    for panel in PANELS:
        assert set(re.findall(r"\*\*(.*?)\*\*", panel["description"])) <= titles


def test_alerts_and_examples_name_metrics_and_labels_that_exist() -> None:
    used = re.findall(r"trioserve:(\w+)(?:\{(\w+)=)?", PAGE)
    assert len(used) >= 8
    for name, label in used:
        assert name in SAMPLES
        assert not label or label in SAMPLES[name] | TARGET_LABELS


async def test_the_page_names_every_field_of_the_request_log() -> None:
    client = client_of(StubEngine(), log_requests=True)
    with captured_logs() as logs:
        headers = {"traceparent": f"00-{'1' * 32}-{'2' * 16}-01"}
        await client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
    (line,) = logs
    assert {"trace_id", "n", "prompts", "outputs", "sampling", "cached_tokens"} <= set(line)
    for field in {*line, "client", "key", "queue_ms", "first_token_ms"}:
        assert f"`{field}`" in PAGE or f'"{field}"' in PAGE
