"""The modules of a model that rules quantize."""

from __future__ import annotations

from pathlib import Path

from jaxis.config import ModelConfig, VllmConfig
from jaxis.kernels.weights import WeightScheme
from jaxis.layers.module import named_modules
from jaxis.layers.weight_method import scheme_of_module
from jaxis.models.model_loader import construct_abstractly
from jaxis.models.tied_tables import config_as_stored
from jaxis.quantization.rules import RuleQuantizationConfig


def weight_schemes(source: Path, rules: RuleQuantizationConfig) -> dict[str, WeightScheme]:
    """Returns the scheme of each module that the rules quantize, by dotted name. Routers are never quantized."""
    model = construct_abstractly(VllmConfig(ModelConfig(str(source), config_as_stored(source)), quant_config=rules))
    schemes = {name: scheme_of_module(module) for name, module in named_modules(model)}
    return {name: scheme for name, scheme in schemes.items() if scheme is not None}
