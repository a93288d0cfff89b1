"""Conversion of tensors from GGUF names and forms to those of Hugging Face checkpoints.

Names are llama.cpp's (`gguf-py/gguf/tensor_mapping.py`); changes undo those of its converters (`conversion/*.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from jaxis.errors import CheckpointError
from jaxis.loading.gguf.container import GGUFTensor
from jaxis.loading.gguf.stored_part import Sizes, StoredPart
from jaxis.loading.gguf.tensor_names import OF_EACH, OF_EACH_HEAD, GGUFNames

ROPE_FREQS = "rope_freqs.weight"
ROPE_FACTORS_LONG, ROPE_FACTORS_SHORT = "rope_factors_long.weight", "rope_factors_short.weight"

_OF_BLOCK = re.compile(r"blk\.(\d+)\.((?:shortconv\.|nextn\.)?[a-z0-9_]+)(?:\.(weight|bias|scale|input_scale))?")
_OF_EXPERTS = re.compile(r"ffn_(gate|up|down|gate_up)_exps")
# The config is made of the first; the others repeat what it says.
_NOT_WEIGHTS = {ROPE_FREQS, ROPE_FACTORS_LONG, ROPE_FACTORS_SHORT}
# Small tensors that the file has in another form -> what restores them.
_RESTORED: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    # -exp(A_log); of Mamba2, and of D, with one column.
    "ssm_a": lambda a: np.log(-a.astype(np.float32)).reshape(a.shape[:1] if a.shape[-1] == 1 else a.shape),
    "ssm_d": lambda d: d.reshape(-1),
    "ssm_norm": lambda weight: weight.reshape(-1),  # by groups
    "ssm_conv1d": lambda weight: weight[:, None],
    "shortconv.conv": lambda weight: weight[:, None] if weight.ndim == 2 else weight,
    "ffn_gate_inp_shexp": lambda weight: weight.reshape(1, -1),
}
# Ends the name of a tensor of which the file has some rows only.
_PIECE = re.compile(r"\[(\d)\]$")
_NOT_WEIGHTS_OF_BLOCKS = {"rope_freqs", "attn_rot_embd", "rope_factors_long", "rope_factors_short"}


def parts_of(tensor: GGUFTensor, names: GGUFNames, sizes: Sizes) -> list[StoredPart]:
    """Returns the Hugging Face tensors that one of the file becomes; empty if the model's logits do not need it.

    Raises CheckpointError if the architecture has no such tensor.
    """
    top_level = {
        "token_embd.weight": StoredPart("model.embed_tokens.weight"),
        "output_norm.weight": StoredPart(f"{names.norm}.weight", has_one_added=names.adds_one_to_norms),
        "output_norm.bias": StoredPart(f"{names.norm}.bias"),
        "token_embd_norm.weight": StoredPart(f"{names.norm}.weight"),  # LFM2's, despite its name
        "output.weight": StoredPart("lm_head.weight"),
        "output.bias": StoredPart("lm_head.bias"),
        "output.scale": StoredPart("lm_head.scale"),
    }
    base, _, suffix = tensor.name.rpartition(".")
    if base in names.top_level:
        target = names.top_level[base]
        if OF_EACH in target:
            return [StoredPart(f"{target.replace(OF_EACH, str(i))}.{suffix}", (i,)) for i in range(tensor.shape[0])]
        return [StoredPart(f"{target}.{suffix}")]
    if tensor.name in top_level:
        return [top_level[tensor.name]]
    match = _OF_BLOCK.fullmatch(tensor.name)
    if tensor.name in _NOT_WEIGHTS or tensor.name == "output.input_scale":
        return []
    if match is None:
        raise _unknown(tensor)
    layer, base, suffix = int(match[1]), match[2], match[3]
    # Prediction layers follow the model's own. An input's scale is for engines that quantize activations to fp4.
    if layer >= sizes.num_layers or base in _NOT_WEIGHTS_OF_BLOCKS or suffix == "input_scale":
        return []
    return _parts_of_block(tensor, f"{names.layers}.{layer}.", base, suffix, names, sizes)


def _parts_of_block(
    tensor: GGUFTensor, prefix: str, base: str, suffix: str, names: GGUFNames, sizes: Sizes
) -> list[StoredPart]:
    if (whole := names.block.get(f"{base}.{suffix}")) is not None:
        return [StoredPart(prefix + whole.removesuffix("="))]
    if experts := _OF_EXPERTS.fullmatch(base):
        if tensor.shape[:1] != (sizes.num_experts,):
            raise CheckpointError(
                f"tensor {tensor.name!r} {list(tensor.shape)} is not of the {sizes.num_experts} experts of the model"
            )
        return list(_parts_of_experts(tensor, prefix + names.experts, experts[1], suffix, names.projections))
    if sizes.packed_delta_heads is not None and (packed := sizes.packed_delta_heads.rows_of(base)):
        return [StoredPart(f"{prefix}linear_attn.{name}.{suffix}", rows=rows) for name, rows in packed.items()]
    if base == "attn_qkv" and base not in names.block:
        return list(_parts_of_qkv(prefix, suffix, names, sizes))
    if base not in names.block:
        raise _unknown(tensor)
    target = names.block[base]
    if target.endswith(OF_EACH_HEAD):
        target = prefix + target.removesuffix(OF_EACH_HEAD)
        return [StoredPart(f"{target}.{head}.{suffix}", (head,)) for head in range(tensor.shape[0])]
    return [_named_part(tensor, prefix, target, base, suffix, names, sizes)]


def _named_part(
    tensor: GGUFTensor, prefix: str, target: str, base: str, suffix: str, names: GGUFNames, sizes: Sizes
) -> StoredPart:
    """Returns the checkpoint's tensor, or the rows of it, that `target` of `GGUFNames.block` names."""
    piece = 0
    if match := _PIECE.search(target):
        if suffix == "scale":
            raise CheckpointError(f"tensor {tensor.name!r} is the scale of a part of a tensor, which is not supported")
        target, piece = target[: match.start()], int(match[1])
    name = prefix + (target[:-1] if target.endswith("=") else f"{target}.{suffix}")
    heads = {"attn_q": sizes.num_heads, "attn_k": sizes.num_kv_heads}.get(base, 0)
    permutes = names.permutes_rope and suffix != "scale"
    delta_heads = None if suffix == "scale" else sizes.delta_heads
    rows = delta_heads and delta_heads.rows_of(base)
    if names.groups_qkv and base == "attn_qkv" and suffix != "scale":
        rows = _rows_by_group(sizes)
    return StoredPart(
        name,
        rope_heads=heads if permutes else 0,
        has_one_added=names.adds_one_to_norms and f"{base}.{suffix}".endswith("_norm.weight") and base != "ssm_norm",
        rows=rows,
        columns=delta_heads and delta_heads.columns_of(base),
        restore=_RESTORED.get(base) if suffix != "bias" else None,
        piece=piece,
    )


