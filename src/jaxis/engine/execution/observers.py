"""Observers of a model, which collect values while a program is traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from jaxis.layers.decoder_layer import LayerOutput
from jaxis.layers.routing import routers_observed_by
from jaxis.models.common.decoder import layers_are_inlined, layers_run_by, run_layer


@contextmanager
def _expert_choices() -> Iterator[Callable[[], jax.Array]]:
    """Collects the experts that the routers of a model called in the block choose.

    Yields a function that returns them after the call, uint16 [T, layers with experts, k].
    """
    collected: list[jax.Array] = []

    def run(*operands: Any) -> LayerOutput:
        output, choices = (_inline if layers_are_inlined() else _as_call)(*operands)
        collected.extend(choices)
        return output

    with layers_run_by(run):
        yield lambda: jnp.stack(collected, axis=1).astype(jnp.uint16)


def _with_choices(*operands: Any) -> tuple[LayerOutput, list[jax.Array]]:
    choices: list[jax.Array] = []
    with routers_observed_by(lambda _, __, expert_ids: choices.append(expert_ids)):
        output = run_layer(*operands)
    return output, choices


_as_call = jax.jit(_with_choices, static_argnums=0)
_inline = jax.jit(_with_choices, static_argnums=0, inline=True)


OBSERVERS: dict[str, Callable[[], AbstractContextManager[Callable[[], jax.Array]]]] = {"experts": _expert_choices}
"""Observers by name. Each observes the model called in its block, and yields a function for the values [T, ...]."""
