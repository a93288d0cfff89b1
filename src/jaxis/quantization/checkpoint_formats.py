"""Selection of a checkpoint's quantization config by the `quant_method` in its config.json."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any

from jaxis.config.hf_config import HFConfig
from jaxis.config.quantization import QuantizationConfig
from jaxis.errors import ConfigError
from jaxis.loading.gguf_config_keys import QUANT_METHOD as GGUF
from jaxis.loading.safetensors import TensorInfo
from jaxis.quantization import auto_round, awq, bitsandbytes, gptq, hqq, mlx, modelopt, torchao
from jaxis.quantization.compressed_tensors import RULES_KEY, CompressedTensorsConfig
from jaxis.quantization.formats.fp8_blocks import FP8_BLOCKS
from jaxis.quantization.formats.fp8_tensor import FBGEMM_FP8, FP8_TENSOR
from jaxis.quantization.formats.mxfp4 import MXFP4
from jaxis.quantization.gguf import GGUFQuantizationConfig
from jaxis.quantization.published import PublishedFormat, PublishedQuantizationConfig
from jaxis.quantization.rules import RuleQuantizationConfig
from jaxis.quantization.unsupported_kinds import unsupported_method, unsupported_tensors
from jaxis.quantization.wrappers import Dequantize, DequantizingConfig, QuantizedActivationsConfig
from jaxis.quantization_rules import rules_from

_logger = logging.getLogger(__name__)
# `quant_method` -> candidate formats; the first whose `is_meant` holds is used. compressed-tensors is separate.
_FORMATS: dict[str, tuple[PublishedFormat, ...]] = {
    "fp8": (FP8_TENSOR, FP8_BLOCKS),
    "fbgemm_fp8": (FBGEMM_FP8,),
    "mxfp4": (MXFP4,),
}
# `quant_method` -> the config of formats whose tensors say which modules are stored in them, made from the object in
# config.json and the headers of the checkpoint's tensors (None: there are no weights to look at).
_BY_TENSORS: dict[str, Callable[[Mapping[str, Any], Mapping[str, TensorInfo] | None], QuantizationConfig]] = {
    **dict.fromkeys(modelopt.QUANT_METHODS, modelopt.ModelOptConfig),
    "gptq": gptq.gptq_config,
    "gptqmodel": gptq.gptq_config,
    "awq": awq.awq_config,
    "auto-round": auto_round.auto_round_config,
    "intel/auto-round": auto_round.auto_round_config,
    "hqq": hqq.hqq_config,
    "bitsandbytes": bitsandbytes.bitsandbytes_config,
    "mlx": mlx.mlx_config,
    "torchao": torchao.torchao_config,
}
# Checks by tensors, for methods that config.json may also name for weights that are not quantized yet.
_IS_QUANTIZED: dict[str, Callable[[Mapping[str, TensorInfo]], bool]] = {
    "bitsandbytes": bitsandbytes.is_quantized,
    "hqq": hqq.is_quantized,
    "torchao": torchao.is_quantized,
}
# Methods that quantize beforehand: config.json names them over plain weights only where a tool wrote its result
# dequantized, or by mistake.
_ALWAYS_STORED = ("gptq", "gptqmodel", "awq", "auto-round", "intel/auto-round")
_QUANTIZED_TENSORS = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv")
QUANT_METHODS = ("compressed-tensors", *_FORMATS, *_BY_TENSORS)


def quantization_of_checkpoint(
    hf_config: HFConfig,
    choice: RuleQuantizationConfig | Dequantize | None,
    tensors: Mapping[str, TensorInfo] | None = None,
) -> QuantizationConfig | None:
    """Returns the config by which a checkpoint's weights are loaded; None for plain weights.

    Args:
      hf_config: The checkpoint's config.json.
      choice: The user's choice. Rules quantize an unquantized checkpoint; for a quantized one, they decide which
        activations are quantized, and name no types of weights (or, for compressed-tensors, those that are stored).
        `Dequantize` dequantizes a quantized one.
      tensors: Name -> header of the checkpoint's tensors. Some formats find a module's format by them. None if there
        are no weights to look at; then config.json alone decides.

    Raises:
      ConfigError: The checkpoint's scheme is not implemented, or contradicts the choice.
    """
    stored, hint = _description(hf_config, tensors), hf_config.read_object(RULES_KEY)
    if stored is None:
        return _for_unquantized(choice)
    method = "mlx" if mlx.is_mlx(stored) else stored.get("quant_method")
    if method == "compressed-tensors":
        return _compressed_tensors(stored, hint, choice, tensors)
    if method == "mlx" and hint is not None:
        return _as_chosen(_quantized_by_jaxis(stored, hint, choice, tensors), method, choice)
    if method == GGUF:
        return _as_chosen(GGUFQuantizationConfig(stored), "GGUF", choice)
    if tensors is not None and method in _IS_QUANTIZED and not _IS_QUANTIZED[method](tensors):
        return _instead_of_quantizing(method, choice)
    if method in _BY_TENSORS:
        return _as_chosen(_BY_TENSORS[method](stored, tensors), method, choice)
    if method not in _FORMATS:
        if (kind := unsupported_method(method)) is not None:
            raise ConfigError(kind.message)
        raise ConfigError(
            f"the checkpoint is quantized by {method or 'an unknown method'}, which is not supported: use one "
            f"quantized by {', '.join(QUANT_METHODS[:-1])} or {QUANT_METHODS[-1]}, or the unquantized checkpoint"
        )
    published = next(each for each in _FORMATS[method] if each.is_meant(stored))
    return _as_chosen(PublishedQuantizationConfig(published, stored, tensors), method, choice)


def _description(hf_config: HFConfig, tensors: Mapping[str, TensorInfo] | None) -> dict[str, Any] | None:
    """Returns the quantization that config.json, or the names of tensors, describe; None if weights are plain.

    Raises ConfigError if config.json does not describe it, and the weights are of an unsupported kind.
    """
    stored, of_mlx = hf_config.read_object("quantization_config"), hf_config.read_object(mlx.KEY)
    stored = of_mlx if stored is None else stored
    if tensors is None or (stored is not None and not mlx.is_mlx(stored)):
        return None if stored is not None and _describes_nothing(stored, tensors) else stored
    if (kind := unsupported_tensors(tensors)) is not None:
        raise ConfigError(kind.message)
    if stored is None:
        return next(({"quant_method": method} for method, found in _IS_QUANTIZED.items() if found(tensors)), None)
    return stored


def _describes_nothing(stored: Mapping[str, Any], tensors: Mapping[str, TensorInfo] | None) -> bool:
    """Returns whether the weights are plain although config.json describes a quantization; logs it."""
    method = stored.get("quant_method")
    if not tensors or method not in _ALWAYS_STORED or any(name.endswith(_QUANTIZED_TENSORS) for name in tensors):
        return False
    _logger.warning("config.json says %s, but the weights are not quantized: they are loaded as they are", method)
    return True


def _for_unquantized(choice: RuleQuantizationConfig | Dequantize | None) -> RuleQuantizationConfig | None:
    """Returns the rules; raises ConfigError if the user's choice is for quantized checkpoints."""
    if isinstance(choice, Dequantize):
        raise ConfigError(
            "quantization='dequantize' is for quantized checkpoints, and this one is not quantized: leave it out"
        )
    if choice is not None and choice.keeps_weights:
        raise ConfigError(
            "rules with an act_qtype but no weight_qtype are for quantized checkpoints, and this one is not "
            "quantized: give a weight_qtype too, or quantization='int8'"
        )
    return choice


