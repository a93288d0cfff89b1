"""Writes src/jaxis/config/reference_keys.json: the keys of config.json that transformers' code of each family reads.

    python tools/reference_keys.py            # writes the file
    python tools/reference_keys.py --check    # exit code 1 if it is out of date

The config.json of a published checkpoint has keys of many tools. Whether a key that jaxis does not read may be ignored
is decided by whether the family's reference reads it; jaxis does not import the reference, so the file has the answer.
The reference's code is parsed and not run, except for its configuration classes, which give the defaults.
tests/config/test_reference.py fails where the file and the installed transformers differ.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, model_type_to_module_name
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from jaxis.models.registry import built_in_models
from jaxis.pooling.encoders import encoder_classes

DATA = Path(__file__).resolve().parent.parent / "src" / "jaxis" / "config" / "reference_keys.json"
_TRANSFORMERS = Path(transformers.__file__).parent
# Code that every family's forward pass goes through.
_SHARED = ("cache_utils.py", "masking_utils.py", "modeling_rope_utils.py")
# Keys that the code for all families reads from keyword arguments of the configuration class.
_SHARED_KEYS = frozenset({"rope_scaling", "rope_theta", "partial_rotary_factor", "per_layer_config"})
# Architectures that the reference has as the text of a multimodal model, or under another name -> the model type.
_TEXT_PARTS = {"Step3p5ForCausalLM": "step3p5", "ExaoneForCausalLM": "exaone"}
# Fields and methods that every configuration class has.
_BASE = (frozenset(dir(transformers.PreTrainedConfig)) - _SHARED_KEYS) | {
    field.name for field in dataclasses.fields(transformers.PreTrainedConfig)
}


def reference_keys() -> dict[str, Any]:
    """The content of the file.

    Returns:
      "transformers": the version read. "architectures": model type -> the classes of its checkpoints that jaxis has.
      "keys": model type -> key -> the value that the reference assumes without the key; null if none, if it follows
      from other keys, or if each layer may have its own. "aliases": model type -> another name of a key -> the key.
      "nulls": model type -> the keys with a default for which null is no value: the configuration class keeps it,
      instead of refusing it or computing a value.
      "other_keys": keys that only other language models read.
    """
    shared = {key for name in _SHARED for key in _keys_read_by_model(_TRANSFORMERS / name)} | _SHARED_KEYS
    architectures = _architectures()
    keys = {model_type: _keys_of(model_type, shared) for model_type in architectures}
    aliases = {model_type: dict(sorted(CONFIG_MAPPING[model_type].attribute_map.items())) for model_type in keys}
    every = {key for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES for key in _keys_of(model_type, set())}
    return {
        "transformers": transformers.__version__,
        "architectures": architectures,
        "keys": keys,
        "aliases": {model_type: of_type for model_type, of_type in aliases.items() if of_type},
        "nulls": {model_type: nulls for model_type in keys if (nulls := _nulls_of(model_type, keys[model_type]))},
        "other_keys": sorted(every),
    }


def _architectures() -> dict[str, list[str]]:
    """Model type -> the architectures that jaxis has of it; only where the reference has both in one folder."""
    found: dict[str, list[str]] = {}
    generate = (
        *(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
        MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )
    for architecture in sorted((*built_in_models(), *encoder_classes())):
        for names in generate if architecture in built_in_models() else (MODEL_MAPPING_NAMES,):
            for model_type, classes in names.items():
                is_named = architecture in ([classes] if isinstance(classes, str) else classes)
                if is_named and _defines(_folder(model_type), architecture):
                    found.setdefault(model_type, [])
                    if architecture not in found[model_type]:
                        found[model_type].append(architecture)
        if architecture in _TEXT_PARTS:
            found[_TEXT_PARTS[architecture]] = [architecture]
    return dict(sorted(found.items()))


def _keys_of(model_type: str, shared: set[str]) -> dict[str, Any]:
    """Key -> default, of everything that the model type's configuration class or its folder's model code reads."""
    folder, config_class = _folder(model_type), CONFIG_MAPPING[model_type]
    keys = set(shared) | set(config_class.attribute_map)
    for path in sorted(folder.glob("modeling_*.py")):
        keys |= set(_keys_read_by_model(path))
    for path in sorted(folder.glob("configuration_*.py")):
        keys |= set(_keys_read_by_config(path, config_class.__name__))
    defaults = {field.name: _default(field) for field in dataclasses.fields(config_class)}
    keys |= set(defaults)
    private = {key for key in keys if key.startswith("_") and key not in defaults}
    return {key: defaults.get(key) for key in sorted(keys - private - _BASE)}


def _nulls_of(model_type: str, defaults: dict[str, Any]) -> list[str]:
    """The keys with a default that is not "off" for which the configuration class keeps null."""
    config_class = CONFIG_MAPPING[model_type]

    def keeps(key: str) -> bool:
        # Some classes need other keys with null, such as the kinds of layers, which files with null have.
        for others in ({}, {"layer_types": ["full_attention"] * (defaults.get("num_hidden_layers") or 0)}):
            with contextlib.suppress(Exception):  # it is refused, each class in its own way
                return getattr(config_class.from_dict({key: None, **others}), key) is None
        return False

    named = {field.name for field in dataclasses.fields(config_class)}
    return sorted(key for key, value in defaults.items() if value and key in named and keeps(key))


def _keys_read_by_model(path: Path) -> Iterator[str]:
    """Every `config.key`, `self.config.key`, `text_config.key` ... and `getattr(config, "key")` of a file."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Attribute) and _is_config(node.value):
            yield node.attr
        elif isinstance(node, ast.Call):
            yield from _dynamic_key(node, _is_config)


