"""Online quantization by rules that give each module its types; see `jaxis.quantization_rules`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from jaxis.errors import ConfigError
from jaxis.kernels.weights import WeightScheme, check_quantizable
from jaxis.layers.weight_method import WeightedLayer, WeightMethod
from jaxis.quantization_rules import QuantizationRule


class RuleQuantizationConfig:
    """Quantizes the modules of an unquantized checkpoint by rules, the first that matches. A QuantizationConfig.

    With `must_match`, a rule that applies to no module is an error. General rules need not match: layers that their
    groups do not divide get int8 by row.
    """

    def __init__(self, rules: Sequence[QuantizationRule], *, must_match: bool = True) -> None:
        self.rules = tuple(rules)
        self._exceptions: dict[str, QuantizationRule] = {}
        self._must_match = must_match
        self._used: set[int] = set()

    @property
    def resolved_rules(self) -> tuple[QuantizationRule, ...]:
        """Returns the rules as applied to the layers so far, with rules for layers that they did not fit."""
        return (*self._exceptions.values(), *self.rules)

    def find(self, prefix: str) -> QuantizationRule | None:
        """Returns the rule for the module with this dotted name; None if no rule matches."""
        for index, rule in enumerate(self.rules):
            if re.fullmatch(rule.module_path, prefix):
                self._used.add(index)
                return rule
        return None

    def get_quant_method(self, layer: WeightedLayer, prefix: str) -> WeightMethod | None:
        """Returns the method of a layer. Raises ConfigError if the layer's sizes do not fit its rule."""
        if (scheme := weight_scheme(self._fitting(self.find(prefix), layer, prefix))) is None:
            return None
        try:
            for slot in layer.weight_slots:
                check_quantizable(slot.shape[1], scheme)
        except ValueError as error:
            raise ConfigError(f"{prefix} {error}: change its quantization rule, or exclude it before") from None
        return WeightMethod(scheme=scheme)

    def _fitting(self, rule: QuantizationRule | None, layer: WeightedLayer, prefix: str) -> QuantizationRule | None:
        """Returns the rule, or int8 by row where groups of general rules do not divide the layer's features."""
        if self._must_match or rule is None or rule.tile_size is None:
            return rule
        if all(slot.shape[1] % rule.tile_size == 0 for slot in layer.weight_slots):
            return rule
        self._exceptions[prefix] = QuantizationRule(re.escape(prefix), "int8", rule.act_qtype)
        return self._exceptions[prefix]

    @property
    def keeps_weights(self) -> bool:
        """True if the rules only name activations to quantize."""
        return all(rule.weight_qtype is None for rule in self.rules) and any(rule.act_qtype for rule in self.rules)

    def check_all_used(self) -> None:
        for index, rule in enumerate(self.rules):
            if self._must_match and index not in self._used:
                raise ConfigError(
                    f"the quantization rule for module_path={rule.module_path!r} applies to no module of this model: "
                    "correct or remove it (names are like model.layers.0.mlp.up_proj, the whole name must match, and "
                    "the first rule that matches decides)"
                )


def weight_scheme(rule: QuantizationRule | None) -> WeightScheme | None:
    """Returns the scheme of a module that the rule matches; None leaves the module as it is."""
    if rule is None or rule.weight_qtype is None:
        return None
    return WeightScheme(rule.weight_qtype, rule.tile_size, rule.weight_calibration_method, rule.act_qtype)