def _rows_by_group(sizes: Sizes) -> np.ndarray:
    """Returns the file's rows of packed projections in the checkpoint's order: query, key, value by group."""
    q, k = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    parts = np.split(np.arange(q + 2 * k), [q, q + k])
    return np.concatenate([part.reshape(sizes.num_kv_heads, -1) for part in parts], axis=1).ravel()


def _parts_of_qkv(prefix: str, suffix: str, names: GGUFNames, sizes: Sizes) -> Iterator[StoredPart]:
    """Yields the projections of queries, keys and values, which the file has one below the other."""
    first = 0
    for each, heads in (("q", sizes.num_heads), ("k", sizes.num_kv_heads), ("v", sizes.num_kv_heads)):
        rows = slice(first, first + heads * sizes.head_dim)
        first = rows.stop
        name = f"{prefix}self_attn.{each}_proj.{suffix}"
        if suffix == "scale":
            yield StoredPart(name)
        else:
            yield StoredPart(name, (rows,), heads if names.permutes_rope and each != "v" else 0)


def _parts_of_experts(
    tensor: GGUFTensor, prefix: str, base: str, suffix: str, projections: tuple[str, str, str]
) -> Iterator[StoredPart]:
    gate, up, down = projections
    for expert in range(tensor.shape[0]):
        if base != "gate_up":
            projection = {"gate": gate, "up": up, "down": down}[base]
            yield StoredPart(f"{prefix}.{expert}.{projection}.{suffix}", (expert,))
            continue
        half = tensor.shape[1] // 2 if len(tensor.shape) > 1 else 0
        for projection, rows in ((gate, slice(half)), (up, slice(half, 2 * half))):
            yield StoredPart(
                f"{prefix}.{expert}.{projection}.{suffix}", (expert,) if suffix == "scale" else (expert, rows)
            )


def _unknown(tensor: GGUFTensor) -> CheckpointError:
    return CheckpointError(
        f"tensor {tensor.name!r} {list(tensor.shape)} is not one that jaxis knows in this architecture: "
        "use another file of the model, or the original checkpoint"
    )
