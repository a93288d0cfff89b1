"""Settings that config.json lists layer by layer."""

from __future__ import annotations

from typing import Any

from jaxis.config.hf_config import HFConfig


def value_of_layer(config: HFConfig, key: str, layer_index: int) -> Any:
    """Returns the layer's entry in config.json's list; None without such a list or entry, or if the entry is null.

    The list may be longer than the model: more entries are for layers that predict later tokens. Raises ConfigError if
    the value is no list, or has fewer entries than the model has layers.
    """
    values = config.get(key)
    if values is None:
        return None
    num_layers: int = config["num_hidden_layers"]
    if not isinstance(values, list) or len(values) < num_layers:
        why = f"expected a list of {num_layers} entries, one for each layer: correct the file"
        raise config.fault(key, why=why)
    return values[layer_index] if layer_index < len(values) else None


def settings_of_layer(config: HFConfig, layer_index: int) -> HFConfig:
    """Returns the layer's object in `per_layer_config`, of later versions of the reference; empty without one.

    In config.json, indices may begin with zeros. Raises ConfigError if `per_layer_config` has something else.
    """
    by_layer = config.get("per_layer_config")
    if by_layer is None:
        return HFConfig({})
    if not isinstance(by_layer, HFConfig) or not all(key.isdecimal() for key in by_layer):
        raise config.fault("per_layer_config", why="expected an object with an object for each layer's index")
    settings = next((by_layer[key] for key in by_layer if int(key) == layer_index), HFConfig({}))
    if not isinstance(settings, HFConfig):
        raise config.fault("per_layer_config", why=f"expected an object for layer {layer_index}")
    return settings
