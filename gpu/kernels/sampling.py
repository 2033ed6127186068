"""Launches the sampler's four kernels, which share one struct of parameters.

``mark_tokens.cu``, ``scan_logits.cu``, ``draw_tokens.cu`` and ``top_logprobs.cu``, in this order;
see ``sampling.cuh``.
"""

from __future__ import annotations

import attrs
import numpy as np
import torch

from gpu.kernels import KernelLoader, KernelSource, parameters

BLOCK = 128
"""Tokens in a block of the draw's first race."""
MAX_HISTORY = (1 << 20) - 2
"""Most tokens of a slot: a mark counts to this."""

SLOT_RECORD = parameters(
    ("repetition_penalty", "f8"),
    ("inverse_repetition_penalty", "f8"),
    ("frequency_penalty", "f8"),
    ("presence_penalty", "f8"),
    ("top_p", "f8"),
    ("seed", "u8"),
    ("bias_ids", "u8"),
    ("bias_values", "u8"),
    ("stop_ids", "u8"),
    ("temperature", "f4"),
    ("min_p", "f4"),
    ("top_k", "i4"),
    ("min_tokens", "i4"),
    ("prompt_length", "i4"),
    ("sequence_index", "u4"),
    ("logprobs", "i4"),
    ("processed_logprobs", "i4"),
    ("num_bias", "i4"),
    ("num_stop", "i4"),
)
"""The sampling parameters of a slot; ``SlotRecord`` in ``sampling.cuh`` explains each."""

ROW_REPORT = parameters(
    ("end", "u8"),
    ("peak", "f4"),
    ("temperature", "f4"),
    ("log_total", "f4"),
    ("count", "i4"),
)

PARAMETERS = parameters(
    ("logits", "u8"),
    ("bias", "u8"),
    ("bitmask", "u8"),
    ("slots", "u8"),
    ("lengths", "u8"),
    ("history", "u8"),
    ("records", "u8"),
    ("marks", "u8"),
    ("stats", "u8"),
    ("raw_stats", "u8"),
    ("reports", "u8"),
    ("tokens", "u8"),
    ("logprobs", "u8"),
    ("top_ids", "u8"),
    ("top_values", "u8"),
    ("logits_stride", "i8"),
    ("history_stride", "i8"),
    ("marks_stride", "i8"),
    ("vocab_size", "i4"),
    ("num_blocks", "i4"),
    ("max_logprobs", "i4"),
    ("appends", "i4"),
)

WALK_THREADS = 256
SCAN_THREADS = 128
BLOCKS_PER_GROUP = 16
"""Blocks of tokens that one thread block of ``scan_logits.cu`` reads."""
# (blocks of tokens, threads, list capacity): a small vocabulary has no work for many threads.
_TILINGS = ((256, 256, 1024), (2304, 512, 2048))
_SCRATCH = 34


