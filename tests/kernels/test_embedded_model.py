"""Embeddings in place of tokens over kernels: those of a prompt's tokens give its output."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from gpu.kernels import KernelLoader
from tests.kernels.serving import Server
from tests.support.tiny_models import make_tiny
from trioserve.protocol.embeddings import EmbeddingRows

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
