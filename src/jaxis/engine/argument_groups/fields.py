"""All arguments of an engine, which the groups declare. Imports no JAX.

`python -m tools.engine_arguments` writes all other lists of arguments from here: the docstring of `EngineArgs`,
`EngineKwargs`, the fields of the configuration that arguments become, and tables of the documentation.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from jaxis.engine.argument_groups.adapters import AdapterArguments
from jaxis.engine.argument_groups.caches import CacheArguments
from jaxis.engine.argument_groups.devices import DeviceArguments
from jaxis.engine.argument_groups.info import ArgumentGroup, ArgumentInfo, argument
from jaxis.engine.argument_groups.kv_offloading import KVOffloadingArguments
from jaxis.engine.argument_groups.kv_sharing import KVSharingArguments
from jaxis.engine.argument_groups.loading import LoadingArguments
from jaxis.engine.argument_groups.speculation import SpeculationArguments
from jaxis.engine.argument_groups.vision import VisionArguments


@dataclass(frozen=True)
class EngineArgFields(
    # Fields of the last base class come first.
    KVSharingArguments,
    VisionArguments,
    SpeculationArguments,
    AdapterArguments,
    LoadingArguments,
    DeviceArguments,
    KVOffloadingArguments,
    CacheArguments,
):
    """Each argument's type, default, description and line of help. `EngineArgs` checks them."""

    additional_config: Mapping[str, Any] | None = argument(
        None,
        description='Rules in the format of vLLM\'s TPU backend: `{"quantization": {"qwix": {"rules": [...]}}}`.',
        metavar="JSON|FILE",
        help='Rules as \'{"quantization": {"qwix": {"rules": [...]}}}\', or a file with that.',
    )


GROUPS: tuple[type[ArgumentGroup], ...] = EngineArgFields.__bases__[::-1]
"""Groups in the order of their checks and of the documentation."""


@functools.cache
def argument_infos() -> Mapping[str, ArgumentInfo]:
    """Returns each argument's metadata by its name, in the order of the declaration."""
    return {argument.name: argument.metadata["info"] for argument in fields(EngineArgFields)}


@functools.cache
def argument_types() -> Mapping[str, Any]:
    """Returns each argument's type by its name."""
    return get_type_hints(EngineArgFields)
