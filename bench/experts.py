"""Steps of mixtures of experts beside transformers' own: ``python -m bench.experts``.

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
from importlib.metadata import version
from pathlib import Path
from typing import Any

import attrs

from bench.compiled_steps import CompiledSteps, load_compiled, num_pages_of, usual
from bench.report import asked, markdown, own_versions, show

__all__ = ["MODELS", "STEPS", "Measurement", "main", "measure", "table"]

_COMMON = {
    **{"vocab_size": 32000, "num_hidden_layers": 6, "hidden_size": 1024, "head_dim": 64},
    **{"num_attention_heads": 16, "num_key_value_heads": 4, "num_experts_per_tok": 2},
}
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": {**_COMMON, "intermediate_size": 3584, "num_local_experts": 8},
    "Qwen3Moe": {
        **_COMMON,
        "intermediate_size": 3072,
        "moe_intermediate_size": 384,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    },
}
"""By the prefix of transformers' classes, fields of its configuration."""
CONTEXT = 128
STEPS = {"1 row": (1, 1), "8 rows": (8, 1), "32 rows": (32, 1), "a prompt of 256": (1, 256)}
"""Rows, and the new tokens of each: one behind :data:`CONTEXT` others, or a whole prompt."""
_OURS = {"bf16": "none", "int8": "int8"}
_PEERS = ("grouped_mm", "eager")


@attrs.frozen(kw_only=True)
class Measurement:
    """One way to compute one step of one model; ``seconds`` is the mean of the quickest quarter."""

    model: str
    step: str
    way: str
    seconds: float


def _peer_step(model: Any, rows: int, count: int) -> Callable[[], None]:
    """transformers' forward pass over its own cache, to the most probable tokens."""
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
) -> list[Measurement]:
    """Every way to compute every one of ``steps``, which are as :data:`STEPS` are, of one model.

    Each step has about ``seconds``, and two rounds at least.
    """
    import torch
    import transformers

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**fields, dtype="bfloat16")
    peer = getattr(transformers, f"{name}ForCausalLM")(config).to(torch.bfloat16).eval()
    pages = max(num_pages_of(rows, CONTEXT, count) for rows, count in steps.values())
    with tempfile.TemporaryDirectory() as folder:
        peer.save_pretrained(folder)
        _write_tokenizer(Path(folder))
        ours = {
            way: load_compiled(
                Path(folder), quantization=quantization, threads=threads, num_pages=pages
            )
            for way, quantization in _OURS.items()
        }
    found = []
    for step, (rows, count) in steps.items():
        context = CONTEXT if count == 1 else 0
        own = {
            way: CompiledSteps(model, rows=rows, context=context, count=count)
            for way, model in ours.items()
        }
        run, taken = _peer_step(peer, rows, count), {way: list[float]() for way in _PEERS}
        end, rounds = time.perf_counter() + seconds, 0
        while rounds < 2 or time.perf_counter() < end:
            rounds += 1
            for steps_of_way in own.values():
                steps_of_way.run()
            for way, times in taken.items():
                peer.set_experts_implementation(way)
                began = time.perf_counter()
                run()
                times.append(time.perf_counter() - began)
        every = {way: steps_of_way.seconds for way, steps_of_way in own.items()} | taken
        found += [
            Measurement(model=name, step=step, way=way, seconds=usual(times))
            for way, times in every.items()
        ]
    return found


def _write_tokenizer(folder: Path) -> None:
    """A tokenizer that nobody asks, without which a folder is no model's."""
    import tokenizers

    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(folder / "tokenizer.json"))


def table(measurements: Sequence[Measurement]) -> str:
    """Markdown: a line for each step of each model, in milliseconds."""
    heads = ["model", "step", *(f"{way} ms" for way in _OURS)]
    heads += [*(f"transformers, {way} ms" for way in _PEERS), "its best / bf16"]
    lines = []
    for model, step in dict.fromkeys((m.model, m.step) for m in measurements):
        of = {m.way: m.seconds for m in measurements if (m.model, m.step) == (model, step)}
        shown = [f"{of[way] * 1e3:.1f}" for way in (*_OURS, *_PEERS)]
        lines.append([model, step, *shown, f"{min(of[way] for way in _PEERS) / of['bf16']:.2f}"])
    return markdown(heads, lines)


def main(arguments: list[str]) -> int:
    """Measure, print a table, and save it if asked."""
    parser = argparse.ArgumentParser(prog="python -m bench.experts", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=30.0, help="for each step of each model")
    parser.add_argument("--save", type=Path, help="a folder for the JSON")
    options = parser.parse_args(arguments)
    found = []
    for name in options.models:
        print(name, flush=True)
        found += measure(
            name, MODELS[name], threads=options.threads, seconds=options.seconds, steps=STEPS
        )
    versions = {**own_versions(), "transformers": version("transformers")}
    facts = {"options": asked(options), "versions": versions}
    beside = f"transformers {versions['transformers']} over torch {versions['torch']}."
    show(f"{table(found)}\n\nBeside {beside}", options.save, "experts", found, **facts)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
