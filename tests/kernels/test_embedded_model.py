"""Embeddings, or keys and values, in place of tokens over kernels; rotary positions of images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from gpu.kernels import KernelLoader
from tests.kernels.serving import Judge, Server
from tests.support.plans import GREEDY
from tests.support.tiny_media import make_media_model
from tests.support.tiny_models import make_tiny
from trioserve.model_files import open_model
from trioserve.protocol.embeddings import NUMPY_DTYPES, EmbeddingRows, ImageGrid

GRIDS = [ImageGrid(start=4, rows=3, columns=5), ImageGrid(start=21, rows=2, columns=2)]
MARGIN = 0.1
PROMPT = [(7 * i * i + 3 * i) % 300 for i in range(27)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama3", tmp_path_factory.mktemp("llama"), head_dim=64)


@pytest.mark.parametrize("graphs", [False, True])
def test_embeddings_of_tokens(folder: Path, loader: KernelLoader, graphs: bool) -> None:
    """In chunks, of which one is a single embedding, beside a row that decodes."""
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    rows = table[PROMPT[4:20]].astype(np.float32)
    embedded = EmbeddingRows(start=4, rows=rows.tobytes(), number_format="float32")
    placeholders = [*PROMPT[:4], *([0] * 16), *PROMPT[20:]]
    server = Server.of(folder, loader, graphs=graphs)
    outputs = []
    for tokens, embeddings in ((PROMPT, []), (placeholders, [embedded])):
        server.maker.open(0, PROMPT[:9])
        server.maker.open(1, tokens, embeddings=embeddings)
        given = [server.maker.step(plan) for plan in ({0: 9, 1: 12}, {0: 1, 1: 1}, {0: 1, 1: 14})]
        given += [server.maker.step({0: 1, 1: 1}) for _ in range(3)]
        outputs.append(given)
        server.maker.close(0)
        server.maker.close(1)
    assert outputs[0] == outputs[1]
    assert server.runner.slots[1].embeddings == ()


@pytest.mark.parametrize("graphs", [False, True])
def test_keys_and_values_of_tokens(folder: Path, loader: KernelLoader, graphs: bool) -> None:
    """They are in another order, of which attention over them knows nothing."""
    server, judge = Server.of(folder, loader, graphs=graphs), Judge(folder)
    layers, heads, size = open_model(folder).native.kv_shape
    server.maker.open(0, PROMPT)
    server.maker.step({0: 27})
    pages = [server.executor.read_page(page) for page in server.maker.slots[0].pages]
    page_size = len(pages[0]) // (4 * layers * heads * size)
    numbers = np.stack(pages).view(NUMPY_DTYPES["bfloat16"])
    numbers = numbers.reshape(-1, layers, 2, heads, page_size, size).transpose(0, 4, 1, 2, 3, 5)
    numbers = numbers.reshape(-1, 2 * layers * heads * size)[20::-1]
    server.maker.close(0)
    prefix = EmbeddingRows(start=0, rows=numbers.tobytes(), number_format="bfloat16")
    server.maker.open(0, [*([0] * 21), *PROMPT[21:]], prefix=[prefix], num_prefix=21)
    for plan in ({0: 6}, *[{0: 1}] * 5):
        server.maker.step(plan)
    tokens = [*PROMPT, *server.maker.slots[0].tokens[len(PROMPT) :]]
    judge.check(tokens, len(PROMPT), GREEDY, margin=MARGIN)
    assert server.runner.slots.prefixes == []


@pytest.mark.parametrize("graphs", [False, True])
def test_rotary_positions_of_images(tmp_path: Path, loader: KernelLoader, graphs: bool) -> None:
    """In chunks, beside a row without an image; the last token of an image may be the prompt's."""
    folder = make_media_model("qwen2_vl", tmp_path)
    server, judge = Server.of(folder, loader, graphs=graphs), Judge(folder)
    prompts = [PROMPT[:9], PROMPT, PROMPT[:13]]
    grids = [[], GRIDS, [ImageGrid(start=4, rows=3, columns=3)]]
    for slot, prompt in enumerate(prompts):
        server.maker.open(slot, prompt, grids=grids[slot])
    each = {0: 1, 1: 1, 2: 1}
    for plan in ({0: 9, 1: 12, 2: 12}, each, {**each, 1: 14}, *[each] * 5):
        server.maker.step(plan)
    for slot, prompt in enumerate(prompts):
        tokens = server.maker.slots[slot].tokens
        judge.check(tokens, len(prompt), GREEDY, margin=MARGIN, grids=grids[slot])
        away = (judge.logits(tokens, grids[slot]) - judge.logits(tokens)).abs()[-8:].mean()
        assert away > 5 * MARGIN or not grids[slot]
