from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import ml_dtypes
import numpy as np

from jaxis.errors import ConfigError
from jaxis.layers.experts import PROJECTION_NAMES
from jaxis.layers.weight_format import WeightFormat, WeightSlot
from jaxis.layers.weight_method import WeightedLayer, WeightMethod
from jaxis.loading.safetensors import TensorInfo
from jaxis.quantization.module_patterns import WHERE, decide_for_experts
from jaxis.quantization.tensor_names import TensorNames

_PLAIN_DTYPES = tuple(np.dtype(dtype) for dtype in (np.float32, np.float16, ml_dtypes.bfloat16))


class StoredConfig:
    """Decides how layers load a quantized checkpoint. A QuantizationConfig; subclasses have `format_of`.

    config.json describes a module's format. If the file has only an ordinary weight for a module, that is loaded: lists
    of unquantized modules often have the names of other tools' modules.

    Args:
      patterns: The lists of modules in config.json, joined.
      names: Names of tensors in the file.
      tensors: Name -> header of the file's tensors; None if there are none to look at.
    """

    def __init__(self, patterns: Sequence[str], names: TensorNames, tensors: Mapping[str, TensorInfo] | None) -> None:
        self._patterns = tuple(patterns)
        self._names = names
        self._tensors = tensors

    def format_of(self, layer: WeightedLayer, names: Sequence[str]) -> WeightFormat | None:
        """Returns the format of a module by config.json; None: unquantized. Raises ConfigError if it is not supported.

        The layer is the module, or the one that an expert's projection belongs to. The module's own name comes first in
        `names`.
        """
        raise NotImplementedError

    def get_quant_method(self, layer: WeightedLayer, prefix: str) -> WeightMethod | None:
        formats = self.stored_formats(layer, prefix)
        return stored_as(formats, layer, prefix) if formats else None

    def stored_formats(self, layer: WeightedLayer, prefix: str) -> dict[str, WeightFormat]:
        """Returns name -> format of the layer's parameters that the file has quantized.

        Raises ConfigError if experts are stored in different formats.
        """
        formats = {slot.name: self._format_of_slot(layer, slot, prefix) for slot in layer.weight_slots}
        return {name: each for name, each in formats.items() if each is not None}

    @property
    def unquantized(self) -> DequantizedIfStored:
        return DequantizedIfStored(self)

    def tensor_name(self, name: str) -> str | None:
        self._names.say_if_unused(name)
        return self._names.translated(name)

    def check_all_used(self) -> None:
        """Does nothing: the file's lists may name modules that the model does not have."""

    def has_tensors_of(self, weight_format: WeightFormat, slot: WeightSlot, module: str) -> bool:
        """Returns whether the file has tensors of the format for a module, other than one `weight`."""
        try:
            names = weight_format.tensors(slot.shape).keys() - {"weight"}
        except ValueError:  # the sizes do not fit the format, so the module cannot be stored in it
            return False
        return any(f"{module}.{name}" in self._infos for name in names)

    def _format_of_slot(self, layer: WeightedLayer, slot: WeightSlot, prefix: str) -> WeightFormat | None:
        modules = [prefix]
        if slot.num_experts is not None:
            modules = [f"{prefix}.0.{name}" for name in PROJECTION_NAMES[slot.name]]
            weight_format = decide_for_experts(
                slot.num_experts, prefix, slot.name, self._patterns, lambda names: self.format_of(layer, names)
            )
        else:
            weight_format = self.format_of(layer, (prefix,))
        if weight_format is None or any(self._is_plain(weight_format, slot, module) for module in modules):
            return None
        return weight_format

    def _is_plain(self, weight_format: WeightFormat, slot: WeightSlot, module: str) -> bool:
        weight = self._infos.get(f"{module}.weight")
        is_wide = weight is not None and weight.dtype in _PLAIN_DTYPES
        return is_wide and not self.has_tensors_of(weight_format, slot, module)

    @cached_property
    def _infos(self) -> dict[str, TensorInfo]:
        """Returns headers by the names by which layers take the tensors."""
        names = {name: self._names.translated(name) for name in self._tensors or ()}
        return {name: (self._tensors or {})[in_file] for in_file, name in names.items() if name is not None}


@dataclass(frozen=True)
class DequantizedIfStored:
    """Dequantizes layers that must not be quantized but are in the file. A QuantizationConfig."""

    config: StoredConfig

    def get_quant_method(self, layer: WeightedLayer, prefix: str) -> WeightMethod | None:
        formats = self.config.stored_formats(layer, prefix)
        slots = [slot for slot in layer.weight_slots if slot.name in formats]
        if not any(self.config.has_tensors_of(formats[slot.name], slot, prefix) for slot in slots):
            return None
        return dataclasses.replace(stored_as(formats, layer, prefix), dequantizes=True)

    def check_all_used(self) -> None:
        """Does nothing: the inner configuration's own check is called."""


def stored_as(formats: Mapping[str, WeightFormat], layer: WeightedLayer, prefix: str) -> WeightMethod:
    """Returns the method of a layer whose parameters a checkpoint stores in these formats, by name.

    Raises ConfigError if the layer's sizes do not fit a format.
    """
    try:
        for slot in layer.weight_slots:
            if slot.name in formats:
                formats[slot.name].tensors(slot.shape)
    except ValueError as error:
        raise ConfigError(f"{WHERE}: {prefix} {error}") from None
    return WeightMethod(formats=dict(formats))
