"""The bounds that the scheduler keeps, and the check that a request fits within them."""

from __future__ import annotations

import attrs

from trioserve.config import EngineConfig
from trioserve.protocol import wire
from trioserve.protocol.errors import ContextTooLong, InvalidRequest
from trioserve.requests.logprobs import PromptLogprobs
from trioserve.requests.request import Request
from trioserve.requests.tensors import RequestTensors, check_size, tensor_bytes

DEFAULT_CPU_LORAS = 32
MAX_PROMPT_LOGPROBS = 1 << 20
"""Log-probabilities of prompt tokens in one answer, counting repetitions for each output.

They are kept until the answer is written, and take about 100 bytes each in its JSON.
"""


@attrs.frozen(kw_only=True)
class SchedulerLimits:
    """Capacity of the worker and options of the engine; options of the same names explain them."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    page_size: int
    num_pages: int
    max_plans_in_flight: int
    enable_prefix_caching: bool
    scheduling_policy: str
    capacity_policy: str
    hidden_size: int = 0
    """Numbers of a hidden state; 0 if the worker returns no hidden states and no logits."""
    embedding_width: int = 0
    """Width of embeddings in a prompt; 0 if the worker takes none."""
    kv_shape: tuple[int, ...] = ()
    """Layers, KV heads and numbers of a head; empty if the worker takes no keys and values."""
    max_output_tensor_bytes: int = 0
    num_host_pages: int = 0
    has_disk: bool = False
    """True if the worker keeps pages on disk."""
    is_far: bool = False
    """True if the worker is on another host."""
    max_loras: int = 1
    max_cpu_loras: int = 1
    max_row_tokens: int = 1
    num_stages: int = 1
    """Stages of the worker, each of which computes another plan."""
    itl_target: float | None = None
    """Target for a step with decodes, in seconds; None derives it from the load."""

    @classmethod
    def of(cls, config: EngineConfig, ready: wire.Ready) -> SchedulerLimits:
        """Return the limits that follow from a worker's capacity and the engine's options."""
        # Over a network, the next plan has to be there when a step ends.
        on_cpu = ready.device == "cpu" and not ready.host
        default_plans = 1 if on_cpu else 2
        if ready.num_stages > 1:
            default_plans = ready.num_stages + 1
        target = config.itl_target_ms
        return cls(
            max_num_seqs=ready.max_num_seqs,
            max_num_batched_tokens=ready.max_num_batched_tokens,
            max_model_len=ready.max_model_len,
            vocab_size=ready.vocab_size,
            hidden_size=ready.hidden_size,
            embedding_width=ready.embedding_width,
            kv_shape=tuple(ready.kv_shape),
            max_output_tensor_bytes=config.max_output_tensor_bytes,
            page_size=ready.page_size,
            num_pages=ready.num_pages,
            num_host_pages=ready.num_host_pages,
            has_disk=config.kv_offloading_dir is not None,
            is_far=bool(ready.host),
            max_row_tokens=ready.max_row_tokens,
            num_stages=ready.num_stages,
            max_plans_in_flight=config.max_plans_in_flight or default_plans,
            enable_prefix_caching=config.enable_prefix_caching,
            scheduling_policy=config.scheduling_policy,
            capacity_policy=config.capacity_policy,
            max_loras=config.max_loras,
            max_cpu_loras=max(config.max_cpu_loras or DEFAULT_CPU_LORAS, config.max_loras),
            # Between two tokens of a stream there are as many steps as stages.
            itl_target=None if target is None else target / 1000 / ready.num_stages,
        )

    def pages_for(self, num_tokens: int) -> int:
        """Return the number of pages that hold the KV of ``num_tokens`` tokens."""
        return -(-num_tokens // self.page_size)


def resolve_max_tokens(limits: SchedulerLimits, request: Request) -> int:
    """Return the number of tokens that ``request`` may produce.

    It is the number that the request asks for, or else its default as far as that fits. Even a
    request for 0 tokens needs room for one, because its last row draws a token like any other.

    Raises:
        InvalidRequest: The prompt is empty.
        ContextTooLong: The prompt, or the prompt and the tokens asked for, never fit.
    """
    num_prompt = len(request.prompt_ids)
    asked = request.params.max_tokens
    if num_prompt == 0:
        raise InvalidRequest("the prompt is empty", param="prompt")
    if num_prompt >= limits.max_model_len:
        raise ContextTooLong(
            f"{_tokens_in_prompt(request)} leave no room for output: "
            f"this model's maximum context length is {limits.max_model_len} tokens",
            param="prompt",
        )
    if asked is not None and num_prompt + asked > limits.max_model_len:
        raise ContextTooLong(
            f"{_tokens_in_prompt(request)} and max_tokens of {asked} are "
            f"{num_prompt + asked}: this model's maximum context length is "
            f"{limits.max_model_len} tokens",
            param="max_tokens",
        )
    pool = most_tokens(limits, num_prompt, request.params.beam_width)
    if num_prompt + (asked or 1) > pool:
        beams = (
            f" for each of {request.params.beam_width} beams" if request.params.beam_width else ""
        )
        raise ContextTooLong(
            f"the request needs room for {num_prompt + (asked or 1)} tokens, prompt and output: "
            f"the KV cache holds {pool}{beams} ({limits.num_pages} pages of {limits.page_size})",
            param="max_tokens" if asked else "prompt",
        )
    if asked is not None:
        return asked
    fit = min(limits.max_model_len, pool) - num_prompt
    default = request.default_max_tokens
    return fit if default is None else min(max(default, request.params.min_tokens), fit)


def _tokens_in_prompt(request: Request) -> str:
    virtual = request.num_virtual_tokens
    of_adapter = f" ({virtual} of them its adapter's)" if virtual else ""
    return f"{len(request.prompt_ids)} tokens in the prompt{of_adapter}"


def most_tokens(limits: SchedulerLimits, num_prompt: int, beam_width: int) -> int:
    """Return the tokens of one sequence that the KV cache holds; beams share the prompt's pages."""
    shared = num_prompt // limits.page_size if beam_width else 0
    own = max(limits.num_pages - shared, 0) // max(beam_width, 1)
    return (shared + own) * limits.page_size


