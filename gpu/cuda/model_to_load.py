"""One of the models that a worker computes on a GPU, the served one or its draft model: its size.

Loading asks each of them for its kernels, its weights and the memory of its steps.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence

import attrs
import torch

from gpu.attention.kv_cache import bytes_per_page
from gpu.cuda.assembly import ServingLimits, attention_limits, cache_shape
from gpu.cuda.device import Gpu, is_out_of_memory
from gpu.cuda.graphs import ladder, sharing_ladder
from gpu.cuda.model_kernels import model_kernels
from gpu.cuda.ranks import SoleRank
from gpu.kernels import KernelLoader, KernelSource
from gpu.kernels.attention_tile import check_attention_arguments
from gpu.kernels.nvrtc import KernelBuildError
from gpu.loading.draft_files import cannot_draft
from gpu.loading.loaded_model import OnProgress, of_weights
from gpu.loading.memory import graph_bytes, step_doesnt_fit
from gpu.models.decoder import Decoder
from gpu.models.operations.cuda_ops import CudaOperations
from gpu.models.registry import build_model
from gpu.sampling.prompt_logprobs import peak_bytes
from gpu.weights.expected import expected_tensors
from gpu.weights.tensors import load_weights
from trioserve.model_files import ModelConfig, ModelFiles
from trioserve.protocol.errors import ModelLoadError

# Norms, projections, attention with its merge, gate: what a layer launches, rounded up.
LAUNCHES_PER_LAYER = 14
# Two for each of a layer's four products.
LAUNCHES_OF_ADAPTERS = 8


@attrs.frozen(kw_only=True)
class ModelToLoad:
    """A model and the limits of its steps."""

    files: ModelFiles
    limits: ServingLimits
    dtype: torch.dtype
    serves_adapters: bool
    is_draft_model: bool = False
    rank: SoleRank = attrs.field(factory=SoleRank)
    """Rank that computes it, or a part of it."""

    @property
    def config(self) -> ModelConfig:
        """Configuration of the model, or of the rank's part of it."""
        part = self.rank.part
        return self.files.native if part is None else part.config()

    @property
    def weight_bytes(self) -> int:
        """Bytes of its weights."""
        part, shapes = self.rank.part, expected_tensors(self.config)
        names = [*shapes]
        if part is not None:
            own = map(part.name_of, expected_tensors(part.whole))
            names = [name for name in own if name is not None]
        return sum(math.prod(shapes[name]) for name in names) * self.dtype.itemsize

    @property
    def max_decode_rows(self) -> int:
        """Most rows of one token that a step may have."""
        return min(self.limits.max_num_seqs, self.limits.max_num_batched_tokens)

    @property
    def captures(self) -> bool:
        """True if its decode steps can be CUDA graphs.

        How many tokens an expert gets is known on the device only, and a graph's products have
        fixed numbers of rows: a step with experts is launched product by product.
        """
        return self.config.experts is None

    def page_bytes(self, device: torch.device) -> int:
        """Return the bytes of a page of its KV cache."""
        return bytes_per_page(cache_shape(self.config, self.limits, self.dtype, device))

    def page_bytes_of_ranks(self, device: torch.device) -> int:
        """Return the bytes of a page on all ranks together."""
        part = self.rank.part
        if part is None:
            return self.page_bytes(device)
        config = attrs.evolve(self.config, num_layers=part.whole.num_layers)
        return part.size * bytes_per_page(cache_shape(config, self.limits, self.dtype, device))

    def graph_bytes(self, activations: int) -> int:
        """Return the bytes of its CUDA graphs, for steps that allocate ``activations`` bytes."""
        num_rows = self.max_decode_rows
        plain = len(ladder(num_rows))
        sizes = plain + len(sharing_ladder(num_rows)) + (plain if self.serves_adapters else 0)
        of_layer = LAUNCHES_PER_LAYER + (LAUNCHES_OF_ADAPTERS if self.serves_adapters else 0)
        return graph_bytes(2 * sizes, of_layer * self.config.num_layers, activations)

    def kernels(self, loader: KernelLoader) -> list[KernelSource]:
        """Return all kernels that it needs.

        Raises:
            ModelLoadError: one isn't made for the model.
        """
        config, limits = self.config, self.limits
        shape = cache_shape(config, limits, self.dtype, loader.device)
        with self.refusing_shapes():
            check_attention_arguments(
                dtype=self.dtype,
                cache_dtype=shape.dtype,
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                page_size=limits.page_size,
            )
            of_attention = attention_limits(
                config, limits, loader.num_multiprocessors, self.rank.part
            )
            return model_kernels(
                config,
                dtype=self.dtype,
                cache_dtype=shape.dtype,
                may_share=of_attention.may_share,
                serves_adapters=self.serves_adapters,
                vocab_size=self.files.native.vocab_size if self.rank.draws else None,
            )

    def load(self, loader: KernelLoader, on_progress: OnProgress) -> Decoder:
        """Return the model, each of its tensors moved to the GPU as it is read."""
        with self.refusing_shapes():
            operations = CudaOperations(
                loader,
                hidden_size=self.config.hidden_size,
                mlp_sizes=self.config.mlp_sizes,
                dtype=self.dtype,
            )
        part = self.rank.part
        weights = load_weights(
            self.files,
            self.dtype,
            of_weights(on_progress),
            lambda name: part is None or part.has(name),
        )
        return build_model(
            self.files.native,
            weights,
            operations,
            part,
            self.rank.ranks,
            loader.device,
        )

    @contextlib.contextmanager
    def refusing_shapes(self) -> Iterator[None]:
        """Yield; a kernel that isn't made for the model says so in a ValueError."""
        try:
            yield
        except ValueError as error:
            if self.is_draft_model:
                raise cannot_draft(self.files, f"on a GPU, {error}") from error
            raise ModelLoadError(
                f"this model is not served so on a GPU: {error}; --device cpu may serve it"
            ) from error


