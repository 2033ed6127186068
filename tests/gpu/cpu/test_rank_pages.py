"""Pages of several ranks are, byte for byte, those of one process, and move beside the steps."""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch

from gpu.cpu.build import LibraryBuildError
from gpu.cpu.library import load_library
from gpu.cpu.model import CpuModel
from gpu.executor import Content
from gpu.models.parallel import link as link_module
from gpu.models.parallel.link import EXIT_RANK_LOST, RankLink, connect_ranks
from gpu.models.parallel.model_part import ModelPart
from gpu.models.parallel.pages import FollowingPages, LeadingPages
from gpu.models.parallel.steps import BeginTransfer, decode_step
from tests.gpu.cpu.test_compiled_ranks import fields_of
from tests.gpu.cpu.test_native_model import PAGE_SIZE, SCORED, prompt_of, run
from tests.support.compiled_ranks import compiled_stages
from tests.support.tiny_models import make_tiny
from trioserve.model_files import ModelConfig, open_model

try:
    load_library()
except LibraryBuildError as error:
    pytest.skip(f"no compiled kernels: {error}", allow_module_level=True)

PROMPT = prompt_of(50)
NUM_PAGES = (len(PROMPT) - 1) // PAGE_SIZE
GROUPS = [(1, 2), (1, 4), (2, 1), (2, 2)]
"""Numbers of stages and of ranks of each. The model has two heads of keys, which four share."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    fields = {**fields_of("llama3"), "num_hidden_layers": 3}
    return make_tiny("llama3", tmp_path_factory.mktemp("llama3"), **fields)


@contextlib.contextmanager
def opened(tiny: Path, num_stages: int, size: int) -> Iterator[tuple[CpuModel, RankLink | None]]:
    """Yield a model in four slices, and the link to its stages."""
    with compiled_stages(tiny, num_stages, size, slices=4) as (model, link):
        yield model, link if num_stages > 1 else None


def computed(model: CpuModel, link: RankLink | None) -> tuple[list[Content], torch.Tensor]:
    """Return the pages of the prompt, and the logits behind it."""
    maker, sampler, _ = run(model, link)
    maker.open(0, PROMPT, SCORED)
    maker.step({0: 30})
    maker.step({0: 20})
    model.begin_transfer()
    pages = maker.slots[0].pages[:NUM_PAGES]
    return [model.read_page(page) for page in pages], sampler.seen[tuple(PROMPT)]


def continued(model: CpuModel, link: RankLink | None, pages: Sequence[Content]) -> torch.Tensor:
    """Return the logits behind the prompt over ``pages``, which are written first."""
    maker, sampler, _ = run(model, link)
    numbers = [maker.free.pop(0) for _ in pages]
    model.begin_transfer()
    for number, content in zip(numbers, pages, strict=True):
        model.write_page(number, content)
    maker.open(0, PROMPT, SCORED, shared_pages=numbers)
    maker.step({0: len(PROMPT) - NUM_PAGES * PAGE_SIZE})
    return sampler.seen[tuple(PROMPT)]


@pytest.mark.parametrize(("num_stages", "size"), GROUPS)
def test_pages_go_from_ranks_to_one_process_and_back(
    tiny: Path, num_stages: int, size: int
) -> None:
    with opened(tiny, 1, 1) as alone:
        pages, logits = computed(*alone)
    assert any(page.any() for page in pages)
    with opened(tiny, num_stages, size) as group:
        found, of_group = computed(*group)
        assert torch.equal(of_group, logits)
        assert all(np.array_equal(*both) for both in zip(found, pages, strict=True))
    with opened(tiny, num_stages, size) as group:
        assert torch.equal(continued(*group, pages), logits)
        assert not torch.equal(continued(*group, pages[::-1]), logits)


@attrs.define
class Part:
    """The pages of a rank of the test below."""

    pages: dict[int, Content]

    def read_page(self, number: int) -> Content:
        return self.pages[number]

    def write_page(self, number: int, content: Content) -> None:
        if content.shape != self.pages[0].shape:
            raise ValueError("a page has another size")
        self.pages[number] = content.copy()


@attrs.define
class Group:
    """Rank 0 and another rank, whose steps the test does."""

    links: list[RankLink]
    leading: LeadingPages
    parts: list[Part]
    follow: Callable[[], None]


@pytest.fixture
def group(tiny: Path) -> Iterator[Group]:
    config: ModelConfig = open_model(tiny).native
    links = connect_ranks(1, 2, with_pages=True)
    parts = [Part({0: np.full(24, rank, dtype=np.uint8)}) for rank in range(2)]
    following = FollowingPages(links[1], lambda: parts[1])
    following.start()

    def follow() -> None:
        assert isinstance(decode_step(links[1].receive()), BeginTransfer)
        following.begin()

    of_ranks = [ModelPart(config, rank, 2) for rank in range(2)]
    yield Group(links, LeadingPages(links[0], of_ranks), parts, follow)
    for link in links:
        for each in link.sockets:
            each.close()


def test_a_page_moves_once_the_steps_before_are_computed(group: Group) -> None:
    """Also if other steps follow."""
    with ThreadPoolExecutor(1) as pool:
        group.leading.begin()
        reading = pool.submit(group.leading.read, 0, group.parts[0])
        assert not reading.cancel()
        with pytest.raises(TimeoutError):
            reading.result(0.05)
        group.parts[1].pages[0] = np.full(24, 7, dtype=np.uint8)  # by a step
        group.follow()
        # Of each of the three layers one head is on each rank.
        assert reading.result(60).tolist() == ([0] * 8 + [7] * 8) * 3
    content = np.arange(48, dtype=np.uint8)
    group.leading.write(5, content, group.parts[0])
    assert group.leading.read(5, group.parts[0]).tolist() == content.tolist()
    assert group.parts[1].pages[5].tolist() == [*range(8, 16), *range(24, 32), *range(40, 48)]


@pytest.mark.parametrize("size", [47, 96])
def test_a_page_of_another_size_is_written_nowhere(group: Group, size: int) -> None:
    group.leading.begin()
    group.follow()
    with pytest.raises(ValueError, match=r"another size|cannot reshape"):
        group.leading.write(5, np.zeros(size, dtype=np.uint8), group.parts[0])
    assert [list(part.pages) for part in group.parts] == [[0], [0]]
    assert len(group.leading.read(0, group.parts[0])) == 48


def test_a_rank_that_fails_on_a_page_ends_with_its_worker(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No result is sent: what the rank has of the page isn't known."""
    ended: list[int] = []

    def end(status: int) -> None:
        ended.append(status)
        group.links[1].pages[0].shutdown(socket.SHUT_RDWR)  # as the end of its process does
        sys.exit(status)

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(link_module.time, "sleep", lambda _: None)
    monkeypatch.setattr(link_module.os, "_exit", end)
    monkeypatch.setattr(link_module.os, "kill", lambda _, number: sys.exit(number))
    group.parts[0].pages[3] = group.parts[0].pages[0]
    group.leading.begin()
    group.follow()
    with pytest.raises(SystemExit) as caught:
        group.leading.read(3, group.parts[0])
    assert (caught.value.code, ended) == (signal.SIGKILL, [EXIT_RANK_LOST])
    for thread in threading.enumerate():
        if thread.name == "pages":
            thread.join(60)
