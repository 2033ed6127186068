"""Steps of mixtures of experts beside transformers' own: ``python -m bench.engine.experts``.

Two models of random weights in the shapes of Mixtral and Qwen 3 MoE, with fewer and narrower layers
so that they fit anywhere, in bfloat16. Each step is computed again and again: one new token in each
of some sequences, or a prompt. The ways take turns, so that whatever else the machine does meets
all of them; the quickest quarter of each counts. transformers can compute experts in several ways,
of which two are measured.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.engine.compiled_steps import CompiledSteps, load_compiled, num_pages_of, timed_in_turns
from bench.report import Made, markdown, own_versions, script

_COMMON = {
    **{"vocab_size": 32000, "num_hidden_layers": 6, "hidden_size": 1024, "head_dim": 64},
    **{"num_attention_heads": 16, "num_key_value_heads": 4, "num_experts_per_tok": 2},
}
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": {**_COMMON, "intermediate_size": 3584, "num_local_experts": 8},
    "Qwen3Moe": {
        **_COMMON,
        **{"intermediate_size": 3072, "moe_intermediate_size": 384, "num_experts": 64},
        **{"num_experts_per_tok": 8, "norm_topk_prob": True},
    },
}
"""By the prefix of transformers' classes, fields of its configuration."""
CONTEXT = 128
STEPS = {"1 row": (1, 1), "8 rows": (8, 1), "32 rows": (32, 1), "a prompt of 256": (1, 256)}
"""Rows, and the new tokens of each: one behind :data:`CONTEXT` others, or a whole prompt."""
_OURS = {"bf16": "none", "int8": "int8"}
_PEERS = ("grouped_mm", "eager")


def _peer_step(model: Any, rows: int, count: int) -> Callable[[], None]:
    """Return transformers' forward pass over its own cache, to the most probable tokens."""
    import torch
    from transformers import DynamicCache

    generator = torch.Generator().manual_seed(rows)

    def tokens(length: int) -> torch.Tensor:
        return torch.randint(3, model.config.vocab_size, (rows, length), generator=generator)

    new, cache = tokens(count), DynamicCache(config=model.config)
    context = CONTEXT if count == 1 else 0
    with torch.inference_mode():
        if context:
            model(tokens(context), past_key_values=cache, logits_to_keep=1)

    def run() -> None:
        with torch.inference_mode():
            used = cache if context else DynamicCache(config=model.config)
            model(new, past_key_values=used, logits_to_keep=1).logits.argmax(dim=-1)
            if context:
                cache.crop(-count)  # what this step wrote

    return run


def measure(
    name: str, fields: Mapping[str, Any], *, threads: int, seconds: float, steps: Mapping[str, Any]
) -> dict[str, dict[str, float]]:
    """Return the seconds of every way to compute every one of ``steps`` of one model.

    Each step has about ``seconds``, and two rounds at least.
    """
    import tokenizers
    import torch
    import transformers

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**fields, dtype="bfloat16")
    peer = getattr(transformers, f"{name}ForCausalLM")(config).to(torch.bfloat16).eval()
    pages = max(num_pages_of(rows, CONTEXT, count) for rows, count in steps.values())
    with tempfile.TemporaryDirectory() as folder:
        peer.save_pretrained(folder)
        # Nothing asks this tokenizer, without which a folder is no model's.
        tokenizers.Tokenizer(tokenizers.models.BPE()).save(f"{folder}/tokenizer.json")
        room = {"threads": threads, "num_pages": pages}
        models = {
            way: load_compiled(Path(folder), quantization=quantization, **room)
            for way, quantization in _OURS.items()
        }

    def prepare(way: str) -> None:
        if way in _PEERS:
            peer.set_experts_implementation(way)

    found = {}
    for step, (rows, count) in steps.items():
        context = CONTEXT if count == 1 else 0
        ways: dict[str, Callable[[], None]] = {
            way: CompiledSteps(model, rows=rows, context=context, count=count).run
            for way, model in models.items()
        }
        ways |= dict.fromkeys(_PEERS, _peer_step(peer, rows, count))
        found[step] = timed_in_turns(ways, seconds=seconds, prepare=prepare)
    return found


@script
def compare(
    *, models: Sequence[str] = tuple(MODELS), threads: int = 1, seconds: float = 30.0
) -> Made:
    """Return a table with a line for each step of each model, in milliseconds."""
    lines = []
    for name in models:
        print(name, flush=True)
        found = measure(name, MODELS[name], threads=threads, seconds=seconds, steps=STEPS)
        for step, of in found.items():
            shown = [f"{of[way] * 1e3:.1f}" for way in (*_OURS, *_PEERS)]
            best = min(of[way] for way in _PEERS) / of["bf16"]
            lines.append([name, step, *shown, f"{best:.2f}"])
    heads = ["model", "step", *(f"{way} ms" for way in _OURS)]
    heads += [*(f"transformers, {way} ms" for way in _PEERS), "its best / bf16"]
    versions = own_versions("transformers")
    beside = f"transformers {versions['transformers']} over torch {versions['torch']}."
    return Made(f"{markdown(heads, lines)}\n\nBeside {beside}", {"versions": versions})
