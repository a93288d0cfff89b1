"""Selection of a checkpoint's quantization config by the `quant_method` in its config.json."""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from jaxis.config.hf_config import HFConfig
from jaxis.config.quantization import QuantizationConfig
from jaxis.errors import ConfigError
from jaxis.loading.safetensors import TensorInfo
from jaxis.quantization import checkpoints
from jaxis.quantization.checkpoint_format import CheckpointFormat, Choice, Stored
from jaxis.quantization.checkpoints.compressed_tensors import RULES_KEY
from jaxis.quantization.checkpoints.mlx import KEY as MLX_KEY
from jaxis.quantization.checkpoints.mlx import is_mlx
from jaxis.quantization.rules import RuleQuantizationConfig
from jaxis.quantization.unsupported_kinds import unsupported_method, unsupported_tensors
from jaxis.quantization.wrappers import Dequantize

_logger = logging.getLogger(__name__)
FORMATS: tuple[CheckpointFormat, ...] = tuple(
    declared
    for module in pkgutil.iter_modules(checkpoints.__path__)
    for declared in import_module(f"{checkpoints.__name__}.{module.name}").FORMATS
)
_BY_METHOD = {method: each for each in FORMATS for method in each.methods}
_QUANTIZED_TENSORS = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv")
QUANT_METHODS = tuple(method for each in FORMATS for method in each.methods)


def quantization_of_checkpoint(
    hf_config: HFConfig, choice: Choice, tensors: Mapping[str, TensorInfo] | None = None
) -> QuantizationConfig | None:
    """Returns the config by which a checkpoint's weights are loaded; None for plain weights.

    `hf_config` is the checkpoint's config.json, and `tensors` are the headers of its tensors by name. Some formats find
    a module's format by them. None if there are no weights to look at; then config.json alone decides.

    Raises:
      ConfigError: The checkpoint's scheme is not implemented, or contradicts the choice.
    """
    stored, rules = _description(hf_config, tensors), hf_config.read_object(RULES_KEY)
    if stored is None:
        return _for_unquantized(choice)
    method = "mlx" if is_mlx(stored) else stored.get("quant_method")
    if isinstance(method, str) and method in _BY_METHOD:
        return _BY_METHOD[method].config(Stored(method, stored, tensors, rules), choice)
    if (kind := unsupported_method(method)) is not None:
        raise ConfigError(kind.message)
    raise ConfigError(
        f"the checkpoint is quantized by {method or 'an unknown method'}, which is not supported: use one "
        f"quantized by {', '.join(QUANT_METHODS[:-1])} or {QUANT_METHODS[-1]}, or the unquantized checkpoint"
    )


def _description(hf_config: HFConfig, tensors: Mapping[str, TensorInfo] | None) -> dict[str, Any] | None:
    """Returns the quantization that config.json, or the names of tensors, describe; None if weights are plain.

    Raises ConfigError if config.json does not describe it, and the weights are of an unsupported kind.
    """
    stored, of_mlx = hf_config.read_object("quantization_config"), hf_config.read_object(MLX_KEY)
    stored = of_mlx if stored is None else stored
    if tensors is None or (stored is not None and not is_mlx(stored)):
        return None if stored is not None and _describes_nothing(stored, tensors) else stored
    if (kind := unsupported_tensors(tensors)) is not None:
        raise ConfigError(kind.message)
    if stored is None:
        found = (each for each in FORMATS if each.is_quantized is not None and each.is_quantized(tensors))
        return next(({"quant_method": each.methods[0]} for each in found), None)
    return stored


def _describes_nothing(stored: Mapping[str, Any], tensors: Mapping[str, TensorInfo] | None) -> bool:
    """Returns whether the weights are plain although config.json describes a quantization; logs it."""
    method = stored.get("quant_method")
    found = _BY_METHOD.get(method) if isinstance(method, str) else None
    if not tensors or found is None or not found.is_always_stored:
        return False
    if any(name.endswith(_QUANTIZED_TENSORS) for name in tensors):
        return False
    _logger.warning("config.json says %s, but the weights are not quantized: they are loaded as they are", method)
    return True


def _for_unquantized(choice: Choice) -> RuleQuantizationConfig | None:
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
