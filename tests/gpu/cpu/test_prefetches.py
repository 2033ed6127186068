"""The products' loops ask for the weights that come next.

No result depends on it, so a compiler may leave it out. gcc did: that took a tenth of the rate at
32 rows, and half of it at one row of 4-bit weights.
"""

from __future__ import annotations

import platform

import pytest

from gpu.cpu.build import build
from gpu.cpu.isa import ISAS
from tests.support.kernels import isas, tile_functions
from trioserve.protocol.machine import compiler_version

pytestmark = pytest.mark.skipif(compiler_version() is None, reason="no C++ compiler")

INSTRUCTION = {"x86_64": "prefetcht1", "aarch64": "pldl2keep"}
KERNELS_HERE = sorted({ISAS[name].kernels for name in isas()})


@pytest.mark.parametrize("isa", KERNELS_HERE)
def test_every_tile_asks_for_the_weights_that_come_next(isa: str) -> None:
    found = tile_functions(build([isa]))
    assert found
    wanted = INSTRUCTION[platform.machine()]
    assert [name for name, code in found.items() if wanted not in code] == []
