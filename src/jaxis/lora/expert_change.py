"""An adapter's changes of experts' stacked weights (PEFT's `target_parameters`), or of the matrices in files.

transformers stores the experts of a layer in two parameters: `gate_up_proj`, with the gates' rows before the ups', and
`down_proj`. PEFT has an adapter of each. Checkpoints have these parameters, or the matrices of each expert.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from jaxis.layers.experts import PROJECTION_NAMES

STACKS = ("gate_up_proj", "down_proj")
"""The parameters in transformers' order. PEFT nests the tensors of the first inside those of the second."""
SQUARE = (
    "is square, so that its inputs cannot be told from its outputs unless PEFT 0.19 or a later one saved it: save it "
    "again with one, or merge it with PEFT (merge_and_unload)"
)
_MATRICES = {alias: matrix for matrix, aliases in PROJECTION_NAMES.items() for alias in aliases}
_MATRIX = re.compile(rf"(?P<experts>.+\.experts)\.(?P<expert>\d+)\.(?P<matrix>{'|'.join(_MATRICES)})\.weight")


@dataclass(frozen=True)
class ExpertChange:
    """The change scale * B A of each of X experts.

    Attributes:
      a: [X, r, in].
      b: [X, out, r].
      scale: alpha / r, or with rsLoRA alpha / sqrt(r).
      has_inputs_first: True if A always belongs to the inputs; see `AdapterConfig`.
    """

    a: np.ndarray
    b: np.ndarray
    scale: float
    has_inputs_first: bool

    @classmethod
    def of(cls, a: np.ndarray, b: np.ndarray, rank: int, scale: float, *, has_inputs_first: bool) -> ExpertChange:
        """Converts PEFT's matrices A [X r, in] and B [out, r X].

        The rows of A are ordered by expert first, the columns of B by rank first. Other arguments are attributes.
        """
        stacked_b = np.moveaxis(b.reshape(len(b), rank, -1), 2, 0)
        return cls(a.reshape(-1, rank, a.shape[1]), stacked_b, scale, has_inputs_first)

    @property
    def is_square(self) -> bool:
        return self.b.shape[1] == self.a.shape[2]

    def of_expert(self, expert: int) -> np.ndarray:
        """Returns the change of an expert's matrix: float32 [out, in]."""
        return np.float32(self.scale) * (self.b[expert].astype(np.float32) @ self.a[expert].astype(np.float32))

    def of_stack(self, shape: tuple[int, ...]) -> np.ndarray | None:
        """Returns the change of a stack of shape [X, out, in] or [X, in, out]; None if the shape is another."""
        own = (len(self.a), self.b.shape[1], self.a.shape[2])
        if shape not in (own, (own[0], own[2], own[1])):
            return None
        added = np.stack([self.of_expert(expert) for expert in range(own[0])])
        return added if shape == own else added.swapaxes(1, 2)


def stack_and_part(name: str) -> tuple[str, int, str] | None:
    """Splits the name of one expert's matrix into stack, expert number and matrix; None for another tensor."""
    match = _MATRIX.fullmatch(name)
    if match is None:
        return None
    matrix = _MATRICES[match["matrix"]]
    stack = "down_proj" if matrix == "down_proj" else "gate_up_proj"
    return f"{match['experts']}.{stack}", int(match["expert"]), matrix


def part_of_expert(change: ExpertChange, expert: int, matrix: str) -> np.ndarray | None:
    if expert >= len(change.a):
        return None
    added = change.of_expert(expert)
    if matrix == "down_proj":
        return added
    gates, ups = np.split(added, 2) if len(added) % 2 == 0 else (None, None)
    return gates if matrix == "gate_proj" else ups
