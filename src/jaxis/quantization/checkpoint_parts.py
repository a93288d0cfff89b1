from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from jaxis.errors import CheckpointError
from jaxis.kernels.weights import WeightScheme
from jaxis.layers.checkpoint_names import checkpoint_names_of
from jaxis.layers.embed import JaxEmbed
from jaxis.layers.experts import STACK_AXES, JaxExperts
from jaxis.layers.linear import JaxLinear
from jaxis.layers.module import JaxModule
from jaxis.layers.ngram_embedding import NgramEmbedding
from jaxis.layers.weight_method import scheme_of_module


@dataclass(frozen=True)
class Part:
    """A matrix [out, in] to be quantized by a scheme.

    `module` is the dotted name in the quantized checkpoint; for an expert, `model.layers.0.mlp.experts.3.up_proj`.
    """

    module: str
    scheme: WeightScheme
    weight: np.ndarray


class CheckpointParts:
    """The modules with weight matrices in a model constructed abstractly, with quantization rules."""

    def __init__(self, model: JaxModule) -> None:
        names = checkpoint_names_of(model)
        self._known_as, self._value_here = names.name_in_checkpoint, names.value_here
        modules = dict(model.named_modules())
        self._layers = {name: m for name, m in modules.items() if isinstance(m, JaxLinear | JaxEmbed)}
        self._experts = {name: m for name, m in modules.items() if isinstance(m, JaxExperts)}
        # Tables of n-grams stay as they are; only loading can check them.
        self._tables = tuple(f"{name}." for name, m in modules.items() if isinstance(m, NgramEmbedding))
        self._parameters = [name for name, _ in model.named_parameters()]

    def of(self, name_in_file: str, name: str, tensor: np.ndarray) -> list[Part]:
        """Returns the matrices to quantize in a tensor of the checkpoint; empty if the tensor is kept as it is.

        `name_in_file` is the tensor's, `name` that of its parameter. Raises CheckpointError if it does not match the
        model.
        """
        module, _, leaf = name.rpartition(".")
        if leaf == "weight" and (scheme := scheme_of_module(self._layers.get(module))) is not None:
            if tensor.ndim != 2:
                raise CheckpointError(f"tensor {self._known_as(name)!r} has shape {list(tensor.shape)}, not [out, in]")
            return [Part(self._known_as(module), scheme, self._value_here(name_in_file, tensor))]
        prefix, experts = self._experts_of(name)
        if experts is None or (scheme := scheme_of_module(experts)) is None:
            return []
        parts = [part for part in experts.parts(name.removeprefix(f"{prefix}."), tensor) if part[0] in STACK_AXES]
        if tensor.ndim == 2:  # one expert's, which keeps its name in the file
            return [Part(self._known_as(module), scheme, weight) for _, _, weight in parts]
        return [Part(self._known_as(f"{prefix}.{expert}.{stack}"), scheme, weight) for stack, expert, weight in parts]

    def check(self, tensors: Iterable[tuple[str, np.ndarray]], model_name: str) -> None:
        """Checks that the tensors are those of the model. Raises CheckpointError if a tensor is unknown or missing."""
        expected = {filled: name for name in self._parameters for filled in self._entries(name)}
        for name, tensor in tensors:
            if name.startswith(self._tables):
                continue
            prefix, experts = self._experts_of(name)
            if experts is None:
                entries = [name]
            else:
                try:
                    parts = list(experts.parts(name.removeprefix(f"{prefix}."), tensor))
                except CheckpointError as error:
                    raise CheckpointError(f"tensor {self._known_as(name)!r} {error}") from None
                entries = [f"{prefix}.{stack} of expert {expert}" for stack, expert, _ in parts]
            for entry in entries:
                if expected.pop(entry, None) is None:
                    raise CheckpointError(f"tensor {self._known_as(name)!r} has no parameter in {model_name}")
        if expected:
            missing = self._known_as(min(expected))
            raise CheckpointError(f"the model's parameter {missing!r} is not in the checkpoint")

    def schemes(self) -> dict[str, tuple[str, WeightScheme | None]]:
        """Returns module name -> (PyTorch class, "Linear" or "Embedding"; scheme, or None).

        Experts are given as a regular expression for their names, marked by `re:`.
        """
        found: dict[str, tuple[str, WeightScheme | None]] = {}
        for name, layer in self._layers.items():
            found[self._known_as(name)] = (
                "Embedding" if isinstance(layer, JaxEmbed) else "Linear",
                scheme_of_module(layer),
            )
        for name, experts in self._experts.items():
            found[rf"re:{re.escape(self._known_as(name))}\.\d+\."] = ("Linear", scheme_of_module(experts))
        return found

    def _entries(self, parameter: str) -> list[str]:
        """Returns the parameter's name, or one for each of its experts."""
        _, experts = self._experts_of(parameter)
        return [parameter] if experts is None else [f"{parameter} of expert {e}" for e in range(experts.num_experts)]

    def _experts_of(self, name: str) -> tuple[str, JaxExperts | None]:
        for prefix, experts in self._experts.items():
            if name.startswith(f"{prefix}."):
                return prefix, experts
        return "", None
