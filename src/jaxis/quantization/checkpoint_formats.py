"""How to load a checkpoint's weights, by the `quant_method` in its config.json."""

from __future__ import annotations

from jaxis.config.hf_config import HFConfig
from jaxis.config.quantization import QuantizationConfig
from jaxis.errors import ConfigError
from jaxis.loading.gguf.gguf_checkpoint import QUANT_METHOD as GGUF
from jaxis.quantization.compressed_tensors import RULES_KEY, CompressedTensorsConfig
from jaxis.quantization.formats.fp8_blocks import FP8_BLOCKS
from jaxis.quantization.formats.fp8_tensor import FP8_TENSOR
from jaxis.quantization.formats.mxfp4 import MXFP4
from jaxis.quantization.gguf import GGUFQuantizationConfig
from jaxis.quantization.published import PublishedFormat, PublishedQuantizationConfig
from jaxis.quantization.rules import RuleQuantizationConfig
from jaxis.quantization.wrappers import Dequantize, DequantizingConfig, QuantizedActivationsConfig
from jaxis.quantization_rules import rules_from

# `quant_method` -> candidate formats; the first whose `is_meant` holds is used. compressed-tensors is separate.
_FORMATS: dict[str, tuple[PublishedFormat, ...]] = {
    "fp8": (FP8_TENSOR, FP8_BLOCKS),
    "mxfp4": (MXFP4,),
}
QUANT_METHODS = ("compressed-tensors", *_FORMATS)


def quantization_of_checkpoint(
    hf_config: HFConfig, choice: RuleQuantizationConfig | Dequantize | None
) -> QuantizationConfig | None:
    """How to load a checkpoint's weights.

    Args:
      hf_config: Its config.json.
      choice: The user's choice. Rules quantize an unquantized checkpoint; for a quantized one, they decide which
        activations are quantized, and name no types of weights (or, for compressed-tensors, those that are stored).
        `Dequantize` dequantizes a quantized one.

    Raises:
      ConfigError: The checkpoint's scheme is not implemented, or contradicts the choice.
    """
    stored, hint = hf_config.read_object("quantization_config"), hf_config.read_object(RULES_KEY)
    if stored is None:
        if isinstance(choice, Dequantize):
            raise ConfigError(
                "quantization='dequantize' is for quantized checkpoints, and this one is not quantized: leave it out"
            )
        if isinstance(choice, RuleQuantizationConfig) and choice.keeps_weights:
            raise ConfigError(
                "rules with an act_qtype but no weight_qtype are for quantized checkpoints, and this one is not "
                "quantized: give a weight_qtype too, or quantization='int8'"
            )
        return choice
    method = stored.get("quant_method")
    if method == "compressed-tensors":
        if isinstance(choice, Dequantize):
            return DequantizingConfig(CompressedTensorsConfig(stored))
        if choice is not None and choice.keeps_weights:
            return QuantizedActivationsConfig(CompressedTensorsConfig(stored), choice)
        if choice is None and hint is not None:
            choice = RuleQuantizationConfig(rules_from(hint, f"{RULES_KEY} in config.json"), must_match=False)
        return CompressedTensorsConfig(stored, choice)
    if method == GGUF:
        return _as_chosen(GGUFQuantizationConfig(stored), "GGUF", choice)
    if method not in _FORMATS:
        raise ConfigError(
            f"the checkpoint is quantized by {method or 'an unknown method'}, which is not supported: use one "
            f"quantized by {', '.join(QUANT_METHODS[:-1])} or {QUANT_METHODS[-1]}, or the unquantized checkpoint"
        )
    published = next(each for each in _FORMATS[method] if each.is_meant(stored))
    return _as_chosen(PublishedQuantizationConfig(published, stored), method, choice)


def _as_chosen(
    config: QuantizationConfig, method: str, choice: RuleQuantizationConfig | Dequantize | None
) -> QuantizationConfig:
    """A stored format, with what a user may choose for any.

    Raises:
      ConfigError: The user asks for other weights.
    """
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