def _compressed_tensors(
    stored: Mapping[str, Any],
    hint: Mapping[str, Any] | None,
    choice: RuleQuantizationConfig | Dequantize | None,
    tensors: Mapping[str, TensorInfo] | None,
) -> QuantizationConfig:
    """Returns the config; `hint` is the rules with which jaxis wrote the checkpoint.

    Raises ConfigError if the scheme is not implemented, or contradicts the choice.
    """
    if isinstance(choice, Dequantize):
        return DequantizingConfig(CompressedTensorsConfig(stored, tensors=tensors))
    if choice is not None and choice.keeps_weights:
        return QuantizedActivationsConfig(CompressedTensorsConfig(stored, tensors=tensors), choice)
    if choice is None and hint is not None:
        choice = RuleQuantizationConfig(rules_from(hint, f"{RULES_KEY} in config.json"), must_match=False)
    return CompressedTensorsConfig(stored, choice, tensors)


def _instead_of_quantizing(method: str, choice: RuleQuantizationConfig | Dequantize | None) -> RuleQuantizationConfig:
    """Returns the user's rules for plain weights that, by config.json, an engine should quantize.

    Raises ConfigError if the user gave none.
    """
    if isinstance(choice, RuleQuantizationConfig) and not choice.keeps_weights:
        return choice
    raise ConfigError(
        f"config.json asks for the weights to be quantized by {method} when they are loaded, which is not done: "
        "give quantization='int4' or 'int8' (--quantization) for jaxis' own quantization"
    )


def _quantized_by_jaxis(
    stored: Mapping[str, Any],
    hint: Mapping[str, Any],
    choice: RuleQuantizationConfig | Dequantize | None,
    tensors: Mapping[str, TensorInfo] | None,
) -> QuantizationConfig:
    """Returns the config of a checkpoint that jaxis wrote in MLX's format. A choice overrides activations."""
    rules = rules_from(hint, f"{RULES_KEY} in config.json")
    if choice is not None:
        rules = tuple(dataclasses.replace(rule, act_qtype=None) for rule in rules)
    of_rules = RuleQuantizationConfig(rules, must_match=False)
    return mlx.QuantizedByRules(mlx.mlx_config(stored, tensors).format_of, of_rules)


def _as_chosen(
    config: QuantizationConfig, method: str, choice: RuleQuantizationConfig | Dequantize | None
) -> QuantizationConfig:
    """Returns a stored format with the user's choice for any format. Raises ConfigError for other weights."""
    if choice is None:
        return config
    if isinstance(choice, Dequantize):
        return DequantizingConfig(config)
    if choice.keeps_weights:
        return QuantizedActivationsConfig(config, choice)
    raise ConfigError(
        f"the checkpoint is quantized by {method} and cannot be quantized again: leave quantization out, or give "
        "'int8_activations' to quantize activations too, or 'dequantize' for weights in the model's data type"
    )
