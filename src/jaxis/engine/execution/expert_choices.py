"""The experts that a model's routers choose, collected while a program is traced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

from jaxis.layers.decoder_layer import LayerOutput
from jaxis.layers.routing import routers_observed_by
from jaxis.models.common.decoder import layers_are_inlined, layers_run_by, run_layer


@contextmanager
def expert_choices() -> Iterator[list[jax.Array]]:
    """Collects the experts, i32 [T, k], that each router of the models called in the block chooses, in call order."""
    collected: list[jax.Array] = []

    def run(*operands: Any) -> LayerOutput:
        output, choices = (_inline if layers_are_inlined() else _as_call)(*operands)
        collected.extend(choices)
        return output

    with layers_run_by(run):
        yield collected


def _with_choices(*operands: Any) -> tuple[LayerOutput, list[jax.Array]]:
    choices: list[jax.Array] = []
    with routers_observed_by(lambda _, __, expert_ids: choices.append(expert_ids)):
        output = run_layer(*operands)
    return output, choices


_as_call = jax.jit(_with_choices, static_argnums=0)
_inline = jax.jit(_with_choices, static_argnums=0, inline=True)
