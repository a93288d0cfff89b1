"""A cause of a divergence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CauseCode = Literal[
    "activation",
    "attention_scale",
    "call_order",
    "epsilon",
    "expert_choice",
    "factors",
    "from_position",
    "gate_and_up",
    "layer_kind",
    "missing_bias",
    "no_rope",
    "not_called",
    "packing",
    "permuted",
    "residual",
    "rope_dims",
    "rope_direction",
    "rope_pairing",
    "rounding",
    "routing",
    "scale",
    "sinks",
    "soft_cap",
    "some_experts",
    "transposed",
    "unit_offset",
    "window",
]


@dataclass(frozen=True)
class Cause:
    """A difference from the reference that explains its result, and a sentence."""

    code: CauseCode
    message: str
