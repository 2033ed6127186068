"""Splits stacked experts' tensors into one matrix an expert, under one set of names.

Most folders have three matrices for each expert; Mixtral's have other names. Other files stack the
experts of a layer: GGUF files have one tensor each for gate, up and down, and transformers 5 may
store gate and up as one, [experts, 2 F, E]. In every layout an expert's matrix is contiguous.
"""

from __future__ import annotations

import re
from collections.abc import Container

_MIXTRAL_PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_MIXTRAL = re.compile(r"(.*\.mlp\.experts\.\d+)\.(w[123])\.weight", re.ASCII)
_STACKED = re.compile(
    r"(.*\.mlp\.experts)\.(?:(gate)_(up)|(gate)|(up)|(down))_proj(?:\.weight)?", re.ASCII
)


def with_common_name(name: str) -> str:
    """Return the common name of a Mixtral expert's matrix: ``experts.3.w1`` is its ``gate_proj``.

    Other names are returned unchanged.
    """
    name = name.replace(".block_sparse_moe.", ".mlp.")
    match = _MIXTRAL.fullmatch(name)
    return f"{match[1]}.{_MIXTRAL_PARTS[match[2]]}.weight" if match else name


def split_experts(
    name: str, shape: tuple[int, ...], expected: Container[str]
) -> tuple[list[str], tuple[int, ...]]:
    """Return the names of a stacked tensor's matrices, in order, and the shape of each.

    Any other tensor is returned as it is, and so is one with more matrices than ``expected``.
    """
    match = _STACKED.fullmatch(name)
    if match is None or len(shape) != 3 or shape[0] == 0:
        return [name], shape
    stem, *parts = (part for part in match.groups() if part is not None)
    last = f"{stem}.{shape[0] - 1}.{parts[-1]}_proj.weight"
    if shape[1] % len(parts) or last not in expected:
        return [name], shape
    names = [f"{stem}.{expert}.{part}_proj.weight" for expert in range(shape[0]) for part in parts]
    return names, (shape[1] // len(parts), shape[2])
