"""The interpreter itself: branches, scopes and formats, on PTX written by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels.ptx.formats import BF16, E4M3, FP16, Format
from tests.kernels.ptx.grid import run_block
from tests.kernels.ptx.machine import Array, Block
from tests.kernels.ptx.text import PtxError, parse

LOOP = """
.visible .entry count(
	.param .u64 count_param_0
)
{
	.reg .b32 %r<4>;
	ld.param.u64 %rd1, [count_param_0];
	mov.u32 %r1, %tid.x;
	mov.u32 %r2, 0;
	setp.eq.s32 %p1, %r1, 0;
	@%p1 bra $DONE;
$AGAIN:
	add.s32 %r2, %r2, %r1;
	sub.s32 %r1, %r1, 1;
	{ .reg .pred %p1; setp.ne.s32 %p1, %r1, 0; @%p1 bra $AGAIN; }
$DONE:
	vote.sync.ballot.b32 %r3, %p1, -1;
	mul.wide.u32 %rd2, %tid.x, 8;
	add.s64 %rd3, %rd1, %rd2;
	st.global.u32 [%rd3], %r2;
	st.global.u32 [%rd3+4], %r3;
	ret;
}
"""


def run(ptx: str, *, together: bool) -> tuple[Array, set[str]]:
    """Run 64 threads that write two words each."""
    out = np.zeros((64, 2), np.uint32)
    (entry,) = parse(ptx).values()
    executed: set[str] = set()
    pointer = np.array([out.ctypes.data], np.uint64).tobytes()
    run_block(Block(entry, 64, {}, pointer, 0), executed, together=together)
    return out, executed


@pytest.mark.parametrize("together", [False, True])
def test_lanes_that_branch_apart_meet_again(together: bool) -> None:
    """Let each lane loop as often as its number says; the inner predicate hides the outer one."""
    out, executed = run(LOOP, together=together)
    assert out[:, 0].tolist() == [n * (n + 1) // 2 for n in range(64)]
    assert out[:, 1].tolist() == [1] * 32 + [0] * 32
    assert {"bra", "vote.sync.ballot.b32", "ret"} <= executed


@pytest.mark.parametrize("together", [False, True])
def test_a_vote_that_a_lane_never_reaches_is_an_error(together: bool) -> None:
    early = LOOP.replace("@%p1 bra $DONE;", "@%p1 ret;")
    with pytest.raises(PtxError, match="wait for others that don't come"):
        run(early, together=together)


@pytest.mark.parametrize(
    ("form", "dtype"),
    [(BF16, torch.bfloat16), (FP16, torch.float16), (E4M3, torch.float8_e4m3fn)],
)
def test_formats_are_those_of_torch(form: Format, dtype: torch.dtype) -> None:
    width = 8 * dtype.itemsize
    bits = np.arange(2**width, dtype=np.uint64)
    elements = torch.from_numpy(bits.astype(f"u{width // 8}").view(f"i{width // 8}")).view(dtype)
    numbers = form.decode(bits)
    np.testing.assert_array_equal(numbers, elements.double().numpy())
    known = ~np.isnan(numbers)
    assert np.array_equal(form.encode(numbers)[known], bits[known])
    assert (form.encode(numbers)[~known] == form.nan).all()


def test_what_is_too_large_saturates_or_becomes_infinite() -> None:
    numbers = np.array([65519.0, 65520.0, -1e9, np.inf])
    assert FP16.encode(numbers).tolist() == [0x7BFF, 0x7C00, 0xFC00, 0x7C00]
    assert FP16.encode(numbers, saturate=True).tolist() == [0x7BFF, 0x7BFF, 0xFBFF, 0x7BFF]
    assert E4M3.encode(numbers, saturate=True).tolist() == [0x7E, 0x7E, 0xFE, 0x7E]
