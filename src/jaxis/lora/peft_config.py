"""Reader of a PEFT adapter's adapter_config.json: the modules that it changes, with their ranks and scales.

Source of the keys and their meaning: https://huggingface.co/docs/peft/package_reference/lora
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxis.errors import CheckpointError, ConfigError
from jaxis.host.json_object import read_json_object

CONFIG_FILE = "adapter_config.json"
MAX_CONFIG_BYTES = 4 << 20
MAX_RANK = 4096
MAX_ALPHA = 1e9
_MOST_SHOWN = 200  # characters of a value, in an error

# Initializations that leave the base weights unchanged. Others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) subtract their
# start
# from the base weights, so the adapter fits only the changed base.
_STARTS = (True, False, "gaussian", "orthogonal", "eva", "default")
_CONVERT = (
    "it starts from what it took out of the base's weights; save it with save_pretrained(..., "
    "path_initial_model_for_weight_conversion=...), which makes a plain adapter of it"
)
# Keys that change no output once an adapter is trained.
_WITHOUT_EFFECT = frozenset(
    {
        *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
        *("lora_dropout", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
        *("runtime_config", "init_weights"),
    }
)
_READ = frozenset(
    {
        *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules"),
        *("exclude_modules", "layers_to_transform", "layers_pattern", "use_dora", "bias", "lora_bias"),
        *("modules_to_save", "init_lora_weights", "target_parameters", "fan_in_fan_out", "qalora_group_size"),
        *("trainable_token_indices", "ensure_weight_tying"),
    }
)

# Patterns around the expressions of rank_pattern and alpha_pattern, and around those of layers_pattern.
_RANK_OR_ALPHA = r"(.*\.)?({})$"
_LAYER = r"(?:^|.*?\.){}\.(?P<layer>\d+)\."


@dataclass(frozen=True)
class AdapterConfig:
    """Content of adapter_config.json.

    Attributes:
      source: Path of the file.
      rank, alpha: Values for modules that no pattern matches.
      rank_pattern, alpha_pattern: Ranks or alphas, by regular expressions for the ends of module names.
      use_rslora: True for the scale alpha / sqrt(r) instead of alpha / r.
      use_dora: True if the rows of changed weights are scaled to norms from the adapter.
      is_transposed: True if linear layers' weights are stored as [in, out] (GPT-2).
      targets: Changed modules: names, ends of names, or one regular expression.
      parameters: Names, or ends of names, of changed parameters.
      excluded: Modules among `targets` that are not changed.
      layers: Numbers of the only layers that are changed; empty means all.
      layers_patterns: Names of the list of layers in the modules' names; empty means any.
      whole_modules: Ends of the names of modules whose whole weights the adapter replaces.
      tokens: Token ids whose embedding rows the adapter replaces: for the embeddings, or by the end of a table's name.
      ensures_tying: True if a replacement of a tied model's embeddings or head applies to both, though only one is
        named.
      bias: Biases that the adapter replaces: "none", "all" or "lora_only".
      has_inputs_first: True if A of every stacked parameter belongs to the inputs, as PEFT ensures since 0.19. Before,
        A of parameters that are [X, out, in] belonged to the outputs.
    """

    source: Path
    rank: int
    alpha: float
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    use_rslora: bool = False
    use_dora: bool = False
    is_transposed: bool = False
    targets: Sequence[str] | str = ()
    parameters: Sequence[str] = ()
    excluded: Sequence[str] | str = ()
    layers: Sequence[int] = ()
    layers_patterns: Sequence[str] = ()
    whole_modules: Sequence[str] = ()
    tokens: Sequence[int] | Mapping[str, Sequence[int]] = ()
    ensures_tying: bool = False
    bias: str = "none"
    has_inputs_first: bool = False

    def rank_of(self, module: str) -> int:
        """Returns the rank of a module, given by its dotted name."""
        return _by_pattern(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Returns the factor of the product of a module's two matrices."""
        rank, alpha = self.rank_of(module), _by_pattern(self.alpha_pattern, module, self.alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def changes(self, module: str) -> bool:
        """Returns whether the adapter changes the module of this dotted name."""
        if self.excluded and _is_named(self.excluded, module):
            return False
        if isinstance(self.targets, str) or module in self.targets:
            return _is_named(self.targets, module)
        return _is_named(self.targets, module) and (not self.layers or self._layer_of(module) in self.layers)

    def changes_parameter(self, name: str) -> bool:
        return _is_named(self.parameters, name)

    def replaces(self, module: str) -> bool:
        """Returns whether the adapter replaces the weights of the module of this dotted name, or of a parent."""
        names = [module[: match.start()] for match in re.finditer(r"\.|$", module)]
        # PEFT compares ends of names without regard to dots: norm also matches input_layernorm.
        return any(name.endswith(key) for name in names for key in self.whole_modules)

    def tokens_of(self, module: str) -> Sequence[int]:
        """Returns the token ids whose rows are replaced in the table of this dotted name."""
        if not isinstance(self.tokens, Mapping):
            return self.tokens
        return next((ids for name, ids in self.tokens.items() if _is_named([name], module)), ())

    def _layer_of(self, module: str) -> int | None:
        if not self.layers_patterns:
            match = re.match(r".*?\.[^.]*\.(?P<layer>\d+)\.", module)
            return int(match["layer"]) if match else None
        for pattern in self.layers_patterns:
            if match := re.match(_LAYER.format(pattern), module):
                return int(match["layer"])
        return None


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Reads the config in an adapter's folder.

    Raises CheckpointError if the file is missing or cannot be read, and ConfigError if a key, which the error names, is
    unknown or has an unsupported value.
    """
    path = folder / CONFIG_FILE
    if not path.exists():
        raise CheckpointError(f"{folder} has no {CONFIG_FILE}: give the folder of an adapter that PEFT saved")
    return _Reader(path, read_json_object(path, max_bytes=MAX_CONFIG_BYTES)).read()


class _Reader:
    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self._path = path
        self._values = values

    def read(self) -> AdapterConfig:
        kind = self._values.get("peft_type")
        if kind != "LORA":
            raise self._refused("peft_type", "only LORA adapters are supported")
        for key, value in self._values.items():
            if key not in _READ and key not in _WITHOUT_EFFECT and value not in (None, False, [], {}):
                raise self._refused(key, "jaxis does not support this: without it, the adapter's outputs are others")
        if (start := self._values.get("init_lora_weights", True)) not in _STARTS:
            raise (
                self._refused("init_lora_weights", _CONVERT)
                if isinstance(start, str)
                else self._not("init_lora_weights", "true, false or a name")
            )
        if self._flag("lora_bias"):
            raise self._refused("lora_bias", "biases of lora_B are not supported")
        bias = self._values.get("bias") or "none"
        if bias not in ("none", "all", "lora_only"):
            raise self._not("bias", "none, all or lora_only")
        return AdapterConfig(
            source=self._path,
            rank=self._rank("r", self._values.get("r", 8)),
            alpha=self._number("lora_alpha", self._values.get("lora_alpha", 8)),
            rank_pattern={p: self._rank("rank_pattern", v) for p, v in self._patterns("rank_pattern").items()},
            alpha_pattern={p: self._number("alpha_pattern", v) for p, v in self._patterns("alpha_pattern").items()},
            use_rslora=self._flag("use_rslora"),
            use_dora=self._flag("use_dora"),
            is_transposed=self._flag("fan_in_fan_out"),
            targets=self._names("target_modules", or_expression=True),
            parameters=self._names("target_parameters"),
            excluded=self._names("exclude_modules", or_expression=True),
            layers=self._layers(),
            layers_patterns=self._expressions("layers_pattern"),
            whole_modules=self._names("modules_to_save"),
            tokens=self._tokens(),
            ensures_tying=self._flag("ensure_weight_tying"),
            bias=bias,
            has_inputs_first=self._is_since(0, 19),
        )

    def _refused(self, key: str, because: str) -> ConfigError:
        return ConfigError(f"{self._path}: {key}={self._shown(key)} cannot be honoured: {because}")

    def _not(self, key: str, expected: str) -> ConfigError:
        return ConfigError(f"{self._path}: {key}={self._shown(key)} must be {expected}")

    def _shown(self, key: str) -> str:
        shown = repr(self._values.get(key))
        return shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}..."

    def _is_since(self, major: int, minor: int) -> bool:
        """Returns whether this or a later release of PEFT saved the adapter. PEFT records its version since 0.18."""
        version = self._values.get("peft_version")
        found = re.match(r"(\d{1,9})\.(\d{1,9})(?!.*dev)", version) if isinstance(version, str) else None
        return found is not None and (int(found[1]), int(found[2])) >= (major, minor)

    def _flag(self, key: str) -> bool:
        value = self._values.get(key) or False
        if not isinstance(value, bool):
            raise self._not(key, "true or false")
        return value

    def _rank(self, key: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_RANK:
            raise self._not(key, f"integers from 1 to {MAX_RANK}" if "pattern" in key else f"from 1 to {MAX_RANK}")
        return value

    def _number(self, key: str, value: object) -> float:
        # JSON allows integers that no float can hold.
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_ALPHA:
            expected = f"from -{MAX_ALPHA:g} to {MAX_ALPHA:g}"
            raise self._not(key, f"numbers {expected}" if "pattern" in key else f"a number {expected}")
        return float(value)

    def _patterns(self, key: str) -> dict[str, Any]:
        value = self._values.get(key) or {}
        if not isinstance(value, dict):
            raise self._not(key, "an object of regular expressions")
        for expression in value:
            self._check_expression(key, expression, _RANK_OR_ALPHA)
        return value

    def _tokens(self) -> Sequence[int] | Mapping[str, Sequence[int]]:
        value = self._values.get("trainable_token_indices") or []
        for ids in value.values() if isinstance(value, dict) else [value]:
            is_list = isinstance(ids, list) and all(type(token) is int and token >= 0 for token in ids)
            if not is_list or len(set(ids)) < len(ids):
                raise self._not("trainable_token_indices", "a list of different token ids, or an object of such lists")
        return value

    def _names(self, key: str, *, or_expression: bool = False) -> Sequence[str] | str:
        value = self._values.get(key) or []
        if isinstance(value, str) and or_expression:
            self._check_expression(key, value)
            return value
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self._not(key, "a list of names" + (" or a regular expression" if or_expression else ""))
        return tuple(value)

    def _expressions(self, key: str) -> Sequence[str]:
        value = self._names(key, or_expression=True)
        expressions = (value,) if isinstance(value, str) else value
        for expression in expressions:
            self._check_expression(key, expression, _LAYER)
        return expressions

    def _layers(self) -> Sequence[int]:
        value = self._values.get("layers_to_transform")
        layers = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(layer, int) and not isinstance(layer, bool) for layer in layers):
            raise self._not("layers_to_transform", "an integer or a list of integers")
        return tuple(layers)

    def _check_expression(self, key: str, expression: str, within: str = "{}") -> None:
        try:
            re.compile(within.format(expression))  # where flags and groups of its own may not be allowed
        except (re.error, RecursionError, OverflowError) as error:
            raise ConfigError(
                f"{self._path}: {key} has the invalid regular expression {expression!r}: {error}"
            ) from None


def _is_named(names: Sequence[str] | str, module: str) -> bool:
    """Returns whether a name is the module's or ends it after a dot, or the one expression matches all of it."""
    if names == "all-linear":  # only PEFT knows which modules these are; the file has them
        return True
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _by_pattern(patterns: Mapping[str, Any], module: str, otherwise: Any) -> Any:
    """Returns the value of the first expression that matches the end of the name, after a dot."""
    for expression, value in patterns.items():
        if re.match(_RANK_OR_ALPHA.format(expression), module):
            return value
    return otherwise
