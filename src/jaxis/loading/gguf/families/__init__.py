"""The GGUF files of all families: each file here declares some in `GGUFS`.

Those that are much like Llama's are declared with their models, as `PlainGGUF`. `plain.json` has these declarations, so
that a header is read without JAX; `python -m tools.supported_models` writes it.
"""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from jaxis.loading.gguf.common_facts import BASE, DENSE, LAYER_NORM, RMS
from jaxis.loading.gguf.rope_keys import rope
from jaxis.loading.gguf.table import GGUF, Fact, constant, has
from jaxis.loading.gguf.tensor_names import GGUFNames


def _plain(model_type: str, model_class: str, declared: dict[str, Any]) -> GGUF:
    """Returns the declaration that a `PlainGGUF`, as a dict, stands for."""
    return GGUF(
        (declared["architecture"], model_type, model_class),
        (
            [BASE, DENSE, LAYER_NORM if declared["has_layer_norms"] else RMS, rope(declared["theta"])],
            [has(name, *tensors) for name, tensors in declared["switches"].items()],
            [constant(name, value) for name, value in declared["constants"].items()],
            [_quirk(place) for place in declared["quirks"]],
        ),
        GGUFNames(declared["tensors"], permutes_rope=declared["permutes_rope"]),
    )


def _quirk(place: str) -> Fact:
    """Returns the fact of a family's own function, `module:name`, as entry points are written."""
    module, _, name = place.partition(":")
    return Fact(lambda reader: dict(getattr(import_module(module), name)(reader)))


_DECLARED: tuple[GGUF, ...] = (
    *(
        declared
        for module in pkgutil.iter_modules(__path__)
        for declared in import_module(f"{__name__}.{module.name}").GGUFS
    ),
    *(_plain(*row) for row in json.loads(Path(__file__).with_name("plain.json").read_text("utf-8"))),
)

READ: Mapping[str, tuple[GGUF, ...]] = {
    architecture: tuple(declared for declared in _DECLARED if declared.model[0] == architecture)
    for architecture in dict.fromkeys(declared.model[0] for declared in _DECLARED)
}
"""Declarations by `general.architecture`, in the order in which their `when` is asked."""

WRITTEN: Mapping[str, GGUF] = {declared.model[1]: declared for declared in _DECLARED if declared.written is not None}
"""Declarations by `model_type`."""
