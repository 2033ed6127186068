"""Encoders against transformers, on tiny random models: the same embeddings and logits."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import pytest
import safetensors.torch
import torch
import transformers

from gpu.models.encoder import model as encoder_model
from gpu.models.encoder.loading import load_encoder
from gpu.models.encoder.model import Encoder
from gpu.models.encoder.packing import LengthGroup, pack, split
from gpu.models.encoder.pooling import pool
from gpu.models.encoder.relative import RelativeBias, buckets_of
from tests.support.rounding import apart, sum_error, terms_of_folder
from tests.support.tiny_encoders import FAMILIES, make_encoder, write_sentence_modules
from trioserve.model_files import open_encoder
from trioserve.protocol.errors import ModelLoadError
from trioserve.text.encoder_tokenizer import EncoderTokenizer

LENGTHS = (7, 1, 12, 38, 7, 2, 30, 12, 7)
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "is", "in", "42")

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Encoder:
    return load_encoder(open_encoder(folder), dtype, "cpu", lambda done, total: None)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``tiny(family, head)`` is the folder of that model."""
    made: dict[tuple[str, str], Path] = {}

    def folder(family: str, head: str = "Model") -> Path:
        if (family, head) not in made:
            made[family, head] = make_encoder(family, tmp_path_factory.mktemp(family), head)
        return made[family, head]

    return folder


def random_ids(lengths: Sequence[int], seed: int = 0) -> list[Ints]:
    """Ids of all kinds, the one of padding too, which RoBERTa doesn't count."""
    chance = np.random.default_rng(seed)
    return [chance.integers(0, 90, length) for length in lengths]


def no_types(ids: Sequence[Ints]) -> list[Ints]:
    return [np.zeros_like(sequence) for sequence in ids]


def assert_near(actual: Floats, wanted: Floats, folder: Path) -> None:
    """Assert that only rounding tells ``actual`` from ``wanted``, results of the model there."""
    config = json.loads((folder / "config.json").read_text())
    longest = config.get("max_position_embeddings", max(LENGTHS))
    bound = apart(terms_of_folder(folder, longest), wanted)
    np.testing.assert_allclose(actual, wanted, rtol=0, atol=bound)


def reference(folder: Path, head: str) -> Any:
    prefix = "AutoModel" if head == "Model" else f"AutoModel{head}"
    return getattr(transformers, prefix).from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def hidden_states(folder: Path, ids: Sequence[Ints], types: Sequence[Ints]) -> list[Floats]:
    """Return what transformers computes for each sequence by itself: [length, E]."""
    model = reference(folder, "Model")
    results = []
    for sequence, kinds in zip(ids, types, strict=True):
        given = {"input_ids": torch.tensor(sequence[None])}
        if model.config.model_type == "bert":
            given["token_type_ids"] = torch.tensor(kinds[None])
        results.append(model(**given).last_hidden_state[0].numpy())
    return results


POOLINGS: dict[str, Callable[[Floats], Floats]] = {
    "cls": lambda hidden: hidden[0],
    "mean": lambda hidden: hidden.mean(0),
    "last": lambda hidden: hidden[-1],
    "max": lambda hidden: hidden.max(0),
}


