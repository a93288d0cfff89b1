"""The modules of a model that rules quantize."""

from __future__ import annotations

from pathlib import Path

from jaxis.config import ModelConfig, VllmConfig
from jaxis.kernels.weights import WeightScheme
from jaxis.layers.module import named_modules
from jaxis.layers.weight_method import WeightMethod
from jaxis.loading.open_checkpoint import read_hf_config
from jaxis.models.model_loader import construct_abstractly
from jaxis.quantization.rules import RuleQuantizationConfig


def weight_schemes(source: Path, rules: RuleQuantizationConfig) -> dict[str, WeightScheme]:
    """Dotted name of each module to be quantized -> how. Routers are never quantized."""
    model = construct_abstractly(VllmConfig(ModelConfig(str(source), read_hf_config(source)), quant_config=rules))
    methods = {name: getattr(module, "quant_method", None) for name, module in named_modules(model)}
    return {
        name: method.scheme
        for name, method in methods.items()
        if isinstance(method, WeightMethod) and method.scheme is not None
    }
