"""Decoders that were trained to embed texts, as sentence-transformers and others save them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import tokenizers
import torch
import transformers

from tests.support.engines import assert_idle, open_tiny_engine
from tests.support.http_stub import server_config
from tests.support.tiny_encoders import write_sentence_modules
from tests.support.tiny_models import make_tiny
from trioserve.http import create_app
from trioserve.model_files import open_model
from trioserve.model_files.decoder_embedding import DecoderEmbedding
from trioserve.protocol.errors import InvalidRequest, ModelLoadError

TOLERANCE = 1e-4
TEXTS = ["hello there world", "the cat and the dog on the house " * 6, "x", "you"]
POOLINGS = {
    "last": {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False},
    "mean": {"pooling_mode_mean_tokens": True},
    "cls": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False},
}


def make_embedder(folder: Path, pooling: str = "last", *more: Any, **overrides: Any) -> Path:
    """Return a Qwen 3 that embeds texts, with an end of text behind each."""
    make_tiny("qwen3", folder, **overrides)
    path = folder / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A:0 <|endoftext|>:0", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer.save(str(path))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["pad_token"] = "<|endoftext|>"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    steps = [("Pooling", {"word_embedding_dimension": 64, **POOLINGS[pooling]}), *more]
    write_sentence_modules(folder, *steps)
    return folder


def save_bare(folder: Path, place: Path) -> Path:
    """Return the model in ``folder`` without its head, in ``place`` with the same other files."""
    transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).save_pretrained(place)
    for path in folder.iterdir():
        if path.is_dir():
            (place / path.name).mkdir()
            (place / path.name / "config.json").write_bytes((path / "config.json").read_bytes())
        elif path.suffix == ".json" and path.name != "config.json":
            (place / path.name).write_bytes(path.read_bytes())
    return place


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize(
    ("pooling", "more"), [("last", [("Normalize", {})]), ("mean", [])], ids=["last", "mean"]
)
async def test_embeddings_are_sentence_transformers(
    tmp_path: Path, pooling: str, more: Any, bare: bool
) -> None:
    from sentence_transformers import SentenceTransformer  # ten seconds, not at collection

    folder = make_embedder(tmp_path / "whole", pooling, *more, tie_word_embeddings=False)
    if bare:
        folder = save_bare(folder, tmp_path / "bare")
    theirs = SentenceTransformer(str(folder), device="cpu")
    wanted = theirs.encode(TEXTS)
    async with open_tiny_engine(folder) as engine:
        assert engine.task == "embed"
        found = await engine.embed(TEXTS)
        np.testing.assert_allclose(found.vectors, wanted, rtol=0, atol=TOLERANCE)
        lengths = np.linalg.norm(wanted, axis=1, keepdims=True)
        unit = await engine.embed(TEXTS, normalize=True)
        np.testing.assert_allclose(unit.vectors, wanted / lengths, rtol=0, atol=TOLERANCE)
        scores = await engine.score(TEXTS[0], TEXTS[1:])
        cosines = theirs.similarity(wanted[:1], wanted[1:])[0].numpy()
        np.testing.assert_allclose(scores.values, cosines, rtol=0, atol=TOLERANCE)
        client: Any = create_app(engine, server_config()).test_client()
        reply = await (await client.post("/v1/embeddings", json={"input": TEXTS})).get_json()
        over_http = [each["embedding"] for each in reply["data"]]
        np.testing.assert_allclose(over_http, wanted, rtol=0, atol=TOLERANCE)
        assert (await client.get("/health_generate")).status_code == 200
        with pytest.raises(InvalidRequest, match="doesn't generate: it embeds texts"):
            engine.generate("x")
        await assert_idle(engine)


async def test_a_bare_model_without_other_files(tmp_path: Path) -> None:
    make_tiny("llama3", tmp_path / "whole")
    folder = save_bare(tmp_path / "whole", tmp_path / "bare")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        states = [model(**tokenizer(text, return_tensors="pt"))[0][0, -1] for text in TEXTS]
    wanted = torch.nn.functional.normalize(torch.stack(states), dim=-1).numpy()
    async with open_tiny_engine(folder) as engine:
        assert engine.task == "embed"
        found = await engine.embed(TEXTS)
        np.testing.assert_allclose(found.vectors, wanted, rtol=0, atol=TOLERANCE)


def test_what_the_files_say(tmp_path: Path) -> None:
    folder = make_embedder(tmp_path, "mean", ("Normalize", {}))
    assert open_model(folder).embedding == DecoderEmbedding(pooling="mean", normalize=True)
    assert open_model(folder).config.has_head
    write_sentence_modules(folder, ("Pooling", POOLINGS["cls"]))
    with pytest.raises(ModelLoadError, match="the pooling cls isn't served with this"):
        open_model(folder)
    dense = {"in_features": 64, "out_features": 8}
    write_sentence_modules(folder, ("Pooling", POOLINGS["last"]), ("Dense", dense))
    with pytest.raises(ModelLoadError, match="Dense isn't served with this"):
        open_model(folder)
    write_sentence_modules(folder)
    assert open_model(folder).embedding == DecoderEmbedding()
    (folder / "modules.json").unlink()
    assert open_model(folder).embedding is None


def test_a_model_that_generates_needs_all_its_weights(tmp_path: Path) -> None:
    folder = make_tiny("qwen3", tmp_path, tie_word_embeddings=False)
    assert open_model(folder).config.has_head
    assert not open_model(folder).config.tie_word_embeddings


def test_files_without_output_weights(tmp_path: Path) -> None:
    folder = make_embedder(tmp_path, tie_word_embeddings=False)
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    del tensors["lm_head.weight"]
    safetensors.torch.save_file(tensors, path)
    assert not open_model(folder).config.has_head
    (folder / "modules.json").unlink()
    assert open_model(folder).config.has_head
