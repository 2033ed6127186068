"""Experts' tensors: under one set of names, and one by one, however a file has them.

There are two layouts. In most folders each expert has three matrices of its own, which have other
names in those of Mixtral. Or a layer's are stacked into tensors of three dimensions: GGUF files
have one for gates, one for ups and one for downs, and transformers 5 computes with gates and ups in
one, [experts, 2 F, E], which a folder may keep. Whichever it is, an expert's matrix is a run of
bytes.
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
    """``...block_sparse_moe.experts.3.w1.weight`` -> ``...mlp.experts.3.gate_proj.weight``.

    Any other name stays as it is.
    """
    name = name.replace(".block_sparse_moe.", ".mlp.")
    match = _MIXTRAL.fullmatch(name)
    return f"{match[1]}.{_MIXTRAL_PARTS[match[2]]}.weight" if match else name


def split_experts(
    name: str, shape: tuple[int, ...], expected: Container[str]
) -> tuple[list[str], tuple[int, ...]]:
    """Return the names of the matrices that a tensor is made of, one after the other, and their
    shape.

    A tensor that isn't stacked is made of itself, and so is one of more than the ``expected``
    matrices.
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
