"""The instruction set of the compiled kernels: what can be chosen, and what is refused."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

from gpu.cpu.isa import KernelIsa, choose_isa
from trioserve.protocol.errors import ModelLoadError
from trioserve.protocol.machine import KERNEL_ISAS, Machine


def library_with(*bodies: KernelIsa) -> Mock:
    """Return a library on a processor that has these bodies."""
    library = Mock()
    library.body_choose.side_effect = lambda body: int(body in bodies)
    return library


def test_the_numbers_are_in_the_order_of_the_names() -> None:
    assert [KernelIsa(number).name.lower() for number in range(len(KERNEL_ISAS))] == list(
        KERNEL_ISAS
    )


def test_a_slower_instruction_set_can_be_chosen() -> None:
    library = library_with(KernelIsa.AVX512_BF16, KernelIsa.AMX)
    choose_isa(library, "avx512_bf16")
    library.body_choose.assert_called_once_with(KernelIsa.AVX512_BF16)


def test_auto_is_the_fastest() -> None:
    library = library_with(KernelIsa.AVX512_BF16, KernelIsa.AMX)
    library.body_fastest.return_value = 1
    choose_isa(library, "auto")
    library.body_choose.assert_called_once_with(KernelIsa.AMX)


def test_an_instruction_set_that_is_not_there_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="--cpu-isa amx can't be had: the processor lacks it"):
        choose_isa(library_with(KernelIsa.AVX512_BF16), "amx")


@pytest.mark.parametrize(
    ("flags", "isa"),
    [
        ("avx512f avx512_bf16 avx512_vnni", "avx512_bf16"),
        ("avx512f avx512_bf16 avx512_vnni amx_bf16 amx_tile amx_int8", "amx"),
    ],
)
def test_a_machine_names_its_fastest_instruction_set(tmp_path: Path, flags: str, isa: str) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(f"flags : {flags}\n")
    assert Machine(tmp_path).kernel_isa() == isa
