from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxis.quantization.rules import RuleQuantizationConfig
from jaxis.quantization.wrappers import Dequantize
from jaxis.quantization_rules import RequestedQuantization, parse_requested_quantization


def parse_quantization(
    quantization: object, additional_config: Mapping[str, Any] | None = None
) -> RuleQuantizationConfig | Dequantize | None:
    """Parses a request into a configuration; `parse_requested_quantization` describes arguments and errors."""
    return requested_config(parse_requested_quantization(quantization, additional_config))


def requested_config(requested: RequestedQuantization | None) -> RuleQuantizationConfig | Dequantize | None:
    if requested is None:
        return None
    if requested.dequantize:
        return Dequantize()
    return RuleQuantizationConfig(requested.rules, must_match=requested.rules_must_match)
