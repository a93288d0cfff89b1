"""A format of quantized checkpoints as one object: how it is recognised, and how layers load it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxis.config.quantization import QuantizationConfig
from jaxis.errors import ConfigError
from jaxis.loading.safetensors import TensorInfo
from jaxis.quantization.rules import RuleQuantizationConfig
from jaxis.quantization.wrappers import Dequantize, DequantizingConfig, QuantizedActivationsConfig

Choice = RuleQuantizationConfig | Dequantize | None
"""A user's choice of a quantization. Rules quantize an unquantized checkpoint; for a quantized one, they decide which
activations are quantized. `Dequantize` dequantizes a quantized one.
"""


@dataclass(frozen=True)
class Stored:
    """A checkpoint's description of its quantization.

    Attributes:
      method: Name of the format, as `quant_method` of config.json has it.
      settings: The object in config.json.
      tensors: Name -> header of the checkpoint's tensors; None if there are no weights to look at.
      rules: Rules with which jaxis wrote the checkpoint, as they stand in config.json; None if it did not.
    """

    method: str
    settings: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo] | None
    rules: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class CheckpointFormat:
    """A format that a tool quantizes checkpoints to.

    Attributes:
      methods: Its names as `quant_method` in config.json.
      read: Makes the QuantizationConfig of what is stored and of the user's choice; raises ConfigError if the settings
        ask for something that is not implemented, or the choice contradicts them.
      is_quantized: Finds its tensors among those of a checkpoint. For methods that config.json may also name for
        weights that an engine should quantize, or leave unnamed; None for others. No other format may have such
        tensors, so that formats have no order.
      is_always_stored: True if the tool quantizes beforehand: config.json names the method over plain weights only
        where the result was written dequantized, or by mistake.
    """

    methods: tuple[str, ...]
    read: Callable[[Stored, Choice], QuantizationConfig]
    is_quantized: Callable[[Mapping[str, TensorInfo]], bool] | None = None
    is_always_stored: bool = False

    def config(self, stored: Stored, choice: Choice) -> QuantizationConfig:
        """Returns the config by which layers load the weights. Raises ConfigError if the choice contradicts them."""
        if stored.tensors is not None and self.is_quantized is not None and not self.is_quantized(stored.tensors):
            return _instead_of_quantizing(stored.method, choice)
        return self.read(stored, choice)


def as_stored(
    read: Callable[[Mapping[str, Any], Mapping[str, TensorInfo] | None], QuantizationConfig],
) -> Callable[[Stored, Choice], QuantizationConfig]:
    """Makes a format's `read` of a function of settings and tensors: a choice leaves the weights as they are stored."""
    return lambda stored, choice: as_chosen(read(stored.settings, stored.tensors), stored.method, choice)


def as_chosen(config: QuantizationConfig, method: str, choice: Choice) -> QuantizationConfig:
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


def _instead_of_quantizing(method: str, choice: Choice) -> RuleQuantizationConfig:
    """Returns the user's rules for plain weights that, by config.json, an engine should quantize.

    Raises ConfigError if the user gave none.
    """
    if isinstance(choice, RuleQuantizationConfig) and not choice.keeps_weights:
        return choice
    raise ConfigError(
        f"config.json asks for the weights to be quantized by {method} when they are loaded, which is not done: "
        "give quantization='int4' or 'int8' (--quantization) for jaxis' own quantization"
    )