def build_kernels(gpu: Gpu, models: Sequence[ModelToLoad], on_progress: OnProgress) -> None:
    """Build the kernels of all ``models``, side by side.

    Raises:
        ModelLoadError: one can't be built, or isn't made for its model.
    """
    sources = dict.fromkeys(source for each in models for source in each.kernels(gpu.loader))
    try:
        gpu.build(sources, lambda done, total: on_progress("kernels", done, total))
    except KernelBuildError as error:
        raise ModelLoadError(f"the kernels can't be built: {error}") from error


def measure(
    gpu: Gpu,
    models: Sequence[ModelToLoad],
    decoders: Sequence[Decoder],
    free: int,
    on_progress: OnProgress,
    prepare: PrepareStep,
) -> tuple[int, int]:
    """Run the largest step of each model over a cache that just holds it.

    ``free`` is what was free before the weights. Returns the bytes in use then, without the caches
    and with the largest activations, and these alone.
    """
    on_progress("memory", 0, 1)
    steps = [
        _largest_step(gpu, each, decoder, prepare)
        for each, decoder in zip(models, decoders, strict=True)
    ]
    activations = max(step.activations for step in steps)
    held = free - gpu.memory()[0] - sum(step.cache_bytes for step in steps)
    on_progress("memory", 1, 1)
    return held + activations, activations


PrepareStep = Callable[[Decoder, ServingLimits, Sequence[int]], tuple[object, Callable[[], None]]]
"""Prepares a step of prompts of some lengths; returns what keeps it alive, and what runs it."""


@attrs.frozen(kw_only=True)
class _LargestStep:
    kept: object
    """Kept alive until the memory of all models is measured together."""
    activations: int
    cache_bytes: int


def _largest_step(
    gpu: Gpu, each: ModelToLoad, model: Decoder, prepare: PrepareStep
) -> _LargestStep:
    limits, num_rows = each.limits, each.max_decode_rows
    length = min(limits.max_num_batched_tokens // num_rows, limits.max_model_len)
    num_pages = num_rows * -(-length // limits.page_size)
    with each.refusing_shapes(), explaining(lambda: step_doesnt_fit(limits.max_num_batched_tokens)):
        kept, run = prepare(model, attrs.evolve(limits, num_pages=num_pages), [length] * num_rows)
        activations = gpu.peak_of(run)
    # Prompts are reported on when the activations of the forward pass are free again.
    scoring = peak_bytes(model.vocab_size, limits.max_num_batched_tokens)
    return _LargestStep(
        kept=kept,
        activations=max(activations, scoring),
        cache_bytes=num_pages * each.page_bytes(gpu.loader.device),
    )


@contextlib.contextmanager
def explaining(line: Callable[[], str]) -> Iterator[None]:
    """Running out of the GPU's memory in the block is an error of this one line."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise ModelLoadError(line()) from error
