"""A worker of the compiled kernels never loads torch, and loads llguidance when it is asked to."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from gpu.cpu.build import LibraryBuildError
from gpu.cpu.library import load_library
from tests.support.engines import assert_idle, open_tiny_engine
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_models import make_tiny
from trioserve.protocol.grammar import Grammar

try:
    load_library()
except LibraryBuildError as error:
    pytest.skip(f"no compiled kernels: {error}", allow_module_level=True)

PROMPT = list(range(3, 40))


def libraries_of_the_worker() -> str:
    """Return the names of all files that the one worker process has mapped."""
    # Other tests of this process may have children of their own.
    (worker,) = [each for each in psutil.Process().children() if "--connect" in each.cmdline()]
    return "\n".join(each.path for each in worker.memory_maps())


@pytest.mark.parametrize("quantization", [None, "Q4_0", "Q6_K"])
async def test_all_that_a_request_may_ask_for_is_served_without_torch(
    tmp_path: Path, quantization: str | None
) -> None:
    path = make_tiny("qwen3", tmp_path, hidden_size=256, intermediate_size=512, head_dim=64)
    if quantization is not None:
        path = write_gguf(path, tmp_path / "tiny.gguf", quantization=quantization)
    options = {"dtype": "auto" if quantization else "bfloat16"}
    async with open_tiny_engine(path, **options) as engine:
        assert engine.ready.computing.startswith("compiled kernels")
        plain = await engine.complete(PROMPT, max_tokens=3, temperature=0.0)
        assert len(plain.token_ids) == 3
        assert "llguidance" not in libraries_of_the_worker()
        reported = await engine.complete(
            PROMPT,
            max_tokens=3,
            temperature=0.9,
            top_p=0.9,
            logprobs=3,
            prompt_logprobs=2,
            logit_bias={5: 1.0},
            repetition_penalty=1.1,
            seed=1,
        )
        assert reported.prompt_logprobs is not None
        chosen = await engine.complete(PROMPT, max_tokens=20, grammar=Grammar("regex", "[ab]{3}"))
        assert len(chosen.text) == 3
        libraries = libraries_of_the_worker()
        assert "llguidance" in libraries
        assert "torch" not in libraries
        await assert_idle(engine)


async def test_torch_is_there_where_it_computes(tmp_path: Path) -> None:
    path = make_tiny("qwen3", tmp_path)
    async with open_tiny_engine(path, dtype="float32") as engine:
        assert engine.ready.computing.startswith("torch")
        assert "libtorch" in libraries_of_the_worker()
