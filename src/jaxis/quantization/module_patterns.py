"""Names and patterns of modules in a checkpoint's `quantization_config`, and checks of its keys."""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from jaxis.errors import ConfigError
from jaxis.layers.experts import PROJECTION_NAMES

WHERE = "quantization_config in config.json"
PATTERN_KEYS = ("modules_to_not_convert", "ignored_layers")
EMBEDDING_NAMES = ("embed_tokens", "embeddings", "word_embeddings", "wte")
"""Names of token embeddings in checkpoints."""
FUSED_MODULES = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "fused_wqa_wkv": ("wq_a", "wkv"),
}
"""Fused modules of engines -> their parts in checkpoints. Lists of modules name the ones or the others."""

_WILDCARD = re.compile(r"[*?\[]")
_NAMES_SOME_EXPERTS = re.compile(r"experts\W{0,4}[\d\[(]")

_Decision = TypeVar("_Decision")


def names_of(value: object, key: str) -> tuple[str, ...]:
    """Returns a list of names in config.json; absent means empty. Raises ConfigError for anything else."""
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"{WHERE}: {key}={value!r} must be a list of names")
    return tuple(value)


def compiled(pattern: str, key: str) -> re.Pattern[str]:
    """Compiles a regular expression. Raises ConfigError if it is invalid."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{WHERE}: {key} has {pattern!r}, which is not a regular expression: {error}") from None


def unconverted_modules(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the patterns of unquantized modules, under either key in use; by default only the head.

    Raises ConfigError if both keys are present, or the patterns are not a list of regular expressions.
    """
    given = {key: config[key] for key in PATTERN_KEYS if config.get(key) is not None}
    if len(given) > 1:
        raise ConfigError(f"{WHERE} has both {' and '.join(PATTERN_KEYS)}: remove one")
    if not given:
        return ("lm_head",)
    [(key, value)] = given.items()
    patterns = names_of(value, key)
    for pattern in patterns:
        compiled(pattern.removeprefix("re:"), key)
    return patterns


def is_unconverted(name: str, patterns: Sequence[str]) -> bool:
    """Returns whether the name ends with a pattern, or a pattern matches from its start to the end of a part.

    As in transformers' `should_convert_module`: "layers.1" is not "layers.11", "mlp.gate" is not "mlp.gate_proj".
    """
    for pattern in patterns:
        pattern = pattern.removeprefix("re:")  # AutoFP8's mark
        for each in _spellings(name, pattern):
            if each.endswith(pattern) or _to_a_boundary(pattern).match(each):
                return True
    return False


@functools.cache  # re's own cache is smaller than some published lists
def _to_a_boundary(pattern: str) -> re.Pattern[str]:
    """Compiles a pattern that matches a name from its start to the end of one of its parts."""
    return re.compile(rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))")


class WildcardList:
    """Modules as ModelOpt lists them: by name or shell wildcard, each of which also means the modules inside.

    Names are looked up: lists that name each expert have tens of thousands.
    """

    def __init__(self, wildcards: Iterable[str]) -> None:
        wildcards = tuple(wildcards)
        self._wildcards = tuple(each for each in wildcards if _WILDCARD.search(each))
        self._names = frozenset(canonical(each) for each in wildcards if not _WILDCARD.search(each))

    def has(self, name: str) -> bool:
        return is_meant(name, self._matches)

    def _matches(self, name: str) -> bool:
        if any(module in self._names for module in _enclosing(canonical(name))):
            return True
        return any(
            fnmatch.fnmatchcase(module, wildcard)
            for wildcard in self._wildcards
            for spelling in _spellings(name, wildcard)
            for module in _enclosing(spelling)
        )


def _enclosing(name: str) -> Iterator[str]:
    """Returns the names of the modules around one, and its own."""
    parts = name.split(".")
    return (".".join(parts[:depth]) for depth in range(1, len(parts) + 1))