def _keys_read_by_config(path: Path, class_name: str) -> Iterator[str]:
    """Every `self.key`, `getattr(self, "key")` and `kwargs.pop("key")` of a configuration class and its bases here."""
    classes = {node.name: node for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.ClassDef)}
    pending = [class_name]
    while pending:
        if (definition := classes.get(pending.pop())) is None:
            continue
        pending += [base.id for base in definition.bases if isinstance(base, ast.Name)]
        methods = {node.name for node in definition.body if isinstance(node, ast.FunctionDef)}
        for node in ast.walk(definition):
            if isinstance(node, ast.Attribute) and _is_self(node.value):
                yield from {node.attr} - methods
            elif isinstance(node, ast.Call):
                yield from _dynamic_key(node, _is_self)
                yield from _popped_key(node)


def _dynamic_key(call: ast.Call, is_meant: Callable[[ast.expr], bool]) -> Iterator[str]:
    """The name in `getattr(x, "name")` or `hasattr(x, "name")`, if x is meant."""
    if _name_of(call.func) in ("getattr", "hasattr") and len(call.args) > 1 and is_meant(call.args[0]):
        yield from _text(call.args[1])


def _popped_key(call: ast.Call) -> Iterator[str]:
    """The name in `kwargs.pop("name")` or `kwargs.get("name")`."""
    is_read = isinstance(call.func, ast.Attribute) and call.func.attr in ("pop", "get")
    if is_read and _name_of(call.func.value) == "kwargs" and call.args:
        yield from _text(call.args[0])


def _is_config(node: ast.expr) -> bool:
    name = _name_of(node)
    return name == "config" or name.endswith("_config")


def _is_self(node: ast.expr) -> bool:
    return _name_of(node) == "self"


def _name_of(node: ast.expr) -> str:
    """The last name of `a`, `a.b`, ...; "" for anything else."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _text(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value


def _default(field: dataclasses.Field[Any]) -> Any:
    if "list[" in str(field.type) and isinstance(field.default, int):
        return None  # the number of all layers, each of which may have its own
    if field.default is not dataclasses.MISSING:
        value = field.default
    else:
        value = None if field.default_factory is dataclasses.MISSING else field.default_factory()
    try:
        return json.loads(json.dumps(value))
    except TypeError:
        return None


def _folder(model_type: str) -> Path:
    return _TRANSFORMERS / "models" / model_type_to_module_name(model_type)


def _defines(folder: Path, class_name: str) -> bool:
    return any(f"\nclass {class_name}(" in path.read_text("utf-8") for path in folder.glob("modeling_*.py"))


def main() -> int:
    """Writes the file, or checks it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="do not write; exit with 1 if the file is out of date")
    arguments = parser.parse_args()
    text = json.dumps(reference_keys(), indent=1) + "\n"
    if arguments.check:
        return int(not DATA.exists() or DATA.read_text("utf-8") != text)
    DATA.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
