"""The machine code that the sources of the attention kernels promise."""

from __future__ import annotations

import attrs

from gpu.kernels import KernelSource

__all__ = ["Code", "code_of", "expected_code"]

ATTENTION = ("decode_attention", "prefill_attention", "prefix_attention")


@attrs.frozen(kw_only=True)
class Code:
    """Counts of the instructions that an attention kernel's speed and order of copies depend on."""

    products: int
    """``HMMA``: of one tile, for the loop over the tiles is neither unrolled nor doubled."""
    barriers: int
    """``BAR``."""
    barriers_within: int
    """``BAR`` between the first of the products and the last."""
    groups: int
    """``LDGDEPBAR``: where groups of asynchronous copies are closed."""
    waits: int
    """``DEPBAR``: where they are waited for."""


def code_of(names: list[str]) -> Code:
    """Count in a kernel's instructions, which are in their order."""
    opcodes = [name.partition(".")[0] for name in names]
    products = [at for at, opcode in enumerate(opcodes) if opcode == "HMMA"]
    return Code(
        products=len(products),
        barriers=opcodes.count("BAR"),
        barriers_within=opcodes[products[0] : products[-1]].count("BAR"),
        groups=opcodes.count("LDGDEPBAR"),
        waits=opcodes.count("DEPBAR"),
    )


def expected_code(source: KernelSource) -> Code | None:
    """Derive the counts from the tiling; None if ``source`` is no attention kernel."""
    if source.name not in ATTENTION:
        return None
    choices = dict(source.defines)
    head_dim = int(choices["HEAD_DIM"])
    quantized = choices["CACHE"] == "e4m3"
    if source.name == "decode_attention":
        # 16 x 16 scores and 16 x HEAD_DIM outputs, each product 16 x 8 x 16. Barriers: two at the
        # merge, one between items, one where queries lie in shared memory: none in the loop.
        return Code(
            products=head_dim // 4,
            barriers=3 + (head_dim > 128),
            barriers_within=0,
            groups=4,
            waits=3,
        )
    # M_TILES times (KEYS / 8 x HEAD_DIM / 16 for the scores, KEYS / 16 x HEAD_DIM / 8 for the
    # output). Barriers: one a tile and one after the widening, one before queries are read into
    # registers, one before the output passes through the tiles.
    m_tiles = int(choices["TILE"]) // (source.num_threads // 2)
    q_in_registers = m_tiles * head_dim // 4 <= int(choices["Q_REGISTERS"])
    return Code(
        products=m_tiles * int(choices["KEYS"]) * head_dim // 64,
        barriers=1 + quantized + q_in_registers + (source.name == "prefill_attention"),
        barriers_within=0,
        groups=3,
        waits=1 + q_in_registers,
    )
