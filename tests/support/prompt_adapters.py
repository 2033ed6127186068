"""Prompt adapters with random numbers, as PEFT saves them, and what PEFT computes with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.lora_adapters import write_adapter

__all__ = ["PeftModels", "save_with_peft", "write_prefix_adapter", "write_prompt_adapter"]


def write_prompt_adapter(
    folder: Path, *, count: int, width: int, seed: int = 0, dtype: Any = np.float32, **config: Any
) -> Path:
    """Write an adapter of ``count`` virtual tokens; ``config`` are fields of its configuration."""
    rows = np.random.default_rng(seed).standard_normal((count, width)).astype(dtype)
    fields = {"peft_type": "PROMPT_TUNING", "task_type": "CAUSAL_LM", "num_virtual_tokens": count}
    return write_adapter(folder, {**fields, **config}, {"prompt_embeddings": rows})


def write_prefix_adapter(
    folder: Path, *, count: int, kv_shape: Sequence[int], **options: Any
) -> Path:
    """Write an adapter with keys and values; ``kv_shape`` is layers, KV heads, numbers of a head.

    ``options`` are those of :func:`write_prompt_adapter`.
    """
    layers, heads, size = kv_shape
    return write_prompt_adapter(
        folder,
        count=count,
        width=2 * layers * heads * size,
        **{"peft_type": "PREFIX_TUNING", "num_layers": layers, "num_attention_heads": heads},
        **{"token_dim": heads * size, **options},
    )


def save_with_peft(model: Path, folder: Path, kind: str, count: int) -> Path:
    """Have PEFT make and save an adapter of ``kind``, such as ``P_TUNING``, for a model."""
    import peft
    import torch
    import transformers

    torch.manual_seed(count)
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config: Any
    if kind == "PROMPT_TUNING":
        config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=count)
    elif kind == "P_TUNING":
        config = peft.PromptEncoderConfig(
            task_type="CAUSAL_LM", num_virtual_tokens=count, encoder_hidden_size=32
        )
    else:
        config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=count)
    peft.get_peft_model(base, config).save_pretrained(folder)
    return folder


class PeftModels:
    """PEFT's own models of one base with each adapter, in float32."""

    def __init__(self, model: Path, adapters: dict[str, Path]) -> None:
        import peft
        import torch
        import transformers

        self._models: dict[str, Any] = {}
        for name, path in {"": None, **adapters}.items():
            base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
            found = base if path is None else peft.PeftModel.from_pretrained(base, path)
            self._models[name] = found.eval()

    def logprobs(self, name: str, prompt: Sequence[int], output: Sequence[int]) -> Any:
        """Return the log-probabilities [output tokens, V] at the positions of ``output``."""
        import torch

        ids = torch.tensor([[*prompt, *output]])
        with torch.inference_mode():
            logits = self._models[name](input_ids=ids).logits[0]
        return logits[-len(output) - 1 : -1].log_softmax(-1)