class TestEmbeddings:
    @pytest.mark.parametrize("family", sorted(FAMILIES))
    def test_each_family_with_mixed_lengths(self, tiny: Any, family: str) -> None:
        folder, ids = tiny(family), random_ids(LENGTHS)
        types = no_types(ids)
        if family.startswith("bert"):
            types = [np.arange(len(sequence)) % 3 // 2 for sequence in ids]
        wanted = np.stack([hidden.mean(0) for hidden in hidden_states(folder, ids, types)])
        got = load(folder).run(ids, types)
        assert got.dtype == np.float32
        assert_near(got, wanted, folder)

    @pytest.mark.parametrize("pooling", sorted(POOLINGS))
    @pytest.mark.parametrize("normalize", [False, True])
    def test_poolings(self, tiny: Any, pooling: Any, normalize: bool) -> None:
        folder, ids = tiny("bert"), random_ids(LENGTHS)
        wanted = np.stack(
            [POOLINGS[pooling](hidden) for hidden in hidden_states(folder, ids, no_types(ids))]
        )
        if normalize:
            wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
        encoder = load(folder)
        encoder.config = attrs.evolve(encoder.config, pooling=pooling, normalize=normalize)
        got = encoder.run(ids, no_types(ids))
        assert_near(got, wanted, folder)

    @pytest.mark.parametrize("pooling", sorted(POOLINGS))
    def test_vectors_of_16_bits_are_pooled_in_float32(self, pooling: Any) -> None:
        hidden = torch.randn(50, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
        pooled = pool(hidden, torch.tensor([0, 1, 30, 50]), pooling)
        exact = hidden.float().numpy()
        wanted = [POOLINGS[pooling](part) for part in (exact[:1], exact[1:30], exact[30:])]
        assert pooled.dtype == torch.float32
        bound = sum_error(30, np.abs(exact).max())
        np.testing.assert_allclose(pooled.numpy(), np.stack(wanted), rtol=0, atol=bound)

    def test_a_batch_gives_what_each_sequence_gives(self, tiny: Any) -> None:
        encoder, ids = load(tiny("roberta")), random_ids(LENGTHS)
        together = encoder.run(ids, no_types(ids))
        alone = np.concatenate([encoder.run([each], no_types([each])) for each in ids])
        assert_near(together, alone, tiny("roberta"))

    def test_more_tokens_than_go_through_at_once(
        self, tiny: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        encoder, ids = load(tiny("bert")), random_ids(LENGTHS)
        whole = encoder.run(ids, no_types(ids))
        monkeypatch.setattr(encoder_model, "CPU_BATCH_TOKENS", 15)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
        assert_near(encoder.run(ids, no_types(ids)), whole, tiny("bert"))

    def test_no_sequences(self, tiny: Any) -> None:
        assert load(tiny("bert")).run([], []).shape == (0, 48)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_other_dtypes_are_near(self, tiny: Any, dtype: torch.dtype) -> None:
        folder, ids = tiny("bert"), random_ids(LENGTHS)
        exact = load(folder).run(ids, no_types(ids))
        model = reference(folder, "Model").to(dtype)
        with torch.inference_mode():
            theirs = np.stack(
                [
                    model(torch.tensor(each[None])).last_hidden_state[0].float().mean(0).numpy()
                    for each in ids
                ]
            )
        got = load(folder, dtype).run(ids, no_types(ids))
        assert np.linalg.norm(got - exact) < 1.5 * np.linalg.norm(theirs - exact)


class TestLabels:
    @pytest.mark.parametrize("family", sorted(FAMILIES))
    @pytest.mark.parametrize("num_labels", [1, 3])
    def test_pairs_of_texts(self, tmp_path: Path, family: str, num_labels: int) -> None:
        head = "ForSequenceClassification"
        folder = make_encoder(family, tmp_path, head, num_labels=num_labels)
        chance = np.random.default_rng(1)
        texts = [" ".join(chance.choice(WORDS, size)) for size in (1, 5, 3, 20, 2, 9, 0, 4)]
        pairs = list(zip(texts[::2], texts[1::2], strict=True))
        inputs: list[str | tuple[str, str]] = [*pairs, *texts]

        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        model = reference(folder, head)
        wanted = []
        with torch.inference_mode():
            for batch in (pairs, texts):
                given = theirs(batch, padding=True, truncation=True, return_tensors="pt")
                wanted.append(model(**given).logits)

        files = open_encoder(folder)
        tokenizer = EncoderTokenizer(files.load_tokenizer(), files.config)
        encoded = tokenizer.encode_batch(inputs)
        assert any(each.num_tokens > len(each.ids) for each in encoded)
        logits = load(folder).run(
            [np.array(each.ids) for each in encoded], [np.array(each.type_ids) for each in encoded]
        )
        assert_near(logits, torch.cat(wanted).numpy(), folder)


class TestDense:
    def test_layers_behind_the_pooling(self, tmp_path: Path) -> None:
        folder = make_encoder("bert", tmp_path)
        first = {"in_features": 48, "out_features": 20, "bias": True}
        second = {
            "in_features": 20,
            "out_features": 5,
            "bias": False,
            "activation_function": "torch.nn.modules.linear.Identity",
        }
        write_sentence_modules(
            folder,
            ("Pooling", {"word_embedding_dimension": 48, "pooling_mode_cls_token": True}),
            ("Dense", first),
            ("Dense", second),
            ("Normalize", {}),
        )
        generator = torch.Generator().manual_seed(0)
        w1, b1 = torch.randn(20, 48, generator=generator), torch.randn(20, generator=generator)
        w2 = torch.randn(5, 20, generator=generator)
        safetensors.torch.save_file(
            {"linear.weight": w1, "linear.bias": b1}, folder / "2_Dense" / "model.safetensors"
        )
        safetensors.torch.save_file({"linear.weight": w2}, folder / "3_Dense" / "model.safetensors")
        from sentence_transformers import SentenceTransformer

        texts = ["hello", "the quick brown fox", "a"]
        wanted = SentenceTransformer(str(folder), device="cpu").encode(texts)
        files = open_encoder(folder)
        encoded = EncoderTokenizer(files.load_tokenizer(), files.config).encode_batch(texts)
        encoder = load(folder)
        assert encoder.config.num_outputs == 5
        got = encoder.run(
            [np.array(each.ids) for each in encoded], [np.array(each.type_ids) for each in encoded]
        )
        assert_near(got, wanted, folder)


class TestWeights:
    def test_tensors_without_the_models_prefix_or_with_it(self, tiny: Any, tmp_path: Path) -> None:
        folder = make_encoder("bert", tmp_path)
        path = folder / "model.safetensors"
        tensors = safetensors.torch.load_file(path)
        prefixed = {f"bert.{name}": tensor for name, tensor in tensors.items()}
        prefixed["bert.embeddings.position_ids"] = torch.arange(40)[None]
        renamed = {
            name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                "LayerNorm.bias", "LayerNorm.beta"
            ): tensor
            for name, tensor in prefixed.items()
        }
        ids = random_ids(LENGTHS)
        wanted = load(folder).run(ids, no_types(ids))
        safetensors.torch.save_file(renamed, path)
        np.testing.assert_array_equal(load(folder).run(ids, no_types(ids)), wanted)

    @pytest.mark.parametrize("family", ["bert", "distilbert", "mpnet", "roberta"])
    def test_what_predicts_words_is_left_out(self, tmp_path: Path, family: str) -> None:
        folder = make_encoder(family, tmp_path, "ForMaskedLM")
        write_sentence_modules(folder, ("Pooling", {"pooling_mode": "cls"}))
        ids = random_ids(LENGTHS)
        wanted = [hidden[0] for hidden in hidden_states(folder, ids, no_types(ids))]
        got = load(folder).run(ids, no_types(ids))
        assert_near(got, np.stack(wanted), folder)

    def test_progress(self, tiny: Any) -> None:
        steps: list[tuple[int, int]] = []
        load_encoder(
            open_encoder(tiny("bert")),
            torch.float32,
            "cpu",
            lambda done, total: steps.append((done, total)),
        )
        assert steps[-1][0] == steps[-1][1]
        assert steps == sorted(steps)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"encoder.layer.1.output.dense.bias": None}, "has no tensor encoder.layer.1.output"),
            ({"extra.weight": torch.zeros(3)}, "holds the tensor extra.weight"),
            ({"embeddings.LayerNorm.bias": torch.zeros(3)}, r"LayerNorm.bias is \[3\], and the"),
            ({"bert.embeddings.LayerNorm.bias": torch.zeros(48)}, "LayerNorm.bias twice"),
            ({"embeddings.LayerNorm.bias": torch.zeros(48).long()}, "has the type I64"),
        ],
    )
    def test_tensors_that_do_not_fit(
        self, tmp_path: Path, change: dict[str, torch.Tensor | None], message: str
    ) -> None:
        folder = make_encoder("bert", tmp_path)
        path = folder / "model.safetensors"
        tensors = {**safetensors.torch.load_file(path), **change}
        safetensors.torch.save_file({n: t for n, t in tensors.items() if t is not None}, path)
        with pytest.raises(ModelLoadError, match=message):
            load(folder)


