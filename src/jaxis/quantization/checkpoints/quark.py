"""Checkpoints quantized by AMD's Quark: fp8 weights with a scale a weight or row, and MXFP4.

Names are those of plain checkpoints: `weight` with `weight_scale`, fp8 as in `fp8_tensor`, MXFP4 as in `microscaling`.
The tensors tell which modules are quantized. config.json's `quantization_config` has the settings of weights, which may
be of no other kind: `global_quant_config`, and `layer_quant_config` and `layer_type_quant_config` for some modules.
Those of activations and of a KV cache are not used.
Source: Quark's QConfig and Pack_fp4; vLLM's QuarkConfig, QuarkW8A8Fp8 and QuarkOCP_MX.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from jaxis.errors import ConfigError
from jaxis.layers.weight_format import WeightFormat
from jaxis.loading.safetensors import TensorInfo
from jaxis.quantization.auto_round_floats import FloatsByTensors
from jaxis.quantization.checkpoint_format import CheckpointFormat, as_stored
from jaxis.quantization.formats.fp8_tensor import Fp8TensorFormat
from jaxis.quantization.formats.microscaling import GROUP_SIZE, MicroscalingFormat
from jaxis.quantization.module_patterns import WHERE, check_keys

_FOLDED_ALGORITHMS = ("awq", "autosmoothquant", "smooth", "gptq", "gptaq", "qronos")
"""Algorithms that leave nothing to do for the one who runs the model."""
_KEYS: dict[str, tuple[Any, ...] | None] = {
    **dict.fromkeys(("quant_method", "global_quant_config", "layer_quant_config", "layer_type_quant_config")),
    **dict.fromkeys(("exclude", "algo_config", "export", "quant_mode", "version", "log_severity_level")),
    # Of quantized activations and a quantized KV cache.
    **dict.fromkeys(("softmax_quant_spec", "kv_cache_quant_config", "kv_cache_post_rope", "kv_cache_group")),
}
_PLAIN: Mapping[str, tuple[Any, ...]] = {"is_dynamic": (False, None), "symmetric": (True, None)}
_SCHEMES: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "per_tensor": {"dtype": ("fp8_e4m3",), **_PLAIN},
    "per_channel": {"dtype": ("fp8_e4m3",), "ch_axis": (0,), **_PLAIN},
    "per_group": {
        "dtype": ("fp4",),
        "group_size": (GROUP_SIZE,),
        "scale_format": ("e8m0",),
        "ch_axis": (-1, 1),
        **_PLAIN,
    },
}
"""`qscheme` of weights -> the settings that are supported with it."""
_E4M3, _BYTE = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(np.uint8)


@dataclass(frozen=True)
class QuarkModules:
    """The format of each module, by its tensors' headers, if there are any to look at."""

    tensors: Mapping[str, TensorInfo] | None

    def format_of(self, name: str, _shape: tuple[int, ...]) -> WeightFormat | None:
        tensors = self.tensors or {}
        weight, scale = tensors.get(f"{name}.weight"), tensors.get(f"{name}.weight_scale")
        if weight is None or scale is None:
            return None
        if weight.dtype == _E4M3:
            return Fp8TensorFormat(has_row_scales=bool(scale.shape))
        return MicroscalingFormat(4, "weight") if weight.dtype == _BYTE else None


def quark_config(settings: Mapping[str, Any], tensors: Mapping[str, TensorInfo] | None) -> FloatsByTensors:
    """Reads a `quantization_config` of Quark. Raises ConfigError if it asks for something that is not implemented."""
    check_keys(settings, _KEYS, WHERE)
    _check_algorithms(settings.get("algo_config"))
    for where, module in _settings_of_modules(settings):
        _check_module(module, where)
    return FloatsByTensors(QuarkModules(tensors).format_of)


def _check_algorithms(algorithms: Any) -> None:
    """Raises ConfigError for an algorithm that changes how a layer's input is made, such as online rotations."""
    for algorithm in algorithms if isinstance(algorithms, list) else [algorithms]:
        name = algorithm.get("name") if isinstance(algorithm, Mapping) else algorithm
        if name is not None and name not in _FOLDED_ALGORITHMS:
            raise ConfigError(
                f"{WHERE}: algo_config has {name!r}, which is not supported: use a checkpoint quantized without it"
            )


def _settings_of_modules(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Returns (place in config.json, settings) of the modules for which config.json has some."""
    yield f"{WHERE}: global_quant_config", settings.get("global_quant_config")
    for key in ("layer_quant_config", "layer_type_quant_config"):
        modules = settings.get(key) or {}
        if not isinstance(modules, Mapping):
            raise ConfigError(f"{WHERE}: {key}={modules!r} must be an object")
        for name, module in modules.items():
            yield f"{WHERE}: {key}: {name}", module


def _check_module(module: Any, where: str) -> None:
    """Raises ConfigError for a module whose weights, or bias, are stored in a way that is not supported."""
    if module is None:
        return
    if not isinstance(module, Mapping):
        raise ConfigError(f"{where} is {module!r}, expected an object")
    if module.get("bias") is not None:
        raise ConfigError(f"{where}: bias is quantized, which is not supported")
    weight = module.get("weight")
    if isinstance(weight, Mapping):
        scheme = weight.get("qscheme")
        supported = {"qscheme": tuple(_SCHEMES), **(_SCHEMES.get(scheme, {}) if isinstance(scheme, str) else {})}
        check_keys({key: weight.get(key) for key in supported}, supported, f"{where}: weight")
    elif weight is not None:
        raise ConfigError(f"{where}: weight is quantized in several steps, which is not supported")


FORMATS = (CheckpointFormat(("quark",), as_stored(quark_config)),)
