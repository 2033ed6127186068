"""An adapter's adapter_config.json as PEFT writes it: ranks and scales, and what isn't served."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from trioserve.model_files.fields import Fields
from trioserve.model_files.jsonfile import parse_object
from trioserve.model_files.peft_files import unserved
from trioserve.model_files.prompt_adapter import PROMPT_TYPES
from trioserve.protocol.errors import ModelLoadError

UNSERVED = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "BD-LoRA",
    "modules_to_save": "whole modules beside the low-rank ones",
    "trainable_token_indices": "trained tokens",
    "target_parameters": "parameters outside of linear layers",
    "layer_replication": "repeated layers",
    "fan_in_fan_out": "transposed weights",
    "lora_bias": "a bias of its own",
    "alora_invocation_tokens": "activation by tokens",
    "arrow_config": "routing between adapters",
    "velora_config": "VeLoRA",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
}
"""Fields that make an adapter something else than low-rank updates, if they are set."""

_PLAIN_BEGINNINGS = (None, True, False, "gaussian", "orthogonal", "eva")
"""Values of ``init_lora_weights`` with which the model's own weights stay as they were."""

_SERVED_TYPES = (
    f"only LORA is served, and {' and '.join(PROMPT_TYPES)} from a folder on the engine's host"
)

_LITERAL = re.compile(r"[\w.]{1,500}", re.ASCII)


@attrs.frozen(kw_only=True)
class LoraConfig:
    """The configuration of an adapter's matrices.

    Patterns are keyed by a module's name or how it ends, ``q_proj`` or ``layers.0.mlp.up_proj``.
    """

    rank: int
    alpha: float
    rank_stabilized: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

    @classmethod
    def parse(cls, data: bytes, path: Path, max_rank: int) -> LoraConfig:
        """Read the JSON ``data`` of the file at ``path``.

        Raises:
            ModelLoadError: it is damaged, or asks for what isn't served; one line names the field.
        """
        values = parse_object(data, path)
        fields = Fields(path, values, {})
        if values.get("peft_type") != "LORA":
            raise unserved(path, "peft_type", values.get("peft_type"), _SERVED_TYPES)
        if values.get("task_type") not in (None, "CAUSAL_LM"):
            raise unserved(path, "task_type", values["task_type"], "only CAUSAL_LM is served")
        if values.get("bias") not in (None, "none"):
            raise unserved(path, "bias", values["bias"], "trained biases aren't served")
        for name, what in UNSERVED.items():
            if values.get(name):
                raise unserved(path, name, values[name], f"{what}, which isn't served")
        beginning = values.get("init_lora_weights")
        if not any(beginning is plain or beginning == plain for plain in _PLAIN_BEGINNINGS):
            raise unserved(
                path,
                "init_lora_weights",
                beginning,
                "which changes the model's own weights: convert it to a plain adapter",
            )

        def rank_of(field: Fields, name: str) -> int:
            rank = field.integer(name)
            if rank > max_rank:
                raise ModelLoadError(
                    f"{path} has a rank of {rank}, more than {max_rank}: raise --max-lora-rank"
                )
            return rank

        ranks, alphas = _pattern(fields, "rank_pattern"), _pattern(fields, "alpha_pattern")
        return cls(
            rank=rank_of(fields, "r"),
            alpha=fields.number("lora_alpha", 8.0),
            rank_stabilized=fields.flag("use_rslora"),
            rank_pattern={name: rank_of(ranks, name) for name in ranks.values},
            alpha_pattern={name: alphas.number(name, 0.0) for name in alphas.values},
        )

    def rank_of(self, module: str) -> int:
        """Return the rank of the module ``name``, such as ``model.layers.0.self_attn.q_proj``."""
        return _match(self.rank_pattern, module) or self.rank

    def scale_of(self, module: str) -> float:
        """Return what the product of its two matrices is multiplied with."""
        rank = self.rank_of(module)
        alpha = _match(self.alpha_pattern, module) or self.alpha
        return alpha / (math.sqrt(rank) if self.rank_stabilized else rank)


def _match(pattern: Mapping[str, Any], module: str) -> Any:
    """Return the value of the first key that ``module`` is or ends with, None if there is none."""
    for key, value in pattern.items():
        if module == key or module.endswith("." + key):
            return value
    return None


def _pattern(fields: Fields, name: str) -> Fields:
    value = fields.get(name)
    if value is None:
        return Fields(fields.path, {}, {})
    if not isinstance(value, dict):
        raise fields.error(name, value)
    for key in value:
        # PEFT takes any regular expression; a hostile one may run for ever.
        if not _LITERAL.fullmatch(key):
            raise unserved(fields.path, name, key, "only names of modules are served")
    return Fields(fields.path, value, {})