class TestInputs:
    @pytest.mark.parametrize(
        ("ids", "types"),
        [
            ([], []),
            ([1] * 41, [0] * 41),
            ([1, 120], [0, 0]),
            ([-1, 1], [0, 0]),
            ([1, 2], [0, 2]),
            ([1, 2], [-1, 0]),
            ([1, 2], [0]),
        ],
    )
    def test_what_the_model_has_no_place_for(
        self, tiny: Any, ids: list[int], types: list[int]
    ) -> None:
        with pytest.raises(ValueError, match=r"token|id|type"):
            load(tiny("bert")).run([np.array(ids, np.int64)], [np.array(types, np.int64)])

    def test_as_many_types_as_ids(self, tiny: Any) -> None:
        with pytest.raises(ValueError, match="1 sequences of ids and 0 of types"):
            load(tiny("bert")).run([np.array([1])], [])


class TestPacking:
    def test_batches_are_of_neighbours_in_length(self) -> None:
        assert list(split([5, 1, 9, 2, 5], 10)) == [[1, 3, 0], [4], [2]]
        assert list(split([20], 10)) == [[0]]
        assert list(split([], 10)) == []

    def test_positions_and_groups(self) -> None:
        ids = [np.array([7, 8]), np.array([1, 9]), np.array([5, 1, 6])]
        packed = pack(None, ids, no_types(ids))
        assert packed.positions.tolist() == [0, 1, 0, 1, 0, 1, 2]
        assert packed.ends.tolist() == [0, 2, 4, 7]
        assert packed.groups == (LengthGroup(2, 2), LengthGroup(1, 3))
        assert pack(1, ids, no_types(ids)).positions.tolist() == [2, 3, 1, 2, 2, 1, 3]


