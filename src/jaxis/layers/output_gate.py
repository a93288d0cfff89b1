"""Gates on attention's output as data: where their logits come from, and how they become factors."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from jaxis.kernels.gates import gated


@dataclass(frozen=True)
class OutputGate:
    """Attention's output, before `o_proj`, is multiplied by `activation(gate(x))`, where x is attention's input.

    Attributes:
      name: What the checkpoint calls the gate's matrix. None: `q_proj` [2 H D, E] holds it, and of the 2 D rows of each
        head, the first D are the query's and the next D the gate's.
      per_head: Whether the matrix is [H, E] and the factors are the heads'; otherwise it is [H D, E].
      activation: Makes factors of the gate's logits; a key of `jaxis.kernels.gates.ACTIVATIONS`.
    """

    name: str | None = None
    per_head: bool = False
    activation: str = "sigmoid"

    def __post_init__(self) -> None:
        """Raises a ValueError for a combination that has no meaning."""
        if self.per_head and self.name is None:
            raise ValueError("a gate of whole heads needs a matrix of its own: give its name")

    @property
    def is_in_queries(self) -> bool:
        """Whether `q_proj` has the gate's rows, too."""
        return self.name is None

    def __call__(self, out: jax.Array, logits: jax.Array) -> jax.Array:
        """out [T, H, D] and logits [T, H D], or [T, H] per head -> [T, H, D] in out's type."""
        num_tokens = out.shape[0]
        return gated(out.reshape(num_tokens, -1), logits.reshape(num_tokens, -1), self.activation).reshape(out.shape)