@attrs.frozen(kw_only=True)
class Tiling:
    """The division of a vocabulary among the blocks of kernels that work on a whole row."""

    num_blocks: int
    """Blocks of tokens."""
    num_threads: int
    list_capacity: int
    """Candidates that are sorted in shared memory; more take further passes over the logits."""

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a thread block, as ``SharedParts`` divides it."""
        padded = 1 << (self.num_blocks - 1).bit_length()
        words = _SCRATCH + self.list_capacity + padded + max(self.list_capacity, padded)
        return 8 * (words + self.num_blocks)

    @classmethod
    def of(cls, vocab_size: int) -> Tiling:
        """Return the tiling for ``vocab_size`` tokens.

        Raises:
            ValueError: there are more than the kernels are made for.
        """
        num_blocks = -(-vocab_size // BLOCK)
        for most, threads, capacity in _TILINGS:
            if 0 < num_blocks <= most:
                return cls(num_blocks=num_blocks, num_threads=threads, list_capacity=capacity)
        raise ValueError(
            f"a vocabulary of {vocab_size} tokens: the sampler's kernels take 1 to "
            f"{_TILINGS[-1][0] * BLOCK}"
        )


def _source(
    name: str, num_threads: int, *defines: tuple[str, int], shared: int = 0
) -> KernelSource:
    records = (
        ("SLOT_RECORD_BYTES", SLOT_RECORD.itemsize),
        ("ROW_REPORT_BYTES", ROW_REPORT.itemsize),
    )
    return KernelSource(
        name=name,
        parameters=PARAMETERS,
        num_threads=num_threads,
        defines=(*defines, *records),
        shared_bytes=shared,
    )


def sampling_sources(tiling: Tiling) -> dict[str, KernelSource]:
    """Return the four kernels by name."""
    capacity = ("LIST_CAPACITY", tiling.list_capacity)
    sources = [
        _source("mark_tokens", WALK_THREADS),
        _source("scan_logits", SCAN_THREADS, ("BLOCKS_PER_GROUP", BLOCKS_PER_GROUP)),
        _source("draw_tokens", tiling.num_threads, capacity, shared=tiling.shared_bytes),
        _source("top_logprobs", tiling.num_threads, capacity, shared=tiling.shared_bytes),
    ]
    return {source.name: source for source in sources}


_LARGEST = [Tiling.of(num_blocks * BLOCK) for num_blocks, _, _ in _TILINGS]
VARIANTS = list(
    {
        source.title: source for tiling in _LARGEST for source in sampling_sources(tiling).values()
    }.values()
)


@attrs.frozen(kw_only=True)
class SamplingMemory:
    """The tensors that the kernels work on, all on one device and contiguous.

    ``marks`` must be zero before the first step; the kernels leave it so.
    """

    records: torch.Tensor  # [num_slots, SLOT_RECORD.itemsize] uint8
    history: torch.Tensor  # [num_slots, stride] int32
    marks: torch.Tensor  # [max_rows, vocab_size rounded up to 4] int32
    stats: torch.Tensor  # [2, max_rows, num_blocks, 2] float32, adjusted and raw
    reports: torch.Tensor  # [max_rows, ROW_REPORT.itemsize] uint8
    tokens: torch.Tensor  # [max_rows] int32
    logprobs: torch.Tensor  # [max_rows] float32
    top_ids: torch.Tensor  # [max_rows, max_logprobs] int32
    top_values: torch.Tensor  # [max_rows, max_logprobs] float32


class SamplingKernels:
    """The four launches of a step."""

    def __init__(
        self,
        loader: KernelLoader,
        memory: SamplingMemory,
        *,
        vocab_size: int,
        appends: bool,
    ) -> None:
        tiling = Tiling.of(vocab_size)
        self._kernels = {
            name: loader.load(source) for name, source in sampling_sources(tiling).items()
        }
        self._memory = memory
        self._scan_groups = -(-tiling.num_blocks // BLOCKS_PER_GROUP)
        self._thread_blocks = 2 * loader.num_multiprocessors
        filled = np.zeros(1, dtype=PARAMETERS)
        for name in ("records", "history", "marks", "reports", "tokens", "logprobs"):
            filled[name] = getattr(memory, name).data_ptr()
        filled["stats"] = memory.stats[0].data_ptr()
        filled["raw_stats"] = memory.stats[1].data_ptr()
        filled["top_ids"] = memory.top_ids.data_ptr()
        filled["top_values"] = memory.top_values.data_ptr()
        filled["history_stride"] = memory.history.stride(0)
        filled["marks_stride"] = memory.marks.stride(0)
        filled["vocab_size"] = vocab_size
        filled["num_blocks"] = tiling.num_blocks
        filled["max_logprobs"] = memory.top_ids.shape[1]
        filled["appends"] = appends
        self._parameters = filled

    def launch(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        bitmask: torch.Tensor | None = None,
    ) -> None:
        """Draw for the rows of ``logits``; see :meth:`gpu.cuda.sampler.DeviceSampler.launch`."""
        rows = len(logits)
        filled = self._parameters
        filled["logits"] = logits.data_ptr()
        filled["logits_stride"] = logits.stride(0)
        filled["slots"] = slots.data_ptr()
        filled["lengths"] = lengths.data_ptr()
        filled["bias"] = 0 if bias is None else bias.data_ptr()
        filled["bitmask"] = 0 if bitmask is None else bitmask.data_ptr()
        self._kernels["mark_tokens"].launch((self._walkers(rows), rows, 1), filled)
        self._kernels["scan_logits"].launch((self._scan_groups, rows, 1), filled)
        self._kernels["draw_tokens"].launch((rows, 1, 1), filled)
        self._kernels["top_logprobs"].launch((rows, 1, 1), filled)

    def _walkers(self, rows: int) -> int:
        """Thread blocks that share a row's history: what fills the machine, but none idle."""
        useful = -(-self._memory.history.shape[1] // WALK_THREADS)
        return max(1, min(useful, -(-self._thread_blocks // max(rows, 1))))
