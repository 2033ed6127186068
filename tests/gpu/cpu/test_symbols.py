"""No function of one instruction set has the name of another's.

All kernels are linked into one library. Of several inline functions or templates of one name, a
linker keeps one, so a processor could run into instructions that it doesn't have.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gpu.cpu.build import build, compile_library
from gpu.cpu.isa import ISAS
from tests.support.kernels import isas
from trioserve.protocol.machine import compiler_version

pytestmark = pytest.mark.skipif(compiler_version() is None, reason="no C++ compiler")


def shared_names(library: Path, isa: str) -> set[str]:
    """Return the global symbols of a library that another instruction set's could have, too."""
    command = ["nm", "--defined-only", "--extern-only", str(library)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names = {line.split()[-1] for line in listed.splitlines()}
    own = f"9trioserve{len(isa)}{isa}"
    return {name for name in names if own not in name and not name.startswith(f"{isa}_")}


KERNELS_HERE = sorted({ISAS[name].kernels for name in isas()})


@pytest.mark.parametrize("isa", KERNELS_HERE)
def test_all_symbols_name_their_instruction_set(isa: str) -> None:
    found = shared_names(build([isa]), isa)
    assert {name for name in found if "9trioserve9detection" not in name} <= {
        *("detected_instructions", "_init", "_fini"),
    }


SOURCE = """
#include <algorithm>
#include <vector>
namespace trioserve::TRIOSERVE_ISA {
struct Own { int number; };
template <class T> struct Values { std::vector<T> all; void add(T x) { all.push_back(x); } };
void keep(Values<Own>& some) { some.add({1}); }
PLANTED
}
"""


@pytest.mark.parametrize(
    ("planted", "name"),
    [
        ("", ""),
        (
            "void (*order)(float*, float*) = std::sort<float*>;",
            "_ZSt4sortIPf",
        ),
        (
            "}\ninline int twice(int x) { return 2 * x; }\nint (*of)(int) = twice;\n"
            "namespace trioserve::TRIOSERVE_ISA {",
            "_Z5twicei",
        ),
    ],
    ids=["none", "a template of the standard library", "an inline function"],
)
def test_a_planted_name_is_found(planted: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "kernel.cpp").write_text(SOURCE.replace("PLANTED", planted))
    library = tmp_path / "library.so"
    compile_library(["avx2"], library, sources=tmp_path)
    found = shared_names(library, "avx2")
    assert any(each.startswith(name) for each in found) == bool(name)
    assert not (found and not name)
