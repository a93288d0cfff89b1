"""Numbers of a layer's experts and of those that a token goes to, under the names that families have for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NUM_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = (
    *("num_experts_per_tok", "experts_per_token", "num_experts_per_token", "top_k_experts"),
    *("moe_k", "moe_topk", "moe_top_k"),
)


def num_experts(config: Mapping[str, Any]) -> int:
    """Returns the number of a layer's routed experts; 0 without experts. The maximum counts if layers differ."""
    return _largest(config, NUM_EXPERTS)


def experts_per_token(config: Mapping[str, Any]) -> int:
    """Returns the number of a layer's routed experts that one token goes to; 0 without experts."""
    return _largest(config, EXPERTS_PER_TOKEN)


def _largest(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    value = next((config[name] for name in names if config.get(name)), 0)
    return max(value) if isinstance(value, list) else value