def check_beams(limits: SchedulerLimits, request: Request) -> None:
    """Refuse a beam search that can never run.

    Raises:
        InvalidRequest: It has more beams than sequences can run at once.
    """
    width = request.params.beam_width
    for most, option in (
        (limits.max_num_seqs, "--max-num-seqs"),
        (limits.max_num_batched_tokens, "--max-num-batched-tokens"),
    ):
        if width > most:
            raise InvalidRequest(
                f"beam_width must be at most {most} ({option}), got {width}", param="beam_width"
            )


def prompt_logprobs_for(limits: SchedulerLimits, request: Request) -> PromptLogprobs | None:
    """Return the collector of the prompt's log-probabilities; None if they aren't requested.

    A start at the prompt's end is allowed: then there are none.

    Raises:
        InvalidRequest: They start past the prompt, or are too many.
    """
    params = request.params
    if params.prompt_logprobs is None:
        return None
    num_prompt = len(request.prompt_ids)
    if params.prompt_logprobs_start > num_prompt:
        raise InvalidRequest(
            f"prompt_logprobs_start is {params.prompt_logprobs_start}: "
            f"the prompt has {num_prompt} tokens",
            param="prompt_logprobs_start",
        )
    found = PromptLogprobs(
        start=max(1, params.prompt_logprobs_start),
        num_top=min(params.prompt_logprobs, limits.vocab_size),
        token_ids=params.logprob_token_ids,
    )
    num_tokens = max(num_prompt - found.start, 0)
    count = num_tokens * found.num_for_each * params.n
    if count > MAX_PROMPT_LOGPROBS:
        outputs = f" for each of {params.n} outputs" if params.n > 1 else ""
        raise InvalidRequest(
            f"prompt_logprobs asks for {count} log-probabilities, {found.num_for_each} at each of "
            f"{num_tokens} prompt tokens{outputs}: at most {MAX_PROMPT_LOGPROBS} are served",
            param="prompt_logprobs",
        )
    return found


def tensors_for(
    limits: SchedulerLimits, request: Request, max_tokens: int
) -> RequestTensors | None:
    """Return the record of the request's output tensors; None if it asks for none.

    Raises:
        InvalidRequest: The worker returns none, or they are too large.
    """
    params, num_prompt = request.params, len(request.prompt_ids)
    if not params.returned_tensors:
        return None
    if not limits.hidden_size:
        name = params.returned_tensors[0]
        raise InvalidRequest(f"{name} isn't served: this worker returns no arrays", param=name)
    if request.num_prefix_tokens and (
        params.return_context_logits or params.return_hidden_states == "all"
    ):
        name = "return_context_logits" if params.return_context_logits else "return_hidden_states"
        raise InvalidRequest(
            f"{name} asks for arrays of the prompt, which aren't returned with its adapter: it "
            "has keys and values",
            param=name,
        )
    widths = {"hidden_size": limits.hidden_size, "vocab_size": limits.vocab_size}
    sizes = tensor_bytes(params, num_prompt, max_tokens, **widths)
    num_bytes = check_size(sizes, limits.max_output_tensor_bytes)
    return RequestTensors.of(params, num_prompt, **widths, num_bytes=num_bytes)
