"""Tensor parallel: several processes of a worker give what one gives, and are lost together."""

from __future__ import annotations

import shutil
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from gpu.models.parallel import link as link_module
from gpu.models.parallel.link import EXIT_RANK_LOST, RankLink
from tests.support.engines import assert_idle, open_tiny_engine, worker_of
from tests.support.lora_adapters import make_adapter
from tests.support.rank_engines import (
    adapted,
    answers,
    assert_gone,
    assert_noticed,
    logprobs_of,
    prompt,
    ranks_of,
    tokens_of,
)
from tests.support.tiny_models import make_tiny
from trioserve import ModelLoadError


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3_moe", tmp_path_factory.mktemp("qwen3_moe"))


@pytest.mark.parametrize(
    "more", [{}, {"enable_expert_parallel": True, "kv_offloading_bytes": 1 << 20}]
)
async def test_outputs_are_those_of_one_process(tiny: Path, more: dict[str, Any]) -> None:
    """With prompts in chunks and too few pages for all, so that sequences are preempted."""
    options = {"max_num_batched_tokens": 16, "num_gpu_blocks_override": 24, "block_size": 4}
    async with open_tiny_engine(tiny, **options) as engine:
        alone = await answers(engine)
    async with open_tiny_engine(tiny, tensor_parallel_size=2, **options, **more) as engine:
        (rank,) = await ranks_of(engine)
        assert [each.rank_pids for each in engine.workers] == [(rank.pid,)]
        together = await answers(engine)
        counts = engine.statistics().scheduler
        assert counts.num_preemptions > 0
        assert bool(counts.pages_offloaded) == ("kv_offloading_bytes" in more)
        await assert_idle(engine)
    for one, other in zip(alone, together, strict=True):
        assert tokens_of(one) == tokens_of(other)
        assert logprobs_of(one) == pytest.approx(logprobs_of(other), abs=1e-4)
    assert any(map(logprobs_of, alone))


async def test_bfloat16_is_served(tiny: Path) -> None:
    """Sums are rounded otherwise than on one rank, so only the first probability is near."""
    found = []
    for size in (1, 2):
        options = {"dtype": "bfloat16", "tensor_parallel_size": size}
        async with open_tiny_engine(tiny, **options) as engine:
            answer = await engine.complete(prompt(2), max_tokens=8, temperature=0, logprobs=0)
            found.append(logprobs_of(answer)[0])
    assert found[0] == pytest.approx(found[1], abs=0.3)


async def outputs_with_adapters(folder: Path, **options: Any) -> list[list[tuple[int, ...]]]:
    """Return the outputs with adapters that come and go, of one rank and of two."""
    model = make_tiny("llama3", folder / "model", hidden_size=128, intermediate_size=128)
    paths = {f"a{i}": make_adapter(model, folder / f"{i}", seed=i) for i in range(3)}
    found = []
    for size in (1, 2):
        options = {**options, "enable_lora": True, "tensor_parallel_size": size}
        async with open_tiny_engine(model, **options) as engine:
            for name in ("a0", "a1"):
                await engine.load_adapter(name, paths[name])
            first = await adapted(engine, "a0", "", "a1")
            await engine.unload_adapter("a0")
            await engine.load_adapter("a2", paths["a2"])
            found.append([*first, *await adapted(engine, "a2", "a1", "")])
            await assert_idle(engine)
    return found


async def test_adapters_are_split_as_the_model_is(tmp_path: Path) -> None:
    alone, together = await outputs_with_adapters(tmp_path)
    assert alone == together
    assert len(set(alone)) == 6


async def assert_lost_with_its_worker(folder: Path, lost: str, **options: Any) -> None:
    """Kill a ``rank`` or the ``worker`` within an output, which goes on as it would have."""
    async with open_tiny_engine(folder, tensor_parallel_size=2, **options) as engine:
        asked: dict[str, Any] = {"temperature": 0, "max_tokens": 100, "ignore_eos": True}
        expected = await engine.complete(prompt(1), **asked)
        worker, ranks = await worker_of(engine), await ranks_of(engine)
        found: list[int] = []
        async with engine.generate(prompt(1), **asked) as stream:
            async for delta in stream:
                found += delta.token_ids
                if len(found) == 10:
                    (ranks[0] if lost == "rank" else worker).kill()
        assert found == list(expected.token_ids)
        await assert_gone([worker, *ranks])
        assert engine.statistics().worker_restarts == 1
        (report,) = engine.workers
        assert "killed by signal 9" in str(report.last_loss)
        await assert_idle(engine)


async def test_a_rank_that_is_lost_is_the_workers_loss(tiny: Path) -> None:
    """While the other one waits in a sum of torch's."""
    await assert_lost_with_its_worker(tiny, "rank")


async def test_a_rank_that_is_lost_between_steps_is_noticed_within_a_second(tiny: Path) -> None:
    async with open_tiny_engine(tiny, tensor_parallel_size=2) as engine:
        await assert_noticed(engine, "killed")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 3}, "3 doesn't divide the model's 4 heads"),
        (
            {"kv_offloading_bytes": 1 << 20, "kv_offloading_dir": "/tmp/pages"},
            "--kv-offloading-dir can't be had with several ranks: the compiled kernels compute in",
        ),
        (
            {"data_parallel_size": 2, "disaggregation": ("prefill", "decode")},
            "--disaggregation can't be had with several ranks: the compiled kernels compute in",
        ),
        (
            {"enable_expert_parallel": True, "tensor_parallel_size": 1},
            "--enable-expert-parallel is",
        ),
        ({"model_impl": "transformers"}, "2 is for models of this server's own decoders"),
        ({"quantization": "int8"}, "--quantization int8 can't be had"),
    ],
)
async def test_what_ranks_do_not_serve_is_refused(
    tiny: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        async with open_tiny_engine(tiny, **{"tensor_parallel_size": 2, **options}):
            raise AssertionError("it was opened")


async def test_the_reason_of_a_failed_load_is_told(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(tiny, tmp_path / "damaged")
    (weights,) = folder.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-100])
    with tempfile.TemporaryDirectory() as place:
        monkeypatch.setenv("TMPDIR", place)
        monkeypatch.setattr(tempfile, "tempdir", place)
        with pytest.raises(ModelLoadError, match="safetensors"):
            async with open_tiny_engine(folder, tensor_parallel_size=2):
                raise AssertionError("it was opened")
        assert not list(Path(place).glob("trioserve-ranks-*"))


def test_a_step_that_fails_on_a_rank_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sends no result: the others wait for numbers that never come."""
    link = RankLink(0, [])
    monkeypatch.setattr(link_module.time, "sleep", lambda _: None)
    monkeypatch.setattr(link_module.os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as caught, link.in_step():
        raise MemoryError
    assert caught.value.code == EXIT_RANK_LOST
    with link.in_step():
        pass


def test_a_worker_that_is_cut_off_from_a_rank_ends_as_if_it_was_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No request is to be suspected of it."""
    own, other = socket.socketpair()
    monkeypatch.setattr(link_module.time, "sleep", lambda _: None)
    monkeypatch.setattr(link_module.os, "kill", lambda _, number: sys.exit(number))
    link = RankLink(0, [own])
    with own, other:
        other.shutdown(socket.SHUT_RDWR)
        for use in (lambda: link.send(b"a step"), link.receive):
            with pytest.raises(SystemExit) as caught, link.in_step():
                use()
            assert caught.value.code == signal.SIGKILL
