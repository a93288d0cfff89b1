"""The observer of the experts that routers choose, which collects them while a program is traced."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxis.layers.decoder_layer import LayerOutput
from jaxis.models.common.decoder import layers_are_inlined, run_layer


class Observer:
    """Collects the experts that the routers of a model's layers choose. A LayerObserver."""

    def __init__(self) -> None:
        self._collected: list[jax.Array] = []

    def __call__(self, *operands: Any) -> LayerOutput:
        output, choices = (_inline if layers_are_inlined() else _as_call)(*operands)
        self._collected.extend(choices)
        return output

    def values(self) -> jax.Array:
        """Returns uint16 [T, layers with experts, k]."""
        return jnp.stack(self._collected, axis=1).astype(jnp.uint16)


def _with_choices(*operands: Any) -> tuple[LayerOutput, list[jax.Array]]:
    choices: list[jax.Array] = []
    return run_layer(*operands, observe=lambda _, __, expert_ids: choices.append(expert_ids)), choices


_as_call = jax.jit(_with_choices, static_argnums=0)
_inline = jax.jit(_with_choices, static_argnums=0, inline=True)
