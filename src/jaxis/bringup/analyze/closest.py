"""The families that are closest to an architecture that jaxis does not have, by tensor names and config.json's keys."""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxis.bringup.analyze.config import construct_once
from jaxis.bringup.analyze.tensors import check_tensors
from jaxis.config.hf_config import HFConfig
from jaxis.config.reference import model_types_of, reference_of
from jaxis.errors import JaxisError
from jaxis.loading.safetensors import TensorInfo
from jaxis.models.registry import built_in_models

_NUM_FAMILIES = 3
_NUM_TRIED = 16  # of those with the most similar keys: each is constructed
_NUM_LAYERS = 4
_SUFFIX = "ForCausalLM"
_BY_KEYS = "the keys of config.json alone"
_NUMBER = re.compile(r"\.(\d+)(?=\.)")


@dataclass(frozen=True)
class ClosestFamily:
    """A family for `jaxis new-model --like`, and its differences in the first layers; `by` names the things that were
    compared.

    Attributes:
      unknown_tensors: Kinds of tensors that the family does not take, layers as "*".
      missing_tensors: Kinds of parameters that the checkpoint has no tensors for.
    """

    like: str
    unknown_tensors: tuple[str, ...]
    missing_tensors: tuple[str, ...]
    unknown_keys: tuple[str, ...]
    by: str

    def differences(self) -> list[str]:
        """Describes the differences in words."""
        parts = (
            ("it does not know the tensors", self.unknown_tensors),
            ("the checkpoint lacks", self.missing_tensors),
            ("it does not know the keys", self.unknown_keys),
        )
        return [f"{words} {', '.join(names)}" for words, names in parts if names]


def closest_families(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo] | None) -> tuple[ClosestFamily, ...]:
    """Ranks the built-in families by their differences, the closest first; without tensors, by keys of config.json
    alone.
    """
    text = config.get("text_config")
    values = dict(text if isinstance(text, Mapping) else config)
    values = _first_layers({**values, "quantization_config": None})
    if tensors is not None:
        tensors = {name: info for name, info in tensors.items() if _layer(name) < _NUM_LAYERS}
    ranked: dict[str, tuple[int, int, ClosestFamily]] = {}
    for architecture in _by_keys(values):
        if (family := _compared(architecture, values, tensors)) is not None:
            distance = len(family.unknown_tensors) + len(family.missing_tensors) + len(family.unknown_keys)
            ranked.setdefault(family.like, (distance, _other_words(architecture, values), family))
    if not ranked:  # none can be constructed from such a config
        return tuple(_by_references(values))[:_NUM_FAMILIES]
    return tuple(family for *_, family in sorted(ranked.values(), key=lambda rank: rank[:2])[:_NUM_FAMILIES])


def _by_references(values: dict[str, Any]) -> list[ClosestFamily]:
    """Compares the keys alone: those that could change logits with those that each family's reference reads."""
    families = []
    for architecture in _by_keys(values):
        model_type = model_types_of(architecture)[0]
        config = HFConfig({**values, "model_type": model_type})
        unknown = [key for key in config.unread_keys() if key not in _keys_of_families()[architecture]]
        families.append(ClosestFamily(_like(architecture), (), (), tuple(unknown), _BY_KEYS))
    return sorted(families, key=lambda family: len(family.unknown_keys))


def families_that_read(key: str) -> tuple[str, ...]:
    """Returns the built-in families whose references read a key of config.json, sorted."""
    return tuple(sorted(_like(name) for name, keys in _keys_of_families().items() if key in keys))


def _other_words(architecture: str, values: Mapping[str, Any]) -> int:
    """Counts the keys whose value is a word, such as the activation's, other than the family's default."""
    reference = reference_of(model_types_of(architecture)[0])
    defaults = {} if reference is None else reference.defaults
    return sum(
        isinstance(default, str) and isinstance(value := values.get(key), str) and value != default
        for key, default in defaults.items()
    )


@functools.cache
def _keys_of_families() -> dict[str, frozenset[str]]:
    """Returns, of each built-in architecture, the keys that its reference reads."""
    return {
        name: frozenset(reference.defaults)
        for name in built_in_models()
        if name.endswith(_SUFFIX) and (types := model_types_of(name)) and (reference := reference_of(types[0]))
    }


def _like(architecture: str) -> str:
    return built_in_models()[architecture].__module__.rpartition(".")[2]


def _by_keys(values: Mapping[str, Any]) -> list[str]:
    """Architectures whose references read the keys of the config, rare keys counting more; Llama's first."""
    keys_of = _keys_of_families()
    counts = Counter(key for keys in keys_of.values() for key in keys)

    def weight(keys: Iterable[str]) -> float:
        return sum(math.log((1 + len(keys_of)) / counts[key]) ** 2 for key in keys if key in counts)

    def similarity(name: str) -> float:
        return weight(keys_of[name] & values.keys()) / math.sqrt(weight(keys_of[name]) + 1e-9)

    nearest = sorted(keys_of, key=similarity, reverse=True)[:_NUM_TRIED]
    return list(dict.fromkeys([f"Llama{_SUFFIX}", *nearest]))


def _compared(
    architecture: str, values: Mapping[str, Any], tensors: Mapping[str, TensorInfo] | None
) -> ClosestFamily | None:
    """Returns the differences; None if the family cannot be constructed from such a config."""
    own = {"architectures": [architecture], "model_type": model_types_of(architecture)[0]}
    try:
        model, unknown_keys = construct_once({**values, **own})
        problems = [] if tensors is None else check_tensors(model, tensors, None)
    except (JaxisError, ArithmeticError, TypeError, ValueError, LookupError, AttributeError, NotImplementedError):
        return None
    kinds = {
        kind: tuple(dict.fromkeys(_kind(problem.names) for problem in problems if problem.kind == kind))
        for kind in ("refused", "unfilled")
    }
    by = _BY_KEYS if tensors is None else "tensor names and keys"
    return ClosestFamily(_like(architecture), kinds["refused"], kinds["unfilled"], tuple(unknown_keys), by)


def _first_layers(values: dict[str, Any]) -> dict[str, Any]:
    count = values.get("num_hidden_layers")
    if not isinstance(count, int) or count <= _NUM_LAYERS:
        return values
    cut = {
        key: value[:_NUM_LAYERS] if isinstance(value, list) and len(value) == count else value
        for key, value in values.items()
    }
    return {**cut, "num_hidden_layers": _NUM_LAYERS}


def _layer(name: str) -> int:
    number = _NUMBER.search(name)
    return int(number[1]) if number else 0


def _kind(names: str) -> str:
    return re.sub(r"\.(\d+|\[[\d,-]+\])(?=\.)", ".*", names)
