"""Conversion of tensors from GGUF names and forms to those of Hugging Face checkpoints.

Names are llama.cpp's (`gguf-py/gguf/tensor_mapping.py`); changes undo those of its converters (`conversion/*.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from jaxis.errors import CheckpointError
from jaxis.loading.gguf.container import GGUFTensor
from jaxis.loading.gguf.stored_part import Sizes, StoredPart
from jaxis.loading.gguf.tensor_names import OF_EACH, OF_EACH_HEAD, OF_TABLE, GGUFNames

ROPE_FREQS = "rope_freqs.weight"
ROPE_FACTORS_LONG, ROPE_FACTORS_SHORT = "rope_factors_long.weight", "rope_factors_short.weight"

_NAME = re.compile(
    r"(?:blk\.(?P<layer>\d+)\.)?(?P<base>(?:shortconv\.|nextn\.|indexer\.|hrm\.)?[a-z0-9_]+)(?:\.(?P<suffix>weight|bias|scale|input_scale))?"
)
_OF_EXPERTS = re.compile(r"ffn_(gate|up|down|gate_up)_exps")
# The config is made of the first, of the model or of a layer; the others repeat what it says.
_NOT_WEIGHTS = {"rope_freqs", "attn_rot_embd", "rope_factors_long", "rope_factors_short"}
# Small tensors that the file has in another form -> what restores them.
_RESTORED: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    # -exp(A_log), or exp(A_log) in Ling 3's; of Mamba2, and of D, with one column.
    "ssm_a": lambda a: np.log(np.abs(a.astype(np.float32))).reshape(-1 if a.shape[-1] == 1 else a.shape),
    "ssm_d": lambda d: d.reshape(-1),
    "ssm_norm": lambda weight: weight.reshape(-1),  # by groups
    "ssm_conv1d": lambda weight: weight[:, None],
    **dict.fromkeys(
        ("ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v"), lambda weight: weight.reshape(-1, 1, weight.shape[-1])
    ),
    **dict.fromkeys(
        ("ffn_gate_inp_shexp", "attn_res_score", "ffn_res_score", "output_res_score"),
        lambda weight: weight.reshape(1, -1),
    ),
    "ple_conv1d": lambda weight: weight[:, None],
    "shortconv.conv": lambda weight: weight[:, None] if weight.ndim == 2 else weight,
}
# Ends the name of a tensor of which the file has some rows only.
_PIECE = re.compile(r"\[(\d)\]$")


def parts_of(tensor: GGUFTensor, names: GGUFNames, sizes: Sizes) -> list[StoredPart]:
    """Returns the Hugging Face tensors that one of the file becomes; empty if the model's logits do not need it.

    Raises CheckpointError if the architecture has no such tensor.
    """
    return list(_Parts(tensor, names, sizes).parts())


class _Parts:
    def __init__(self, tensor: GGUFTensor, names: GGUFNames, sizes: Sizes) -> None:
        match = _NAME.fullmatch(tensor.name)
        if match is None:
            raise _unknown(tensor)
        self._tensor, self._names, self._sizes = tensor, names, sizes
        self._layer, self._base, self._suffix = match["layer"], match["base"], match["suffix"]

    def parts(self) -> Iterator[StoredPart]:
        # An input's scale is for engines that quantize activations to fp4.
        if self._base in _NOT_WEIGHTS or self._suffix == "input_scale":
            return
        if self._layer is None:
            yield from self._of_top_level()
        elif int(self._layer) < self._sizes.num_layers:  # prediction layers follow the model's own
            yield from self._of_block()

    def _part(self, name: str, index: tuple[int | slice, ...] = (), **changes: Any) -> StoredPart:
        """Returns a part by its name here, which has no suffix unless it ends in "="; `changes` are its fields."""
        whole = name[:-1] if name.endswith("=") else f"{name}.{self._suffix}"
        return StoredPart(self._names.in_checkpoint(whole), index, **changes)

    def _of_top_level(self) -> Iterator[StoredPart]:
        name = self._names.of_top_level.get(self._base)
        if name is None:
            raise _unknown(self._tensor)
        if OF_EACH in name:
            for i in range(self._tensor.shape[0]):
                yield self._part(name.replace(OF_EACH, str(i)), (i,))
        else:
            name = name.replace(OF_TABLE, str(self._sizes.table_layer))
            yield self._part(name, has_one_added=self._has_one_added, restore=_RESTORED.get(self._base))

    def _of_block(self) -> Iterator[StoredPart]:
        base, block, prefix = self._base, self._names.of_block, f"model.layers.{self._layer}."
        if (whole := block.get(f"{base}.{self._suffix}")) is not None:
            yield self._part(prefix + whole)
        elif match := _OF_EXPERTS.fullmatch(base):
            yield from self._of_experts(prefix + self._names.experts, match[1])
        elif self._sizes.packed_delta_heads is not None and (rows := self._sizes.packed_delta_heads.rows_of(base)):
            for name, of_name in rows.items():
                yield self._part(f"{prefix}linear_attn.{name}", rows=of_name)
        elif base == "attn_qkv" and base not in block:
            yield from self._of_qkv(prefix)
        elif base not in block:
            raise _unknown(self._tensor)
        elif block[base].endswith(OF_EACH_HEAD):
            for head in range(self._tensor.shape[0]):
                yield self._part(f"{prefix}{block[base].removesuffix(OF_EACH_HEAD)}.{head}", (head,))
        else:
            yield self._changed_part(prefix + block[base])

    def _changed_part(self, name: str) -> StoredPart:
        """Returns the checkpoint's tensor, or the rows of it, that the name here stands for."""
        names, sizes, base = self._names, self._sizes, self._base
        match = _PIECE.search(name)
        if self._suffix == "scale":
            if match is not None:
                raise CheckpointError(
                    f"tensor {self._tensor.name!r} is the scale of a part of a tensor, which is not supported"
                )
            return self._part(name, restore=_RESTORED.get(base))
        heads = {"attn_q": sizes.num_heads, "attn_k": sizes.num_kv_heads}.get(base, 0)
        delta = sizes.delta_heads
        return self._part(
            name if match is None else name[: match.start()],
            rope_heads=heads if names.permutes_rope else 0,
            has_one_added=self._has_one_added,
            rows=_rows_by_group(sizes) if names.groups_qkv and base == "attn_qkv" else delta and delta.rows_of(base),
            columns=delta and delta.columns_of(base),
            restore=_RESTORED.get(base) if self._suffix != "bias" else None,
            piece=0 if match is None else int(match[1]),
        )

    @property
    def _has_one_added(self) -> bool:
        is_norm = "_norm" in self._base and self._base != "ssm_norm" and self._suffix == "weight"
        return self._names.adds_one_to_norms and is_norm

    def _of_qkv(self, prefix: str) -> Iterator[StoredPart]:
        """Yields the projections of queries, keys and values, which the file has one below the other."""
        sizes, first = self._sizes, 0
        for each, heads in (("q", sizes.num_heads), ("k", sizes.num_kv_heads), ("v", sizes.num_kv_heads)):
            rows = slice(first, first + heads * sizes.head_dim)
            first = rows.stop
            rope_heads = heads if self._names.permutes_rope and each != "v" else 0
            is_scale = self._suffix == "scale"
            name = f"{prefix}self_attn.{each}_proj"
            yield self._part(name) if is_scale else self._part(name, (rows,), rope_heads=rope_heads)

    def _of_experts(self, prefix: str, kind: str) -> Iterator[StoredPart]:
        tensor = self._tensor
        if tensor.shape[:1] != (self._sizes.num_experts,):
            raise CheckpointError(
                f"tensor {tensor.name!r} {list(tensor.shape)} is not of the {self._sizes.num_experts} experts of the "
                "model"
            )
        half = tensor.shape[1] // 2 if len(tensor.shape) > 1 and kind == "gate_up" else 0
        rows = {"gate": slice(half), "up": slice(half, 2 * half)}
        gate, up, down = self._names.projections
        names = {"gate": gate, "up": up, "down": down}
        for expert in range(self._sizes.num_experts):
            for each in kind.split("_"):
                yield self._part(f"{prefix}.{expert}.{names[each]}", (expert, rows[each]) if half else (expert,))


def _rows_by_group(sizes: Sizes) -> np.ndarray:
    """Returns the file's rows of packed projections in the checkpoint's order: query, key, value by group."""
    q, k = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    parts = np.split(np.arange(q + 2 * k), [q, q + k])
    return np.concatenate([part.reshape(sizes.num_kv_heads, -1) for part in parts], axis=1).ravel()


def _unknown(tensor: GGUFTensor) -> CheckpointError:
    return CheckpointError(
        f"tensor {tensor.name!r} {list(tensor.shape)} is not one that jaxis knows in this architecture: "
        "use another file of the model, or the original checkpoint"
    )
