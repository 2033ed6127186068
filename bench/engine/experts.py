"""Steps of mixtures of experts beside transformers' own: ``python -m bench.engine.experts``.

Two models of random weights in the shapes of Mixtral and Qwen 3 MoE, with fewer and narrower layers
so that they fit anywhere, in bfloat16. Each step is computed again and again: one new token in each
of some sequences, or a prompt. The ways take turns, so that whatever else the machine does meets
all of them; the quickest quarter of each counts. transformers can compute experts in several ways,
of which two are measured.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.engine.compiled_steps import CompiledSteps, load_compiled, num_pages_of, usual
from bench.report import Made, markdown, own_versions, run_script

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
    found = {}
    for step, (rows, count) in steps.items():
        context = CONTEXT if count == 1 else 0
        ours = {
            way: CompiledSteps(model, rows=rows, context=context, count=count)
            for way, model in models.items()
        }
        run, taken = _peer_step(peer, rows, count), {way: list[float]() for way in _PEERS}
        end, rounds = time.perf_counter() + seconds, 0
        while rounds < 2 or time.perf_counter() < end:
            rounds += 1
            for own in ours.values():
                own.run()
            for way, times in taken.items():
                peer.set_experts_implementation(way)
                began = time.perf_counter()
                run()
                times.append(time.perf_counter() - began)
        every = {way: own.seconds for way, own in ours.items()} | taken
        found[step] = {way: usual(times) for way, times in every.items()}
    return found


def compare(options: argparse.Namespace) -> Made:
    """Return a table with a line for each step of each model, in milliseconds."""
    lines = []
    how = {"threads": options.threads, "seconds": options.seconds, "steps": STEPS}
    for name in options.models:
        print(name, flush=True)
        for step, of in measure(name, MODELS[name], **how).items():
            shown = [f"{of[way] * 1e3:.1f}" for way in (*_OURS, *_PEERS)]
            best = min(of[way] for way in _PEERS) / of["bf16"]
            lines.append([name, step, *shown, f"{best:.2f}"])
    heads = ["model", "step", *(f"{way} ms" for way in _OURS)]
    heads += [*(f"transformers, {way} ms" for way in _PEERS), "its best / bf16"]
    versions = own_versions("transformers")
    beside = f"transformers {versions['transformers']} over torch {versions['torch']}."
    return Made(f"{markdown(heads, lines)}\n\nBeside {beside}", {"versions": versions})


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print a table."""
    options = {"models": list(MODELS), "threads": 1, "seconds": 30.0}
    return run_script("experts", compare, arguments, **options)


if __name__ == "__main__":
    sys.exit(main())
