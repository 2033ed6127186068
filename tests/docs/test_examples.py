"""The programs in examples/ run to their end and print what they are about.

Those that open an engine share one, in one test. Those that ask a server are run by
``tests/docs/test_server.py``, which has one.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
import trio

import trioserve
from tests.support.doc_blocks import ROOT, write_adapters
from tests.support.engines import open_tiny_engine
from tests.support.tiny_models import make_tiny

EXAMPLES = ROOT / "docs" / "examples"
PRINTS = {
    "streaming_chat": r"> Name .*\[0 of \d+ tokens were cached\]\n> .*\[\d\d of \d+ tokens were ca",
    "deadlines": (
        r"deadline: .*timeout of 0.5 s ran out\nmove_on_after: True, and \d+ char.*\nbreak: after "
        r"\d+ tokens\ncancelled with its nursery\nsequences that run: 0\n"
    ),
    "siblings": r"(.*… \d+ characters\n){4}first: .+",
    "structured_output": r"Person\(name='.*', age=\d+, mood='\w+', friends=\[.*\]\)\n",
    "semantic_search": r"a pet\n +0\.\d+  The (cat|kitten)",
    "logits_processor": r"as it is: '.*\d.*'\nwithout digits: '\D*'\n$",
    "adapters": r"no adapter: '(.*)'\nuntrained: '\1'\nwild: '.*'\n",
}
"""Outputs of the programs that open an engine."""
ASK_A_SERVER = ("disconnect", "tool_loop")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def use_the_web_app(main: Any, printed: Any) -> None:
    """Check that a story is told, another is left, and OpenAI's API is there."""
    async with trio.open_nursery() as nursery:
        (url,) = await nursery.start(main, 0)
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            story = await client.get("/stories/whales")
            assert story.status_code == 200
            assert story.text
            async with client.stream("GET", "/stories/bears") as left:
                async for _ in left.aiter_bytes():
                    break
            models = await client.get("/llm/v1/models")
            assert models.json()["data"][0]["id"] == "smollm2-135m"
        nursery.cancel_scope.cancel()
    assert printed().startswith("told of whales\n")


async def test_those_with_an_engine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def printed() -> str:
        return capsys.readouterr().out

    adapters = write_adapters(tmp_path, untrained=0, wild=0.5)
    monkeypatch.setenv("PYTHONPATH", f"{EXAMPLES}:{ROOT}")
    options: dict[str, Any] = {
        "enable_lora": True,
        "logits_processors": ("logits_processor:WithoutTokens",),
    }
    async with trioserve.open_engine("smollm2-135m", **options) as engine:

        @contextlib.asynccontextmanager
        async def the_engine(model: str, **given: Any) -> AsyncIterator[trioserve.Engine]:
            assert model == "smollm2-135m"
            assert given.items() <= options.items()
            yield engine

        monkeypatch.setattr(trioserve, "open_engine", the_engine)
        for name, pattern in PRINTS.items():
            given = [[f"{each}={path}" for each, path in adapters.items()]]
            await load(name).main(*(given if name == "adapters" else ()))
            text = printed()
            assert re.match(pattern, text, re.DOTALL), f"{name}: {text}"
        await use_the_web_app(load("web_app").main, printed)
        await engine.wait_idle()
        engine.check_integrity()


def test_the_script() -> None:
    command = [sys.executable, str(EXAMPLES / "batch_offline.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "The capital of France is Paris.\n" in done.stdout
    assert re.search(r"^\d+ tokens$", done.stdout, re.MULTILINE)


async def test_a_draft_model_is_trained(tmp_path: Path) -> None:
    model, small, prompts = (tmp_path / name for name in ("model", "small", "prompts"))
    make_tiny("qwen3", model)
    prompts.write_text("\n".join(f"What is {number}?" for number in range(16)))
    given = ["--prompts", prompts, "--layers", "1", "--minutes", "0.1"]
    command = [sys.executable, EXAMPLES / "draft_model.py", model, small, *given]
    # Two threads that wait for each other while other tests have the cores hardly get anywhere.
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, env=alone)
    assert done.returncode == 0, done.stderr
    shares = [int(share) for share in re.findall(r"(\d+)% of tokens agree", done.stdout)]
    assert shares[-1] > shares[0], done.stdout
    config = {"method": "draft_model", "model": str(small), "adaptive": False}
    options = {"dtype": "bfloat16", "speculative_config": json.dumps(config)}
    async with open_tiny_engine(model, **options) as engine:
        drafted = await engine.complete("What is 3?", max_tokens=32, temperature=0)
    assert drafted.usage.draft_tokens > 0
    async with open_tiny_engine(model, dtype="bfloat16") as engine:
        undrafted = await engine.complete("What is 3?", max_tokens=32, temperature=0)
    assert drafted.token_ids == undrafted.token_ids


def test_the_tests() -> None:
    module = load("test_my_app")
    tests = [value for name, value in vars(module).items() if name.startswith("test_")]
    assert len(tests) == 3
    for test in tests:
        test()


def test_all_are_run_and_listed_and_a_page_each() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    others = {"batch_offline", "draft_model", "test_my_app", "web_app"}
    assert names == {*PRINTS, *ASK_A_SERVER, *others}
    text = (EXAMPLES / "README.md").read_text()
    assert set(re.findall(r"^\| \[`(\w+)\.py`\]\(\1\.py\) \|", text, re.MULTILINE)) == names
    for name in names:
        most = 120 if name == "draft_model" else 60
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= most
