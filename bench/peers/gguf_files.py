"""The default model in other number formats, as GGUF files that both sides of a comparison read.

The numbers are those of the file that the model comes in, dequantized to float32 and rounded to the
format asked for. Everything else in the file is copied as it is.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from trioserve.model_files import locate

__all__ = ["FORMATS", "model_file"]

FORMATS = ("bf16", "q8_0", "q4_1")
"""Formats that the model can be had in; the last is that of the file that it comes in."""

_TYPES = {"bf16": gguf.GGMLQuantizationType.BF16, "q8_0": gguf.GGMLQuantizationType.Q8_0}
_FILE_TYPES = {"bf16": gguf.LlamaFileType.MOSTLY_BF16, "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0}
_REPLACED = ("general.architecture", "general.file_type")


def model_file(model: str, format: str, kept: Path) -> Path:
    """The GGUF file of ``model`` in ``format``, written to the folder ``kept`` if need be.

    Raises:
        ValueError: there is no such format.
        OSError: the model's own file can't be read, or the new one can't be written.
    """
    if format not in FORMATS:
        raise ValueError(f"formats are {', '.join(FORMATS)}, not {format!r}")
    original = Path(locate(model))
    if format not in _TYPES:
        return original
    path = kept / f"{Path(model).stem}-{format}.gguf"
    if not path.exists():
        kept.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        _convert(original, part, format)
        part.rename(path)
    return path


def _convert(original: Path, path: Path, format: str) -> None:
    reader = gguf.GGUFReader(original)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_file_type(_FILE_TYPES[format])
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in _REPLACED:
            continue
        kind, *inner = field.types
        writer.add_key_value(field.name, field.contents(), kind, inner[-1] if inner else None)
    for tensor in reader.tensors:
        values = gguf.dequantize(np.asarray(tensor.data), tensor.tensor_type)
        # Vectors, such as the weights of norms, are float32 in every format.
        kind = _TYPES[format] if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
