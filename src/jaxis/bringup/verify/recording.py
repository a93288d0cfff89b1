"""Recorded inputs and outputs of modules, represented alike for jaxis and the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LOGITS = "compute_logits"
"""Name of the model's logits among its modules' calls."""


@dataclass(frozen=True)
class ChosenExperts:
    """The ids, int [T, k], and weights, float32 [T, k], of the experts that a router chose."""

    expert_ids: np.ndarray
    expert_weights: np.ndarray


@dataclass(frozen=True)
class Values:
    """The comparable arrays of a module's inputs or outputs: the first floating-point array, float32 [T, ...], and a
    routing.
    """

    hidden: np.ndarray | None = None
    routing: ChosenExperts | None = None

    @classmethod
    def of(cls, arrays: Sequence[np.ndarray]) -> Values:
        integers = [a for a in arrays if a.dtype.kind in "iu" and a.ndim == 2]
        floats = [a for a in arrays if a.dtype.kind == "f"]
        for ids in integers:
            for weights in floats:
                if weights.shape == ids.shape:
                    others = [a for a in floats if a is not weights]
                    return cls(others[0] if others else None, ChosenExperts(ids, weights))
        return cls(floats[0] if floats else None)

    def as_routing(self, num_chosen: int) -> Values:
        """Returns these values as a router's choice, if they are a weight [T, X] for each expert, most of them 0."""
        if self.routing is not None or self.hidden is None or self.hidden.ndim != 2:
            return self
        if not ((self.hidden != 0).sum(-1) == num_chosen).all():
            return self
        ids = np.argsort(-np.abs(self.hidden), axis=-1)[:, :num_chosen]
        return Values(None, ChosenExperts(ids, np.take_along_axis(self.hidden, ids, axis=-1)))


@dataclass(frozen=True)
class ModuleCall:
    """A module's inputs and outputs, and its class; of LOGITS, the model's class."""

    inputs: Values
    outputs: Values
    computed_by: type

    @property
    def is_of_torch(self) -> bool:
        return self.computed_by.__module__.startswith("torch.")


Recording = dict[str, ModuleCall]
"""`call_name` -> the call, in the order in which the calls ended."""


def call_name(module: str, number: int) -> str:
    """Names a module's call: its dotted name, from the second call on with the number, such as "norm#2"."""
    return module if number == 1 else f"{module}#{number}"


def module_of(call: str) -> str:
    return call.partition("#")[0]


def as_shape(expected: np.ndarray | None, shape: tuple[int, ...]) -> np.ndarray | None:
    """Returns the reference's array, [T, ...] or [heads, T, D], in the shape [T, ...] of jaxis's; None if they cannot
    match.
    """
    if expected is None or expected.size != np.prod(shape):
        return None
    if len(expected) != shape[0] and expected.ndim == 3:
        expected = expected.swapaxes(0, 1)
    return expected.reshape(shape) if len(expected) == shape[0] else None
