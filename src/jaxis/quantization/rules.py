"""Online quantization by rules: which module gets which types, in Qwix's terms.

The first rule whose `module_path` matches the whole of a module's dotted name decides; a module that no rule matches,
or whose rule has no `weight_qtype`, stays as it is. Modules are those with weight matrices: linear layers, embeddings,
heads, and the experts of a layer, which are one (`model.layers.0.mlp.experts`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxis.errors import ConfigError
from jaxis.kernels.quantized_matmul.quantize import CALIBRATION_METHODS, check_quantizable
from jaxis.kernels.quantized_matmul.reference import ACT_QTYPES
from jaxis.kernels.quantized_matmul.weight import QTYPES
from jaxis.quantization.experts import select_experts_method
from jaxis.quantization.methods import WeightScheme, select_method

if TYPE_CHECKING:
    from jaxis.layers.embed import JaxEmbed
    from jaxis.layers.experts import JaxExperts
    from jaxis.layers.linear import JaxLinear
    from jaxis.quantization.config import ExpertsMethod, LinearMethod


@dataclasses.dataclass(frozen=True)
class QuantizationRule:
    """One rule.

    Attributes:
      module_path: Regular expression for the whole dotted name of a module, such as `model.layers.0.mlp.up_proj`.
      weight_qtype: "int8", "int4", or None to leave the matching modules as they are.
      act_qtype: "int8" quantizes the modules' input on the way, a scale for each token and group; None does not.
      tile_size: Input features of a weight that share a scale; None is all of them.
      weight_calibration_method: "absmax", "minmax" (int4 with zero points) or "mse" (int4, least squared error).

    Raises:
      ConfigError: On construction, if a value is unknown or has the wrong type, or they do not go together.
    """

    module_path: str = ".*"
    weight_qtype: str | None = None
    act_qtype: str | None = None
    tile_size: int | None = None
    weight_calibration_method: str = "absmax"

    def __post_init__(self) -> None:
        if not isinstance(self.module_path, str):
            raise ConfigError(f"module_path={self.module_path!r} must be a regular expression")
        try:
            re.compile(self.module_path)
        except re.error as error:
            raise ConfigError(f"module_path={self.module_path!r} is not a regular expression: {error}") from None
        for name, known in (
            ("weight_qtype", (None, *QTYPES)),
            ("act_qtype", (None, *ACT_QTYPES)),
            ("weight_calibration_method", CALIBRATION_METHODS),
        ):
            if (value := getattr(self, name)) not in known:
                raise ConfigError(f"{name}={value!r} is not supported; known: {', '.join(map(str, known))}")
        if self.tile_size is not None and (type(self.tile_size) is not int or self.tile_size < 1):
            raise ConfigError(f"tile_size={self.tile_size!r} must be an integer of at least 1")
        if self.weight_qtype is None:
            if any(getattr(self, field.name) != field.default for field in dataclasses.fields(self)[2:]):
                raise ConfigError(f"the rule for {self.module_path!r} says how to quantize, but has no weight_qtype")
        elif self.weight_qtype == "int8" and self.weight_calibration_method != "absmax":
            raise ConfigError(
                f"weight_calibration_method={self.weight_calibration_method!r} is for int4; int8 has 'absmax' only"
            )

    @property
    def scheme(self) -> WeightScheme | None:
        """What it says of a module that it matches; None leaves that as it is."""
        if self.weight_qtype is None:
            return None
        return WeightScheme(self.weight_qtype, self.act_qtype, self.tile_size, self.weight_calibration_method)


_INT8 = QuantizationRule(".*", "int8", "int8")
SHORT_NAMES: dict[str, tuple[QuantizationRule, ...]] = {
    "none": (),
    "int8": (_INT8,),
    # Embeddings and head lose more by int4 than the layers do, and are read once a token.
    "int4": (
        dataclasses.replace(_INT8, module_path=r"(.*\.)?(embed_tokens|lm_head)"),
        QuantizationRule(".*", "int4", "int8", 32, "mse"),
    ),
}


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

        rule = self.find(prefix)
        if rule is None or (scheme := rule.scheme) is None:
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


def rules_from(value: Any, source: str) -> tuple[QuantizationRule, ...]:
    """Rules from a parsed JSON or YAML value: a list of rules, or {"qwix": {"rules": [...]}}.

    Args:
      value: The value.
      source: What it is, for an error's first words.

    Raises:
      ConfigError: A key, type or value that is not known.
    """
    if isinstance(value, Mapping):
        value = _only_key(_only_key(value, "qwix", source), "rules", f"{source}: qwix")
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ConfigError(f"{source} must be a list of quantization rules, or {{'qwix': {{'rules': [...]}}}}")
    return tuple(_rule_from(rule, f"{source}: rule {number}") for number, rule in enumerate(value, 1))


def rules_to_dict(rules: Sequence[QuantizationRule]) -> dict[str, Any]:
    """What `rules_from` reads, defaults left out."""
    fields = dataclasses.fields(QuantizationRule)
    return {
        "qwix": {
            "rules": [
                {"module_path": rule.module_path}
                | {f.name: getattr(rule, f.name) for f in fields if getattr(rule, f.name) != f.default}
                for rule in rules
            ]
        }
    }


def _rule_from(rule: Any, source: str) -> QuantizationRule:
    if isinstance(rule, QuantizationRule):
        return rule
    known = [field.name for field in dataclasses.fields(QuantizationRule)]
    if not isinstance(rule, Mapping):
        raise ConfigError(f"{source} is {rule!r}, not an object with {', '.join(known)}")
    for key in rule:
        if key not in known:
            raise ConfigError(f"{source} has the unknown key {key!r}; known: {', '.join(known)}")
    if "module_path" not in rule:
        raise ConfigError(f"{source} has no module_path: give the modules' names as a regular expression, '.*' for all")
    try:
        return QuantizationRule(**rule)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def _only_key(value: Any, key: str, source: str) -> Any:
    if not isinstance(value, Mapping) or list(value) != [key]:
        found = ", ".join(map(repr, value)) if isinstance(value, Mapping) else repr(value)
        raise ConfigError(f"{source} must be an object with the one key {key!r}, but has {found or 'none'}")
    return value[key]
