"""The number of a loaded model's parameters, and the storage format of most of them."""

from __future__ import annotations

import math
from collections import Counter

from flax import nnx

from jaxis.kernels.weights import as_weight
from jaxis.layers.embed import JaxEmbed
from jaxis.layers.linear import JaxLinear
from jaxis.layers.module import named_modules, named_parameters


def model_size(*models: nnx.Module) -> tuple[int, str]:
    """Returns the number of parameters of a loaded model, and how most of them are stored.

    `models` are the models of all pipeline stages. Shared parameters count once. The storage is a type such as
    "bfloat16" or "int8", or "4-bit" for codes that are no integers; "" for a model without parameters.
    """
    by_name: dict[str, nnx.Param] = {}
    for model in models:
        names = {id(param): name for name, param in reversed(list(named_parameters(model)))}
        by_name |= {name: param for name, param in named_parameters(model) if names[id(param)] == name}
    modules = [module for model in models for _, module in named_modules(model)]
    layers = [module for module in modules if isinstance(module, JaxLinear | JaxEmbed)]
    # Devices may have copies of a layer's rows (of key-value heads), or rows of zeros after a table's own rows.
    # A latent projection that was packed head by head has its weight under other names.
    num_rows = {id(layer.weight): layer.output_size for layer in layers if hasattr(layer, "weight")}
    linear = [layer for layer in layers if isinstance(layer, JaxLinear)]
    num_rows |= {id(layer.bias): layer.output_size for layer in linear if layer.bias is not None}
    elements: Counter[str] = Counter()
    for param in by_name.values():
        weight = as_weight(param.get_value())
        rows = num_rows.get(id(param))
        elements[weight.storage] += math.prod(weight.shape if rows is None else (rows, *weight.shape[1:]))
    return elements.total(), next((name for name, _ in elements.most_common(1)), "")
