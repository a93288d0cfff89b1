from __future__ import annotations

from dataclasses import dataclass

import jax

from jaxis.kernels.gates import gated


@dataclass(frozen=True)
class OutputGate:
    """Gate `activation(gate(x))` that multiplies attention's output before `o_proj`, where x is attention's input.

    Attributes:
      name: Name of the gate's matrix in the checkpoint. None: `q_proj` [2 H D, E] holds it, and of the 2 D rows of each
        head, the first D are the query's and the next D the gate's.
      per_head: True if the matrix is [H, E], with one factor per head; False if it is [H D, E].
      activation: Activation of the gate's logits; a key of `jaxis.kernels.gates.ACTIVATIONS`.

    Raises:
      ValueError: On construction, if the gate is per head and has no name.
    """

    name: str | None = None
    per_head: bool = False
    activation: str = "sigmoid"

    def __post_init__(self) -> None:
        if self.per_head and self.name is None:
            raise ValueError("a gate of whole heads needs a matrix of its own: give its name")

    @property
    def is_in_queries(self) -> bool:
        return self.name is None

    def __call__(self, out: jax.Array, logits: jax.Array) -> jax.Array:
        """Returns [T, H, D] in out's type, for out [T, H, D] and logits [T, H D], or [T, H] per head."""
        num_tokens = out.shape[0]
        return gated(out.reshape(num_tokens, -1), logits.reshape(num_tokens, -1), self.activation).reshape(out.shape)
