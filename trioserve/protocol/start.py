"""The message that tells a worker what to load (:mod:`trioserve.protocol.wire` has the others)."""

from __future__ import annotations

import attrs

from trioserve.protocol.certificates import Credentials
from trioserve.protocol.speculation import SpeculativeConfig


@attrs.frozen(kw_only=True)
class MockSteps:
    """Durations of a mock worker's steps, which compute nothing: for measuring all but the model.

    A step takes ``step_seconds``, plus ``token_seconds`` for each token that it would compute.
    """

    step_seconds: float
    token_seconds: float = 0.0


@attrs.frozen(kw_only=True)
class Start:
    """Engine to worker: the model to load and its limits; 0 means "choose"."""

    model: str
    """The path of a folder or a GGUF file; names are looked up before."""
    device: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int
    num_pages: int
    kv_cache_dtype: str
    kv_cache_memory_bytes: int
    gpu_memory_utilization: float
    num_threads: int
    logprobs_mode: str
    max_logprobs: int
    enforce_eager: bool
    deterministic: bool
    quantization: str
    tokenizer: str
    """The tokenizer's path if it isn't the model's own, else empty; for grammars."""
    logits_processors: list[str]
    """``module:Class`` of each, in the order of application."""
    model_impl: str = "auto"
    """Implementation of the model: ``auto``, ``native`` or ``transformers``."""
    cpu_isa: str = "auto"
    """Instruction set of a CPU's kernels: ``auto`` or one of ``KERNEL_ISAS``."""
    weights: str = ""
    """Path of the weights if they aren't the model's own any more: a folder or a file."""
    has_grammars: bool = False
    """True if requests have followed grammars: what these need is loaded with the model then."""
    max_lora_rank: int = 0
    """The largest rank of adapters; 0 for no adapters."""
    process_memory_limit: int = 0
    """The most bytes of weights and KV cache in each process on a CPU; 0 for no limit."""
    kv_offloading_bytes: int = 0
    """Bytes of the host's memory for pages that are offloaded from the KV cache."""
    kv_offloading_dir: str = ""
    """Folder for pages that were offloaded; empty for none."""
    kv_offloading_dir_bytes: int = 0
    """The most bytes of pages in that folder, for one model and number format."""
    hands_over: bool = False
    """True if other workers have to get its pages, because each computes a part of a request."""
    max_loras: int = 0
    """The most adapters in one plan."""
    free_memory: int = 0
    """``Ready.free_memory`` of the first process; 0 for that itself. It may come back late."""
    tensor_parallel_size: int = 1
    """Number of ranks that have a part of every layer of a stage each."""
    tensor_parallel_slices: int = 0
    """Number of slices of the ranks' sums; 0 if the worker chooses it."""
    pipeline_parallel_size: int = 1
    """Number of stages, which have some of the layers each."""
    pipeline_parallel_layers: list[int] = attrs.field(factory=list)
    """Number of layers of each stage; empty if the worker chooses it."""
    enable_expert_parallel: bool = False
    """True if a rank has some of the experts, rather than a part of each."""
    num_sharing: int = 1
    """Number of workers that share a CPU's memory."""
    speculative: SpeculativeConfig | None = None
    """Options of speculative decoding; None for none."""
    mock: MockSteps | None = None
    """Set for a worker that loads no weights and computes nothing; None for a real one."""
    cores: list[int] = attrs.field(factory=list)
    """Cores to which a worker on a CPU is bound; empty for all that it may use."""
    rank_cores: list[list[int]] = attrs.field(factory=list)
    """Cores to which each rank is bound, rank 0 included; empty if all have those of rank 0."""
    link_timeout: float = 0.0
    """Seconds of silence after which an agent counts its engine as lost, and a node the others."""
    num_nodes: int = 1
    """Number of hosts that have the ranks, as many each. This one has the first of them."""
    nodes_listen: str = ""
    """Address and port at which the other hosts join."""
    nodes_tls: Credentials | None = None
    """Certificates for that; only rank 0, or a rank of another host, has its own."""

    @property
    def num_ranks(self) -> int:
        """Number of processes that compute the model together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size
