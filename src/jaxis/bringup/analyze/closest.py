"""The families that are closest to an architecture that jaxis does not have, by tensor names and config.json's keys."""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from jaxis.bringup.analyze.construction import Construction, construct
from jaxis.bringup.analyze.finding import ModelFinding
from jaxis.bringup.analyze.tensors import check_tensors
from jaxis.config.key_rules import READ_BY_REFERENCE
from jaxis.config.reference import model_types_of, reference_of
from jaxis.loading.safetensors import TensorInfo
from jaxis.models.registry import built_in_models

_NUM_FAMILIES = 3
_NUM_TRIED = 16  # of those with the most similar keys: each is constructed
_NUM_LAYERS = 4
_NUM_READERS = 3
_SUFFIX = "ForCausalLM"
_NUMBER = re.compile(r"\.(\d+)(?=\.)")


def closest_families(
    config: Mapping[str, Any], tensors: Mapping[str, TensorInfo] | None
) -> list[tuple[str, Construction]]:
    """Ranks the built-in families by their differences, the closest first; without tensors, by config.json alone.

    Returns names for `jaxis new-model --like`, each with the text model's first layers as this family has them; its
    findings are the differences.
    """
    text = config.get("text_config")
    values = _first_layers({**(text if isinstance(text, Mapping) else config), "quantization_config": None})
    if tensors is not None:
        tensors = {name: info for name, info in tensors.items() if _layer(name) < _NUM_LAYERS}
    found: dict[str, Construction] = {}
    for architecture in _by_keys(values):
        own = {"architectures": [architecture], "model_type": model_types_of(architecture)[0]}
        construction = construct({**values, **own}, "config.json")
        like = _like(architecture)
        findings = [replace(each, like=like) for each in all_findings(construction, tensors)]
        found.setdefault(like, replace(construction, findings=tuple(findings)))
    return sorted(found.items(), key=lambda item: (item[1].model is None, len(item[1].findings)))[:_NUM_FAMILIES]


def all_findings(construction: Construction, tensors: Mapping[str, TensorInfo] | None) -> list[ModelFinding]:
    """Returns the findings of a construction, of keys that the family does not read, and of tensors.

    If it could not be constructed, keys that its reference reads do not count: it may have refused another one first.
    Tensors fill the parameters; they are not checked if anything was refused.
    """
    model, config = construction.model, construction.vllm_config
    unknown = [
        ModelFinding("unknown_key", (use.key,), use.because + _readers(use.key))
        for use in construction.uses
        if use.use == "unread" and not (model is None and use.because == READ_BY_REFERENCE)
    ]
    of_tensors = []
    if model is not None and config is not None and tensors is not None and not construction.findings:
        of_tensors = check_tensors(model, tensors, config.quant_config)
    return [*construction.findings, *unknown, *of_tensors]


def _readers(key: str) -> str:
    """Names the built-in families whose references read a key of config.json, in words; "" without any."""
    name = key.rpartition(".")[2]
    readers = sorted(_like(family) for family, keys in _keys_of_families().items() if name in keys)
    more = ", ..." if len(readers) > _NUM_READERS else ""
    return f"; known to {', '.join(readers[:_NUM_READERS])}{more}" if readers else ""


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
