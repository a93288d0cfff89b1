"""Observers of a model, which collect values while a program is traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxis.layers.decoder_layer import LayerOutput
from jaxis.models.common.decoder import layers_are_inlined, run_layer


class LayerObserver(Protocol):
    """Runner of a model's layers, which collects values of them."""

    def __call__(self, *operands: Any) -> LayerOutput: ...

    def values(self) -> jax.Array:
        """Returns what was collected, [T, ...]."""
        ...


class _ExpertChoices:
    """Collects the experts that routers choose: uint16 [T, layers with experts, k]."""

    def __init__(self) -> None:
        self._collected: list[jax.Array] = []

    def __call__(self, *operands: Any) -> LayerOutput:
        output, choices = (_inline if layers_are_inlined() else _as_call)(*operands)
        self._collected.extend(choices)
        return output

    def values(self) -> jax.Array:
        return jnp.stack(self._collected, axis=1).astype(jnp.uint16)


def _with_choices(*operands: Any) -> tuple[LayerOutput, list[jax.Array]]:
    choices: list[jax.Array] = []
    return run_layer(*operands, observe=lambda _, __, expert_ids: choices.append(expert_ids)), choices


_as_call = jax.jit(_with_choices, static_argnums=0)
_inline = jax.jit(_with_choices, static_argnums=0, inline=True)


OBSERVERS: dict[str, Callable[[], LayerObserver]] = {"experts": _ExpertChoices}
"""Observers by name, each made anew for a call of the model."""
