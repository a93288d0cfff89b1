"""LAuReL: the learned augmented residual layer of a low rank (arXiv:2411.07501)."""

from __future__ import annotations

import jax

from jaxis.layers.leaves import linear, rms_norm
from jaxis.layers.module import JaxModule
from jaxis.layers.scope import LayerScope


class Laurel(JaxModule):
    """Computes `x + norm(linear_right(linear_left(x)))` of x [T, E], with `rank` features between the two."""

    def __init__(self, scope: LayerScope, rank: int) -> None:
        size: int = scope.config["hidden_size"]
        self.linear_left = linear(scope / "linear_left", size, rank, axes=(None, "embed"))
        self.linear_right = linear(scope / "linear_right", rank, size, axes=("embed", None))
        self.post_laurel_norm = rms_norm(scope)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.post_laurel_norm(self.linear_right(self.linear_left(x)))
