"""The compiled kernels in a process of their own: for another processor, an emulator runs it.

``remote_kernels.cpp`` is the program. It allocates memory, and calls functions with its addresses.
"""

from __future__ import annotations

import os
import struct
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from gpu.attention import CacheShape, QkNorm, StepLayout
from gpu.cpu.products import Kind
from gpu.executor import Copies

SOURCE = Path(__file__).with_suffix(".cpp")
_FORMS = {torch.bfloat16: 0, torch.float32: 1, torch.uint8: 2}
Argument = int | float
AnyArray = npt.NDArray[Any]


@attrs.frozen
class Program:
    """A built program, the library that it loads, and the instruction set of the functions."""

    command: Sequence[str]
    library: Path
    isa: str
    environment: Mapping[str, str] = attrs.field(factory=dict)

    def start(self) -> RemoteKernels:
        """Return the kernels in a process that a ``with`` block ends."""
        return RemoteKernels(self)


class RemoteKernels:
    """A process with kernels. Its memory lives as long as the process."""

    def __init__(self, program: Program) -> None:
        self._isa = program.isa
        self._process = subprocess.Popen(
            [*program.command, str(program.library)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **program.environment},
        )

    def __enter__(self) -> RemoteKernels:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _, said = self._process.communicate()
        if error is None:
            assert self._process.returncode == 0, said.decode()
            assert not said, said.decode()

    def allocate(self, size: int) -> int:
        """Return the address of new memory."""
        self._send(b"a", _words(size))
        return self._number()

    def free(self, address: int) -> None:
        """Free memory of :meth:`allocate`."""
        self._send(b"f", _words(address))

    def put(self, data: bytes) -> int:
        """Return the address of a copy of ``data``."""
        address = self.allocate(len(data))
        self._send(b"w", _words(address, len(data)), data)
        return address

    def put_array(self, array: AnyArray | torch.Tensor) -> int:
        """Return the address of a copy of an array."""
        if isinstance(array, torch.Tensor):
            array = array.contiguous().view(torch.uint8).numpy()
        return self.put(array.tobytes())

    def get(self, address: int, size: int) -> bytes:
        """Return bytes of the process's memory."""
        self._send(b"r", _words(address, size))
        return self._receive(size)

    def get_tensor(self, address: int, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the same form and type as ``like`` from memory."""
        data = self.get(address, like.numel() * like.element_size())
        return torch.frombuffer(bytearray(data), dtype=like.dtype).view(like.shape)

    def call(self, name: str, *arguments: Argument) -> int:
        """Call a function of the instruction set; 32-bit results are in the lower half."""
        return self.call_shared(f"{self._isa}_{name}", *arguments)

    def call_shared(self, name: str, *arguments: Argument) -> int:
        """Call a function by its whole name."""
        integers = [x for x in arguments if isinstance(x, int)]
        floats = [struct.pack("<f4x", x) for x in arguments if isinstance(x, float)]
        self._send(
            *(b"c", _words(len(name)), name.encode()),
            *(_words(len(integers), *integers), _words(len(floats)), *floats),
        )
        return self._number()

    def _send(self, *pieces: bytes) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        try:
            pipe.write(b"".join(pieces))
            pipe.flush()
        except BrokenPipeError:
            self._fail()

    def _receive(self, size: int) -> bytes:
        pipe = self._process.stdout
        assert pipe is not None
        data = pipe.read(size)
        if len(data) < size:
            self._fail()
        return data

    def _number(self) -> int:
        return int.from_bytes(self._receive(8), "little")

    def _fail(self) -> None:
        pipe = self._process.stderr
        assert pipe is not None
        said, status = pipe.read().decode(errors="replace"), self._process.wait()
        raise AssertionError(f"the kernels' process ended with status {status}: {said}")


def _words(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}q", *numbers)


class RemoteProduct:
    """``x @ weight.T + bias`` by a remote process; the weight is float32, or a kind's blocks."""

    def __init__(
        self,
        kernels: RemoteKernels,
        kind: Kind,
        weight: torch.Tensor,
        shape: Sequence[int],
        bias: torch.Tensor | None = None,
    ) -> None:
        self._kernels = kernels
        outputs, inputs = shape
        self._outputs = outputs
        pool = kernels.call("product_pool_open", 1)
        packed = kernels.allocate(kernels.call("product_packed_bytes", kind, outputs, inputs))
        source = kernels.put_array(weight)
        kernels.call(
            "product_pack", pool, _FORMS[weight.dtype], kind, outputs, inputs, source, packed
        )
        kernels.call("product_pool_close", pool)
        kernels.free(source)
        address = 0 if bias is None else kernels.put_array(bias)
        segment = struct.pack("<iiqqQ", kind, 0, 0, outputs, packed)
        head = struct.pack("<qqQq", inputs, outputs, address, 1)
        self._struct = kernels.put(head + segment + bytes(2 * len(segment) + 8))

    def multiply(
        self, x: torch.Tensor, dtype: torch.dtype = torch.float32, threads: int = 2
    ) -> torch.Tensor:
        """Return the product with ``x`` [rows, inputs] bfloat16."""
        kernels, rows = self._kernels, len(x)
        y = torch.empty(rows, self._outputs, dtype=dtype)
        pool = kernels.call("product_pool_open", threads)
        size = kernels.call("product_scratch_bytes", self._struct, rows, threads)
        memory = [kernels.put_array(x), kernels.put_array(y), kernels.allocate(size)]
        to_float = dtype == torch.float32
        kernels.call(
            "product_multiply", pool, self._struct, memory[0], rows, memory[1], to_float, memory[2]
        )
        y = kernels.get_tensor(memory[1], y)
        kernels.call("product_pool_close", pool)
        for address in memory:
            kernels.free(address)
        return y


class RemoteAttention:
    """:class:`gpu.attention.Attention` by a remote process, over a cache of one layer there."""

    def __init__(
        self,
        kernels: RemoteKernels,
        shape: CacheShape,
        num_heads: int,
        cos_sin: torch.Tensor,
        *,
        max_tokens: int,
        threads: int,
    ) -> None:
        self._kernels, self._shape, self._num_heads = kernels, shape, num_heads
        self._cos_sin = kernels.put_array(cos_sin)
        size = 2 * shape.num_pages * shape.num_kv_heads * shape.page_size * shape.head_dim
        unwritten = torch.full((size,), torch.nan, dtype=torch.bfloat16)
        self._pages = kernels.put_array(unwritten)
        self._step = self._queries = 0
        form = (num_heads, shape.num_kv_heads, shape.head_dim, shape.page_size)
        of_model = kernels.put(struct.pack("<4if", *form, shape.head_dim**-0.5))
        self._handle = kernels.call("attention_create", of_model, max_tokens, threads)

    def close(self) -> None:
        """End the threads."""
        self._kernels.call("attention_destroy", self._handle)

    def copy_pages(self, copies: Copies) -> None:
        """Fail: the tests copy no pages."""
        raise NotImplementedError

    def begin(self, layout: StepLayout) -> None:
        """See :meth:`gpu.attention.Attention.begin`."""
        put = self._kernels.put_array
        tables = np.ascontiguousarray(layout.block_tables, dtype=np.int32)
        contexts = layout.context_lens.astype(np.int64)
        addresses = (put(layout.query_start.astype(np.int64)), put(contexts), put(tables))
        fields = struct.pack("<qQQQqQ", len(contexts), *addresses, tables.shape[1], 0)
        self._step = self._kernels.put(fields)

    def rope_and_write(
        self, layer: int, qkv: torch.Tensor, rotate: bool, qk_norm: QkNorm | None = None
    ) -> torch.Tensor:
        """See :meth:`gpu.attention.Attention.rope_and_write`."""
        self._queries = self._kernels.put_array(qkv)
        self._kernels.call(
            "attention_rope_and_write",
            *(self._handle, self._step, self._cos_sin if rotate else 0),
            0 if qk_norm is None else self._kernels.put_array(qk_norm.weight),
            0.0 if qk_norm is None else qk_norm.eps,
            *(self._queries, self._pages),
        )
        return self._kernels.get_tensor(self._queries, qkv)[:, : self._num_heads]

    def attend(self, layer: int, q: torch.Tensor, window: int | None) -> torch.Tensor:
        """See :meth:`gpu.attention.Attention.attend`."""
        kernels = self._kernels
        out = torch.empty(q.shape, dtype=q.dtype)
        address = kernels.put_array(out)
        kernels.call(
            *("attention_attend", self._handle, self._step, window or 0, 1),
            *(kernels.put(_words(self._pages)), self._queries, q.stride(0), address),
        )
        return kernels.get_tensor(address, out)
