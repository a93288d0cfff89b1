"""The tables of what the families' files declare: the module of each architecture, keys, and GGUF files."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Iterator
from typing import Any

import jaxis.models
from jaxis.config.reference import model_types_of
from jaxis.models.common.family import Family, PlainGGUF
from jaxis.pooling.encoders import nomic_bert
from jaxis.pooling.encoders.bert import BertModel
from jaxis.pooling.encoders.nomic_bert import NomicBertModel
from tests.support.places import REPOSITORY

MODELS = REPOSITORY / "src" / "jaxis" / "models"


def table() -> str:
    """Returns the architectures that the files of the folder declare, as the file's text; imports all files."""
    modules = {name: module for module, family in _declared() for name in family.architectures}
    return json.dumps(modules, indent=2, sort_keys=True) + "\n"


def plain_ggufs() -> str:
    """Returns the plain GGUF files that the files of the folder declare, as the text of plain.json there."""
    rows = [
        (file.model_type or model_types_of(name)[0], name, dataclasses.asdict(file))
        for _, family in _declared()
        for name in (family.classes[0].__name__,)
        for file in family.gguf
        if isinstance(file, PlainGGUF)
    ]
    return (
        json.dumps(rows, indent=2, sort_keys=True, default=lambda quirk: f"{quirk.__module__}:{quirk.__name__}") + "\n"
    )


def renames() -> str:
    """Returns the renames of classes with GGUF files, from names here to those of checkpoints, as the file's text."""
    encoders = {"BertModel": BertModel, "NomicBertModel": NomicBertModel}
    classes: dict[str, Any] = dict(encoders)
    for _, family in _declared():
        classes |= family.architectures if family.gguf else {}
    found = {
        name: [(f".{here}.", f".{there}.") for there, here in reversed(classes[name].renames)]
        for name in sorted(classes)
    }
    for name in encoders:  # whose checkpoints have no module around the model
        found[name].append((".model.", "."))
    rows = (f"  {json.dumps(name)}: {json.dumps(pairs)}" for name, pairs in found.items() if pairs)
    return "{\n" + ",\n".join(rows) + "\n}\n"


def family_keys() -> str:
    """Returns what families and encoders declare of config.json's keys and types, as the text of family_keys.json."""
    names: dict[str, Any] = {**nomic_bert.CONFIG_NAMES}
    defaults: dict[str, Any] = {}
    same_code: dict[str, str] = {}
    for _, family in _declared():
        names.update(family.names)
        defaults.update(family.defaults)
        same_code.update(family.same_code)
    return json.dumps({"defaults": defaults, "names": names, "same_code": same_code}, indent=2, sort_keys=True) + "\n"


def _declared() -> Iterator[tuple[str, Family]]:
    """Yields (module, family) in the order of the modules."""
    for path in sorted(MODELS.glob("*.py")):
        for value in vars(importlib.import_module(f"{jaxis.models.__name__}.{path.stem}")).values():
            if isinstance(value, Family):
                yield path.stem, value
