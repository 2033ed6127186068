"""The device's random numbers against those of the CPU's sampler, all 53 bits of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from gpu.kernels import KernelLoader, KernelSource, parameters
from gpu.sampling.philox import Purpose, uniforms
from tests.kernels.memory import place, poisoned

INPUTS = {
    "seeds": np.uint64,
    "positions": np.uint32,
    "sequence_indices": np.uint32,
    "purposes": np.uint32,
    "lanes": np.uint32,
}
SOURCE = KernelSource(
    name="random_numbers",
    parameters=parameters(
        *((name, "u8") for name in INPUTS),
        ("uniforms", "u8"),
        ("exponentials", "u8"),
        ("num", "i4"),
    ),
    num_threads=64,
    file=str(Path(__file__).parent / "random_numbers.cu"),
)
NUM = 1000


def test_the_same_bits_as_on_the_host(loader: KernelLoader) -> None:
    generator = np.random.default_rng(0)
    values = {
        "seeds": generator.integers(0, 2**64, NUM, dtype=np.uint64),
        "positions": generator.integers(0, 2**17, NUM, dtype=np.uint32),
        "sequence_indices": generator.integers(0, 8, NUM, dtype=np.uint32),
        "purposes": generator.choice(list(Purpose), NUM).astype(np.uint32),
        "lanes": generator.integers(0, 2**18, NUM, dtype=np.uint32),
    }
    placed = {name: place(_bits(array), loader) for name, array in values.items()}
    drawn = poisoned((NUM,), torch.float64, loader)
    exponentials = poisoned((NUM,), torch.float64, loader)
    fields = np.zeros(1, SOURCE.parameters)
    for name, tensor in placed.items():
        fields[name] = tensor.data_ptr()
    fields["uniforms"], fields["exponentials"] = drawn.data_ptr(), exponentials.data_ptr()
    fields["num"] = NUM
    loader.load(SOURCE).launch((-(-NUM // SOURCE.num_threads), 1, 1), fields)

    expected = np.empty(NUM)
    for purpose in Purpose:
        of = values["purposes"] == purpose
        columns = [values[name][of] for name in ("seeds", "positions", "sequence_indices")]
        expected[of] = uniforms(*columns, purpose, values["lanes"][of][:, None])[:, 0]
    assert drawn.cpu().numpy().tobytes() == expected.tobytes()
    # The logarithm is the device's own, which may differ in its last bit or two.
    np.testing.assert_allclose(exponentials.cpu(), -np.log1p(-expected), rtol=1e-15)


def _bits(array: np.ndarray) -> torch.Tensor:
    """Return the array as a tensor; torch has signed numbers only where a kernel's are unsigned."""
    return torch.from_numpy(array.view(f"i{array.dtype.itemsize}"))
