from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxis.errors import ConfigError
from jaxis.layers.experts import PROJECTION_NAMES
from jaxis.layers.weight_format import WeightFormat, WeightSlot
from jaxis.layers.weight_method import WeightedLayer, WeightMethod
from jaxis.quantization.module_patterns import WHERE
from jaxis.quantization.wrappers import DequantizingConfig

FormatOf = Callable[[str, tuple[int, ...]], WeightFormat | None]
"""(Name of a module in the file, (out, in) of its weight) -> format in the file; None if the module is unquantized."""


@dataclass(frozen=True)
class FormatsByTensors:
    """The format of each module, found by the names and headers of its tensors. A QuantizationConfig.

    `format_of` finds the format of a linear layer, an embedding table, or a projection of one expert or of all experts.
    """

    format_of: FormatOf

    @property
    def unquantized(self) -> DequantizingConfig:
        """Returns a config that dequantizes layers that must not be quantized but are in the file."""
        return DequantizingConfig(self)

    def get_quant_method(self, layer: WeightedLayer, prefix: str) -> WeightMethod | None:
        formats: dict[str, WeightFormat] = {}
        for slot in layer.weight_slots:
            try:
                weight_format = self._format_of_slot(slot, prefix)
                if weight_format is not None:
                    weight_format.tensors(slot.shape)
                    formats[slot.name] = weight_format
            except ValueError as error:
                raise ConfigError(f"{WHERE}: {prefix} {error}") from None
        return WeightMethod(formats=formats) if formats else None

    def check_all_used(self) -> None:
        """Does nothing: loading finds tensors of modules that the model does not have."""

    def _format_of_slot(self, slot: WeightSlot, prefix: str) -> WeightFormat | None:
        """Raises ValueError if the experts of a layer are not all stored in the same way."""
        if slot.num_experts is None:
            return self.format_of(prefix, slot.shape)
        of_all = self.format_of(f"{prefix}.{slot.name}", slot.shape)
        if of_all is not None:
            return of_all
        first, *others = [self._format_of_expert(f"{prefix}.{expert}", slot) for expert in range(slot.num_experts)]
        for expert, other in enumerate(others, 1):
            if other != first:
                raise ValueError(f"stores {slot.name} of expert {expert} differently from that of expert 0")
        return first

    def _format_of_expert(self, expert: str, slot: WeightSlot) -> WeightFormat | None:
        formats = (self.format_of(f"{expert}.{name}", slot.shape) for name in PROJECTION_NAMES[slot.name])
        return next((found for found in formats if found is not None), None)
