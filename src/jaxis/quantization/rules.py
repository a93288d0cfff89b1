"""Online quantization by rules: which module gets which types; see `jaxis.quantization_rules`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxis.errors import ConfigError
from jaxis.kernels.quantized_matmul.quantize import check_quantizable
from jaxis.quantization.experts import select_experts_method
from jaxis.quantization.methods import WeightScheme, select_method
from jaxis.quantization_rules import QuantizationRule

if TYPE_CHECKING:
    from jaxis.layers.embed import JaxEmbed
    from jaxis.layers.experts import JaxExperts
    from jaxis.layers.linear import JaxLinear
    from jaxis.quantization.config import ExpertsMethod, LinearMethod


class RuleQuantizationConfig:
    """Quantizes the modules of an unquantized checkpoint as rules say. A QuantizationConfig.

    Args:
      rules: In order; the first that matches decides.
      must_match: Whether a rule that decides for no module is a mistake.
    """

    def __init__(self, rules: Sequence[QuantizationRule], *, must_match: bool = True) -> None:
        self.rules = tuple(rules)
        self._must_match = must_match
        self._used: set[int] = set()

    def find(self, prefix: str) -> QuantizationRule | None:
        """The rule that decides for the module of this dotted name."""
        for index, rule in enumerate(self.rules):
            if re.fullmatch(rule.module_path, prefix):
                self._used.add(index)
                return rule
        return None

    def get_quant_method(
        self, layer: JaxLinear | JaxEmbed | JaxExperts, prefix: str
    ) -> LinearMethod | ExpertsMethod | None:
        """As QuantizationConfig's.

        Raises:
          ConfigError: The layer's sizes do not allow what its rule says.
        """
        from jaxis.layers.experts import JaxExperts

        if (scheme := weight_scheme(self.find(prefix))) is None:
            return None
        is_experts = isinstance(layer, JaxExperts)
        try:
            for in_size in (layer.hidden_size, layer.intermediate_size) if is_experts else (layer.input_size,):
                check_quantizable(in_size, scheme.weight_qtype, scheme.tile_size, scheme.weight_calibration_method)
        except ValueError as error:
            raise ConfigError(f"{prefix} {error}: change its quantization rule, or exclude it before") from None
        return select_experts_method(layer, scheme) if is_experts else select_method(layer, scheme)

    def check_all_used(self) -> None:
        """As QuantizationConfig's."""
        for index, rule in enumerate(self.rules):
            if self._must_match and index not in self._used:
                raise ConfigError(
                    f"the quantization rule for module_path={rule.module_path!r} decides for no module of this model: "
                    "correct or remove it (names are like model.layers.0.mlp.up_proj, the whole name must match, and "
                    "the first rule that matches decides)"
                )


def weight_scheme(rule: QuantizationRule | None) -> WeightScheme | None:
    """What a rule says of a module that it matches; None leaves the module as it is."""
    if rule is None or rule.weight_qtype is None:
        return None
    return WeightScheme(rule.weight_qtype, rule.act_qtype, rule.tile_size, rule.weight_calibration_method)
