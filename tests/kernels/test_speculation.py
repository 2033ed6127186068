"""Drafts over kernels: the same tokens as without, in fewer steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

from gpu.constraints.adjuster import Constraints
from gpu.constraints.grammar_cache import GrammarCache
from gpu.executor import Copies
from gpu.kernels import KernelLoader
from gpu.sampling.drafting.sources import AskedDraft, Draft, DraftKind
from gpu.slots import Row, Slot
from tests.kernels.drafted import ADJUSTED, NUM_TOKENS, PLAIN, open_grammars, serve
from tests.support.lora_adapters import make_adapter
from tests.support.tiny_models import make_tiny


@attrs.define
class PlannedDrafts:
    """A source that drafts ``outputs``, by slot, with every fifth token wrong."""

    outputs: Sequence[Sequence[int]]
    num_drafts: int = 0

    def look_up(self, asked: Mapping[int, AskedDraft]) -> dict[int, Draft]:
        drafts = {}
        for i, each in asked.items():
            slot = each.slot
            begin = slot.num_tokens - slot.prompt_length
            tokens = [
                (token + (place % 5 == 4)) % 300
                for place, token in enumerate(self.outputs[slot.number])
            ][begin : begin + each.most]
            if tokens:
                self.num_drafts += len(tokens)
                drafts[i] = Draft(tokens, 1, DraftKind.MODEL)
        return drafts

    def open(self, slot: Slot) -> None:
        pass

    def close(self, number: int) -> None:
        pass

    def copy_pages(self, copies: Copies) -> None:
        pass

    def note_pages(self, rows: Sequence[Row]) -> None:
        pass

    def seconds(self, num_rows: int) -> float:
        return 0.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama3", tmp_path_factory.mktemp("llama"), head_dim=64)


@pytest.fixture(scope="module")
def grammars(folder: Path) -> Iterator[GrammarCache]:
    with open_grammars(folder) as cache:
        yield cache


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("kind", ["plain", "adjusted", "adapters"])
def test_outputs_are_those_without_drafts(
    folder: Path,
    loader: KernelLoader,
    grammars: GrammarCache,
    tmp_path: Path,
    graphs: bool,
    kind: str,
) -> None:
    params = [*PLAIN, *ADJUSTED] if kind == "adjusted" else PLAIN
    options: dict[str, Any] = {
        "graphs": graphs,
        "adjuster": Constraints(300, grammars),
    }
    if kind == "adapters":
        options["adapters"] = [make_adapter(folder, tmp_path / "adapter", seed=1, rank=4, alpha=8)]
    plain = serve(folder, loader, params, **options)
    planned = PlannedDrafts([output.tokens for output in plain.outputs])
    drafted = serve(folder, loader, params, lambda server: (planned, None), **options)
    assert drafted.outputs == plain.outputs
    assert planned.num_drafts > NUM_TOKENS
    assert drafted.num_steps < plain.num_steps
