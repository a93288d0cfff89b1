"""Adds an adapter to a checkpoint's tensors as they are read: the model that is loaded has its weights changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxis.errors import CheckpointError, ConfigError
from jaxis.lora.adapter import Adapter, not_in_model, read_adapter
from jaxis.lora.expert_change import SQUARE, part_of_expert, stack_and_part

_FLOATS = ("float32", "float16", "bfloat16", "float64")
_HEAD, _EMBEDDINGS = "lm_head.weight", "embed_tokens.weight"


@dataclass(frozen=True)
class MergedAdapter:
    """Changes the tensors of a checkpoint by an adapter; see `jaxis.config.TensorChanges`.

    Each sum is computed in float32 and rounded to the tensor's type, as PEFT's `merge_and_unload` does; quantization
    follows.

    Attributes:
      path: The adapter's folder.
    """

    path: str | os.PathLike[str]

    def begin(self, name_here: Callable[[str], str]) -> _Merge:
        """Reads the adapter. Raises CheckpointError, ConfigError: see `read_adapter`."""
        return _Merge(read_adapter(self.path), name_here)


class _Merge:
    def __init__(self, adapter: Adapter, name_here: Callable[[str], str]) -> None:
        self._adapter = adapter
        self._name_here = name_here
        # Modules' and tensors' names as the model has them -> as the adapter has them.
        self._changes = {name_here(f"{module}.weight"): module for module in adapter.changes}
        self._replaced = {name_here(tensor): tensor for tensor in adapter.replaced}
        self._experts = {name_here(stack): stack for stack in adapter.experts}
        self._seen: set[str] = set()

    def changed(self, name: str, tensor: np.ndarray) -> np.ndarray:
        name = self._name_here(name)
        self._seen.add(name)
        if (theirs := self._replaced.get(name)) is not None:
            replacement = self._adapter.replaced[theirs]
            self._check(theirs, tensor, replacement.shape)
            tensor = replacement.astype(tensor.dtype)
        if (module := self._changes.get(name)) is not None:
            change = self._adapter.changes[module]
            self._check(module, tensor, change.weight_shape)
            tensor = change.merged(tensor).astype(tensor.dtype)
        return self._with_experts(name, tensor) if self._experts else tensor

    def _with_experts(self, name: str, tensor: np.ndarray) -> np.ndarray:
        """The tensor with what is added to it as a stack, or as a part of one."""
        part = stack_and_part(name)
        theirs = self._experts.get(name if part is None else part[0])
        if theirs is None:
            return tensor
        change = self._adapter.experts[theirs]
        if change.is_square:
            if part is None:  # [X, in, out] cannot be told from [X, out, in], either
                raise ConfigError(
                    f"{self._adapter.path}: {theirs!r} is square, so that its inputs cannot be told from its outputs: "
                    "change it by request (--enable-lora), or merge it with PEFT (merge_and_unload)"
                )
            if not change.has_inputs_first:
                raise ConfigError(f"{self._adapter.path}: {theirs!r} {SQUARE}")
        added = change.of_stack(tensor.shape) if part is None else part_of_expert(change, *part[1:])
        self._check(theirs, tensor, None if added is None else added.shape)
        assert added is not None  # checked above
        self._seen.add(name if part is None else part[0])
        return (tensor.astype(np.float32) + added).astype(tensor.dtype)

    def check_all_used(self) -> None:
        for name, theirs in {**self._replaced, **self._changes, **self._experts}.items():
            if name not in self._seen:
                raise not_in_model(self._adapter, theirs)
        if _is_tied(self._seen) and (changed := self._changed_embedding()) is not None:
            raise ConfigError(
                f"{self._adapter.path} changes {changed!r}, whose weight is also the model's head, which PEFT leaves "
                "as it is: this cannot be merged"
            )

    def _changed_embedding(self) -> str | None:
        for name, module in self._changes.items():
            if name.endswith(_EMBEDDINGS):
                return module
        return None

    def _check(self, theirs: str, tensor: np.ndarray, shape: tuple[int, ...] | None) -> None:
        if tensor.dtype.name not in _FLOATS:
            raise ConfigError(
                f"{self._adapter.path} changes {theirs!r}, whose weight the checkpoint has as {tensor.dtype.name}: an "
                "adapter is merged into a checkpoint in floats, which may then be quantized"
            )
        if shape is None or tuple(tensor.shape) != tuple(shape):
            expected = "another shape" if shape is None else f"shape {list(shape)}"
            raise CheckpointError(
                f"{self._adapter.path}: {theirs!r} is for a weight of {expected}, but the checkpoint's has "
                f"{list(tensor.shape)}: the adapter was trained on another model"
            )


def _is_tied(seen: set[str]) -> bool:
    return not any(name.endswith(_HEAD) for name in seen)
