"""Checkpoints quantized by NVIDIA's ModelOpt: fp8, NVFP4 and MXFP8 weights, or several of these.

config.json's `quantization_config` has a `quant_algo` and the modules that are not quantized (`ignore`, or
`exclude_modules` where it was made from an hf_quant_config.json); with MIXED_PRECISION, `quantized_layers` has an
algorithm for each module. Scales for quantized activations and KV caches are not used.
Source: TensorRT-Model-Optimizer, modelopt/torch/export; vLLM's ModelOptFp8Config and ModelOptNvFp4Config.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxis.errors import ConfigError
from jaxis.layers.embed import JaxEmbed
from jaxis.layers.weight_format import WeightFormat
from jaxis.layers.weight_method import WeightedLayer
from jaxis.loading.safetensors import TensorInfo
from jaxis.quantization.checkpoint_format import CheckpointFormat, as_stored
from jaxis.quantization.formats.fp8_blocks import Fp8BlocksFormat
from jaxis.quantization.formats.fp8_tensor import Fp8TensorFormat
from jaxis.quantization.formats.microscaling import MicroscalingFormat
from jaxis.quantization.formats.nvfp4 import GROUP_SIZE as NVFP4_GROUP_SIZE
from jaxis.quantization.formats.nvfp4 import NVFP4
from jaxis.quantization.module_patterns import WHERE, WildcardList, check_keys, names_of
from jaxis.quantization.stored import StoredConfig
from jaxis.quantization.tensor_names import TensorNames

_KEYS: dict[str, tuple[Any, ...] | None] = {
    **dict.fromkeys(("quant_method", "quant_algo", "ignore", "exclude_modules", "group_size", "quantized_layers")),
    # The same in the words of compressed-tensors; the cache is quantized or not as the engine's arguments say.
    **dict.fromkeys(("config_groups", "kv_cache_scheme", "kv_cache_quant_algo", "producer")),
    # Of AWQ and SmoothQuant.
    **dict.fromkeys(("has_zero_point", "pre_quant_scale"), (False, None)),
}
_FORMATS: dict[str, WeightFormat] = {
    "FP8": Fp8TensorFormat(),
    "FP8_PER_CHANNEL_PER_TOKEN": Fp8TensorFormat(has_row_scales=True),
    "FP8_PB_WO": Fp8BlocksFormat((128, 128), "weight_scale", has_unit_axes=True),
    "NVFP4": NVFP4,
    "W4A16_NVFP4": NVFP4,
    "MXFP8": MicroscalingFormat(8, "weight"),
}
_MIXED = "MIXED_PRECISION"
_GROUP_SIZES = {"NVFP4": NVFP4_GROUP_SIZE, "W4A16_NVFP4": NVFP4_GROUP_SIZE, "MXFP8": 32, "FP8_PB_WO": 128}


class ModelOptConfig(StoredConfig):
    """A `quantization_config` whose `quant_method` is ModelOpt's. A QuantizationConfig.

    Raises ConfigError if the object asks for something that is not implemented.
    """

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo] | None = None) -> None:
        check_keys(config, _KEYS, WHERE)
        excluded = tuple(name for key in ("ignore", "exclude_modules") for name in names_of(config.get(key), key))
        if config.get("quant_algo") == _MIXED:
            formats = _formats_of_layers(config.get("quantized_layers"))
        else:
            formats = {"*": _read_algorithm(config, WHERE)}
        # Modules that are copied from an owner's MXFP8 keep its name of the scales.
        super().__init__((*excluded, *formats), TensorNames({"weight_scale_inv": "weight_scale"}), tensors)
        self._excluded = WildcardList(excluded)
        self._formats = {
            each: WildcardList(name for name, other in formats.items() if other == each)
            for each in dict.fromkeys(formats.values())
        }

    def format_of(self, layer: WeightedLayer, names: Sequence[str]) -> WeightFormat | None:
        if isinstance(layer, JaxEmbed) or any(self._excluded.has(name) for name in names):
            return None
        return next((each for each, modules in self._formats.items() if any(map(modules.has, names))), None)


def _formats_of_layers(layers: Any) -> dict[str, WeightFormat]:
    if not isinstance(layers, Mapping) or not layers:
        raise ConfigError(f"{WHERE}: quantized_layers={layers!r} must be an object that names the quantized modules")
    formats = {}
    for name, settings in layers.items():
        where = f"{WHERE}: quantized_layers: {name}"
        if not isinstance(settings, Mapping):
            raise ConfigError(f"{where} is {settings!r}, expected an object")
        formats[name] = _read_algorithm(settings, where)
    return formats


def _read_algorithm(settings: Mapping[str, Any], where: str) -> WeightFormat:
    algorithm, group_size = settings.get("quant_algo"), settings.get("group_size")
    if isinstance(algorithm, str) and algorithm.upper().endswith("_AWQ"):
        raise ConfigError(
            f"{where}: quant_algo={algorithm!r} is not supported, because its weights are for scaled activations: use "
            "a checkpoint of the same model in NVFP4 or FP8, or one that AutoAWQ wrote"
        )
    weight_format = _FORMATS.get(algorithm.upper()) if isinstance(algorithm, str) else None
    if weight_format is None:
        raise ConfigError(
            f"{where}: quant_algo={algorithm!r} is not supported; supported: {', '.join((*_FORMATS, _MIXED))}"
        )
    expected = _GROUP_SIZES.get(str(algorithm).upper())
    if expected is not None and group_size not in (None, expected):
        raise ConfigError(
            f"{where}: group_size={group_size!r} is not supported with {algorithm}; supported: {expected}"
        )
    return weight_format


FORMATS = (CheckpointFormat(("modelopt", "modelopt_fp4", "modelopt_mixed"), as_stored(ModelOptConfig)),)
