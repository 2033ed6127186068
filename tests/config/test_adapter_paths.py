"""Options for adapters, in the forms that other servers have, too."""

from __future__ import annotations

import json

import pytest

from trioserve.config import EngineConfig
from trioserve.config.adapter_paths import named_paths
from trioserve.protocol.errors import InvalidRequest
from trioserve.scheduler.limits import SchedulerLimits
from trioserve.testing import FakeWorker


def test_modules_in_both_forms() -> None:
    entry = {"name": "poet", "path": "/adapters/poet", "base_model_name": "some/model"}
    modules = ["pirate=/adapters/a=b", json.dumps(entry), '{"name": "x", "path": "/x"}']
    expected = [("pirate", "/adapters/a=b"), ("poet", "/adapters/poet"), ("x", "/x")]
    assert named_paths(modules) == expected
    config = EngineConfig("m", lora_modules=modules)
    assert named_paths(config.lora_modules) == expected


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("poet", "must be a name and a folder"),
        ('{"name": "poet"', "lora_modules"),
        ('{"name": "poet"}', "missing required field `path`"),
        ('{"name": "poet", "path": ""}', "path"),
        ('{"name": "", "path": "/x"}', "an adapter's name has"),
        ('{"name": "poet", "path": "/x", "rank": 8}', "unknown field `rank`"),
    ],
)
def test_entries_that_are_neither(module: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        EngineConfig("m", lora_modules=[module])
    assert caught.value.param == "lora_modules"


@pytest.mark.parametrize(("asked", "held"), [(2, 4), (4, 4), (5, 5), (None, 32)])
def test_the_worker_holds_no_fewer_than_run_together(asked: int | None, held: int) -> None:
    config = EngineConfig("m", max_loras=4, max_cpu_loras=asked)
    limits = SchedulerLimits.of(config, FakeWorker().ready())
    assert limits.max_cpu_loras == held