class TestRelativeBias:
    def test_kinds_of_distances_are_transformers(self) -> None:
        from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

        distances = torch.arange(-700, 701)
        wanted = MPNetEncoder.relative_position_bucket(distances)
        assert buckets_of(distances, 32).tolist() == wanted.tolist()

    @pytest.mark.parametrize("length", [1, 2, 9])
    def test_each_query_has_the_number_of_its_distance(self, length: int) -> None:
        table = torch.randn(32, 3, generator=torch.Generator().manual_seed(0))
        bias = RelativeBias(table, 9).of_length(length)
        assert bias.shape == (1, 3, length, length)
        places = torch.arange(length)
        kinds = buckets_of(places[None, :] - places[:, None], 32)
        assert torch.equal(bias[0], table[kinds].permute(2, 0, 1))

    def test_texts_as_long_as_a_real_model_takes(self, tmp_path: Path) -> None:
        folder = make_encoder("mpnet", tmp_path, max_position_embeddings=402)
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(
            json.dumps({**settings, "model_max_length": 400})
        )
        ids = random_ids((384, 3, 250, 384))
        wanted = [hidden.mean(0) for hidden in hidden_states(folder, ids, no_types(ids))]
        got = load(folder).run(ids, no_types(ids))
        assert_near(got, np.stack(wanted), folder)