def is_meant(name: str, matches: Callable[[str], bool]) -> bool:
    """Returns whether a list of modules includes this one: by its name or as part of a fused module.

    Raises ConfigError if the list includes only some parts of this fused module.
    """
    if matches(name):
        return True
    module, dot, last = name.rpartition(".")
    if any(matches(f"{module}{dot}{fused}") for fused, parts in FUSED_MODULES.items() if last in parts):
        return True
    parts = FUSED_MODULES.get(last, ())
    meant = [part for part in parts if matches(f"{module}{dot}{part}")]
    if meant and len(meant) < len(parts):
        raise ConfigError(
            f"{WHERE} names {', '.join(meant)} of {name}, which has {', '.join(parts)} in one: name all of them or none"
        )
    return bool(meant)


def _spellings(name: str, pattern: str) -> list[str]:
    """Returns the tools' spellings of a module's name; one where a pattern has a negation."""
    bare = canonical(name)
    if "(?!" in pattern:
        return [name if "language_model" not in pattern or bare != name else f"language_model.{bare}"]
    names = [name, bare]
    if "language_model" in pattern:
        names.append(f"language_model.{bare}")
    if "language_model" in pattern and bare.startswith("model."):
        names.append(f"model.language_model.{bare.removeprefix('model.')}")
    return list(dict.fromkeys(names))


def canonical(name: str) -> str:
    """Returns a module's name without `language_model`, which some tools and versions write and others do not."""
    return ".".join(part for part in name.split(".") if part != "language_model")


def decide_for_experts(
    num_experts: int,
    prefix: str,
    projection: str,
    patterns: Iterable[str],
    decide: Callable[[Sequence[str]], _Decision],
) -> _Decision:
    """Returns the decision for a projection of all experts of a layer; lists of modules may name each expert.

    Args:
      num_experts: Number of the layer's experts.
      prefix: Name of the layer.
      projection: "gate_proj", "up_proj" or "down_proj".
      patterns: Patterns that `decide` uses; it is called for one expert only if they cannot tell experts apart.
      decide: Takes the names of a projection of an expert, and of the modules around it.

    Raises:
      ConfigError: The decision differs between experts.
    """
    is_uniform = not any(_NAMES_SOME_EXPERTS.search(pattern) for pattern in patterns)
    decisions = [
        decide(
            (
                *(f"{prefix}.{expert}.{name}" for name in PROJECTION_NAMES[projection]),
                *(f"{prefix}.{expert}", f"{prefix}.{projection}", prefix),
            )
        )
        for expert in range(1 if is_uniform else num_experts)
    ]
    if any(decision != decisions[0] for decision in decisions):
        raise ConfigError(f"{WHERE}: experts of {prefix} are quantized in different ways, which is not supported")
    return decisions[0]


class ModuleList:
    """Modules as compressed-tensors lists them: by name, or after `re:` by an expression from a name's start.

    Other entries count as names of classes. Raises ConfigError if a regular expression is not valid.
    """

    def __init__(self, targets: Iterable[str], key: str) -> None:
        self.targets = tuple(targets)
        self._names = frozenset(canonical(target) for target in self.targets if not target.startswith("re:"))
        self._patterns = [compiled(target[3:], key) for target in self.targets if target.startswith("re:")]

    def has_name(self, names: Sequence[str]) -> bool:
        return any(is_meant(name, lambda each: canonical(each) in self._names) for name in names)

    def has_match(self, names: Sequence[str]) -> bool:
        return any(is_meant(name, self._matches) for name in names)

    def has_class(self, classes: Iterable[str]) -> bool:
        return any(each in self.targets for each in classes)

    def _matches(self, name: str) -> bool:
        return any(
            pattern.match(spelling) for pattern in self._patterns for spelling in _spellings(name, pattern.pattern)
        )


def check_keys(value: object, known: Mapping[str, tuple[Any, ...] | None], where: str) -> None:
    """Raises ConfigError for an unknown key, or a value that is not among the key's values (None: any)."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} is {value!r}, expected an object")
    for key, setting in value.items():
        if key not in known:
            raise ConfigError(f"{where} has the key {key!r}, which is not supported")
        allowed = known[key]
        if allowed is not None and setting not in allowed:
            raise ConfigError(f"{where}: {key}={setting!r} is not supported; supported: {allowed[0]!r}")
