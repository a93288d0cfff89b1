from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxis.errors import CheckpointError, ConfigError
from jaxis.lora.adapter import Adapter, not_in_model, read_adapter
from jaxis.lora.expert_change import SQUARE, part_of_expert, stack_and_part
from jaxis.models.common.tables import EMBEDDINGS, HEAD

_FLOATS = ("float32", "float16", "bfloat16", "float64")


@dataclass(frozen=True)
class MergedAdapter:
    """Merges an adapter's folder into a checkpoint's tensors while they are read; see `jaxis.config.TensorChanges`.

    Each sum is computed in float32 and rounded to the tensor's type, as PEFT's `merge_and_unload` does; quantization
    follows.
    """

    path: str | os.PathLike[str]

    def begin(self, name_here: Callable[[str], str], *, is_tied: bool) -> _Merge:
        """Reads the adapter. Raises CheckpointError or ConfigError as `read_adapter` does."""
        return _Merge(read_adapter(self.path), name_here, is_tied=is_tied)

    def splits_tied(self, name_here: Callable[[str], str]) -> bool:
        """Returns whether the tables of a tied model differ after merging. Raises as `begin` does."""
        return self.begin(name_here, is_tied=True).splits


class _Merge:
    """Changer of one checkpoint's tensors; `splits` is True if the tables of a tied model differ afterwards.

    In a tied model, PEFT changes each of the two tables under its own name. Replaced rows of tokens are an exception:
    the head gets those of the embeddings.
    """

    def __init__(self, adapter: Adapter, name_here: Callable[[str], str], *, is_tied: bool) -> None:
        self._adapter = adapter
        self._name_here = name_here
        # Names in the model -> names in the adapter, for modules and tensors.
        self._changes = {name_here(f"{module}.weight"): module for module in adapter.changes}
        self._replaced = {name_here(tensor): tensor for tensor in adapter.replaced}
        self._tokens = {name_here(f"{module}.weight"): module for module in adapter.tokens}
        if is_tied and EMBEDDINGS in self._tokens:
            self._tokens.setdefault(HEAD, self._tokens[EMBEDDINGS])
        self.splits = is_tied and self._differs_in_tables()
        self._is_one_table = is_tied and not self.splits
        self._experts = {name_here(stack): stack for stack in adapter.experts}
        self._seen: set[str] = set()

    def changed(self, name: str, tensor: np.ndarray) -> np.ndarray:
        name = self._name_here(name)
        if self._is_one_table and name == HEAD:
            name = EMBEDDINGS
        self._seen.add(name)
        if (theirs := self._replaced.get(name)) is not None:
            replacement = self._adapter.replaced[theirs]
            self._check(theirs, tensor, replacement.shape)
            tensor = replacement.astype(tensor.dtype)
        if (module := self._changes.get(name)) is not None:
            change = self._adapter.changes[module]
            self._check(module, tensor, change.weight_shape)
            tensor = change.merged(tensor).astype(tensor.dtype)
        if (module := self._tokens.get(name)) is not None:
            tokens = self._adapter.tokens[module]
            vocab_size = max(*tokens.ids, len(tensor) - 1) + 1
            self._check(module, tensor, (vocab_size, tokens.rows.shape[1]))
            tensor = tokens.put_into(tensor)
        return self._with_experts(name, tensor) if self._experts else tensor

    def _with_experts(self, name: str, tensor: np.ndarray) -> np.ndarray:
        """Returns the tensor with its change as a stack of experts, or as a part of one."""
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
        for name, theirs in {**self._replaced, **self._changes, **self._tokens, **self._experts}.items():
            if name not in self._seen and not (self._is_one_table and name == HEAD):
                raise not_in_model(self._adapter, theirs)

    def _differs_in_tables(self) -> bool:
        """Returns whether the adapter makes two different tables of one tied table."""
        if self._changes.keys() & {EMBEDDINGS, HEAD}:
            return True
        if self._tokens.get(EMBEDDINGS) != self._tokens.get(HEAD):
            return True
        embeddings, head = (self._adapter.replaced.get(self._replaced.get(name, "")) for name in (EMBEDDINGS, HEAD))
        if embeddings is None or head is None:
            return embeddings is not head
        return not np.array_equal(embeddings, head)

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
