"""Philox against the published vectors of Random123 and a second, scalar implementation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu.sampling.philox import Purpose, philox4x32, uniforms

WORD = st.integers(0, 2**32 - 1)


def scalar_philox(counter: list[int], key: list[int]) -> list[int]:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


# kat_vectors of Random123 1.09, lines "philox4x32 10".
KNOWN_ANSWERS = [
    ("00000000 " * 4, "00000000 " * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff " * 4, "ffffffff " * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_published_vectors(counter: str, key: str, answer: str) -> None:
    result = philox4x32(
        np.array([words(counter)], dtype=np.uint32), np.array([words(key)], dtype=np.uint32)
    )
    assert result.tolist() == [words(answer)]
    assert scalar_philox(words(counter), words(key)) == words(answer)


@given(st.lists(st.tuples(WORD, WORD, WORD, WORD, WORD, WORD), min_size=1, max_size=8))
def test_rows_are_independent_and_equal_the_scalar_form(rows: list[tuple[int, ...]]) -> None:
    table = np.array(rows, dtype=np.uint32)
    result = philox4x32(table[:, :4], table[:, 4:])
    assert result.tolist() == [scalar_philox(list(row[:4]), list(row[4:])) for row in rows]


@given(st.integers(0, 2**64 - 1), WORD, st.integers(0, 1000), st.sampled_from(Purpose), WORD)
def test_uniform_is_the_documented_function_of_its_counter(
    seed: int, position: int, index: int, purpose: Purpose, lane: int
) -> None:
    words = scalar_philox([position, index, purpose, lane], [seed % 2**32, seed >> 32])
    expected = ((words[0] >> 5) * 2**26 + (words[1] >> 6)) / 2**53
    for lanes in ([lane, 0], [[lane, 0]]):
        numbers = uniforms([seed], [position], [index], purpose, lanes)
        assert numbers.shape == (1, 2)
        assert numbers[0, 0] == expected
    assert 0.0 <= expected < 1.0


def test_uniforms_look_uniform_along_every_axis() -> None:
    count = 20_000
    steps = np.arange(count)
    zeros = np.zeros(count, dtype=np.int64)
    for seeds, positions, indices, lanes in (
        (steps, zeros, zeros, zeros[:1]),
        (zeros, steps, zeros, zeros[:1]),
        (zeros, zeros, steps, zeros[:1]),
        (zeros[:1], zeros[:1], zeros[:1], steps),
    ):
        numbers = uniforms(seeds, positions, indices, Purpose.BLOCK, lanes).reshape(-1)
        observed = np.bincount((numbers * 16).astype(int), minlength=16)
        statistic = float(((observed - count / 16) ** 2 / (count / 16)).sum())
        assert statistic < 44.3  # the 1e-4 point of chi-square with 15 degrees of freedom
        assert abs(float(np.corrcoef(numbers[:-1], numbers[1:])[0, 1])) < 0.03
