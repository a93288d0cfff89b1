"""The table of src/jaxis/models/architectures.json: the module of each architecture."""

from __future__ import annotations

import importlib
import json

import jaxis.models
from jaxis.models.common.family import Family
from tests.support.places import REPOSITORY

MODELS = REPOSITORY / "src" / "jaxis" / "models"


def table() -> str:
    """Returns the architectures that the files of the folder declare, as the file's text; imports all files."""
    modules = {
        name: path.stem
        for path in MODELS.glob("*.py")
        for family in vars(importlib.import_module(f"{jaxis.models.__name__}.{path.stem}")).values()
        if isinstance(family, Family)
        for name in family.architectures
    }
    return json.dumps(modules, indent=2, sort_keys=True) + "\n"
