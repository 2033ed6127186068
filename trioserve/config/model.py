"""The options of a model and its adapters, a part of the engine's options."""

from __future__ import annotations

import attrs

from trioserve.config.media import MediaOptions
from trioserve.config.options import option
from trioserve.protocol.number_formats import QUANTIZATIONS

DTYPES = ("auto", "float32", "bfloat16", "float16")
MODEL_IMPLEMENTATIONS = ("auto", "native", "transformers")
DEVICES = ("auto", "cpu", "cuda")
LOGPROBS_MODES = ("raw", "processed")


@attrs.frozen(kw_only=True)
class ModelOptions(MediaOptions):
    """Options of the model that an engine loads, its adapters and its requests' defaults."""

    model: str = attrs.field(kw_only=False)
    """A known name (``smollm2-135m``), a folder, a GGUF file or a Hugging Face Hub id."""

    tokenizer: str | None = option(
        None,
        "tokenizer to use in place of the model's own: a folder or a tokenizer.json",
        group="model",
        metavar="PATH",
    )
    chat_template: str | None = option(
        None,
        "chat template to use in place of the model's own: a file with jinja2, or the "
        "template itself",
        group="model",
        common=True,
    )
    revision: str | None = option(
        None, "branch, tag or commit of a model on the Hugging Face Hub", group="model"
    )
    model_impl: str = option(
        "auto",
        "implementation that computes the model: native has few families, transformers has "
        "many more and is slower, auto takes native where it can",
        choices=MODEL_IMPLEMENTATIONS,
        group="model",
        page="models#Which models run",
    )
    dtype: str = option(
        "auto",
        "number format of weights and activations",
        choices=DTYPES,
        group="model",
        common=True,
    )
    quantization: str = option(
        "auto",
        "number format of the weights on a CPU: none takes dtype, int8 and int4 round any "
        "model's weights, w8a8 rounds weights and activations to 8 bits, auto keeps the 4 and "
        "8 bits of a GGUF file where dtype is auto",
        choices=QUANTIZATIONS,
        group="model",
        page="performance#What fewer bits cost",
        common=True,
    )
    skip_tokenizer_init: bool = option(
        False,
        "load no tokenizer: prompts are token ids, and outputs have no text",
        group="model",
        kind=bool,
    )
    device: str = option(
        "auto", "device that computes the model", choices=DEVICES, group="model", common=True
    )
    max_model_len: int | None = option(
        None,
        "longest sequence in tokens, prompt and output together",
        unset="the model's own",
        group="model",
        page="security#What is bounded",
        common=True,
        kind=int,
        low=1,
    )
    seed: int | None = option(
        None,
        "seed of requests that have none of their own",
        unset="fresh entropy for each request",
        group="model",
        kind=int,
    )
    generation_config: str = option(
        "auto",
        "source of the sampling defaults: auto reads the model's own generation_config.json, "
        "vllm reads none, a folder is read in place of the model's, and its max_new_tokens "
        "limits all requests",
        group="model",
        page="options#Defaults of requests",
        metavar="auto|vllm|PATH",
    )
    override_generation_config: str | None = option(
        None,
        "JSON object with sampling defaults that replace those of the generation config, as "
        'in {"temperature": 0.5}; its max_new_tokens limits all requests',
        group="model",
        page="options#Defaults of requests",
        metavar="JSON",
    )
    max_tokens_default: int | None = option(
        None,
        "output tokens of a request without max_tokens, as far as they fit; a request may ask "
        "for more",
        unset="max_new_tokens of the generation config, else as many as fit",
        group="model",
        page="options#Defaults of requests",
        kind=int,
        low=1,
    )
    logprobs_mode: str = option(
        "raw",
        "distribution whose log-probabilities are reported: the model's own (raw), or the one "
        "that tokens are drawn from (processed)",
        choices=LOGPROBS_MODES,
        group="model",
        page="evaluation#Scoring and evaluation",
    )
    max_logprobs: int = option(
        20,
        "most log-probabilities that a request may ask for per token",
        group="model",
        page="api#`POST /generate`",
        kind=int,
        low=0,
    )

    logits_processors: tuple[str, ...] = option(
        (),
        "class of yours that changes logits before a token is drawn; may be given several times",
        group="model",
        page="logits-processors#Logits processors",
        metavar="MODULE:CLASS",
        repeatable=True,
    )
    grammar_timeout: float = option(
        10.0,
        "seconds that compiling a request's JSON schema, regex or grammar may take; past them "
        "the request is refused with 400",
        group="model",
        page="structured-output#Limits",
        kind=float,
        above=0,
    )

    enable_lora: bool = option(
        False,
        "serve LoRA and prompt adapters, including ones that are loaded while the server runs; "
        "--lora-modules turns this on, too",
        group="adapters",
        page="lora#Serving adapters",
        kind=bool,
    )
    lora_modules: tuple[str, ...] = option(
        (),
        "adapter to load at the start: the name that requests give it and its folder in "
        "PEFT's format, or vLLM's JSON object with name and path; may be given several times",
        group="adapters",
        page="lora#Serving adapters",
        common=True,
        metavar="NAME=PATH",
        repeatable=True,
        form=(
            r"[^={]+=.+|\{.+\}",
            "a name and a folder, as in mine=/adapters/mine, or JSON with name and path",
        ),
    )
    max_loras: int = option(
        8,
        "most different adapters among the sequences that are computed together",
        group="adapters",
        page="lora#How many",
        kind=int,
        low=1,
        high=1024,
    )
    max_lora_rank: int = option(
        64,
        "largest rank of an adapter",
        group="adapters",
        page="lora#How many",
        kind=int,
        low=1,
        high=4096,
    )
    max_cpu_loras: int | None = option(
        None,
        "most adapters in the worker's memory; past it the least recently used one is dropped, "
        "and read again when a request needs it",
        unset="32; never below max_loras",
        group="adapters",
        page="lora#How many",
        kind=int,
        low=1,
    )
