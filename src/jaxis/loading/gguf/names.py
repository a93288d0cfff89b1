"""From the names of a GGUF file's tensors to those of Hugging Face checkpoints, and what changes on the way.

The names are llama.cpp's (`gguf-py/gguf/tensor_mapping.py`), the changes those that its converters make
(`conversion/*.py`), undone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from jaxis.errors import CheckpointError
from jaxis.loading.gguf.container import GGUFTensor

ROPE_FREQS = "rope_freqs.weight"
ROPE_FACTORS_LONG, ROPE_FACTORS_SHORT = "rope_factors_long.weight", "rope_factors_short.weight"

_OF_BLOCK = re.compile(r"blk\.(\d+)\.([a-z0-9_]+)\.(weight|bias|scale|input_scale)")
_OF_EXPERTS = re.compile(r"ffn_(gate|up|down|gate_up)_exps")
# The config is made of the first; the others repeat what it says.
_NOT_WEIGHTS = {ROPE_FREQS, ROPE_FACTORS_LONG, ROPE_FACTORS_SHORT}
_NOT_WEIGHTS_OF_BLOCKS = {"rope_freqs", "attn_rot_embd", "rope_factors_long", "rope_factors_short"}


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model that names and changes depend on.

    Attributes:
      num_layers: Layers of the model itself, without prediction layers.
      num_heads: H.
      num_kv_heads: K.
      head_dim: D.
      num_experts: X; 0 without experts.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int = 0


@dataclass(frozen=True)
class StoredPart:
    """A tensor of the Hugging Face checkpoint, made of one in the file.

    Attributes:
      name: Its Hugging Face name.
      index: Which part of the stored array it is; empty means all of it.
      rope_heads: The heads in which rows that are rotated together are neighbours, in the file only; 0 means none.
      has_one_added: Whether the file's numbers have 1 added.
    """

    name: str
    index: tuple[int | slice, ...] = ()
    rope_heads: int = 0
    has_one_added: bool = False

    def made_of(self, stored: np.ndarray) -> np.ndarray:
        """The tensor, of the array in the file; a view of it where nothing changes.

        Raises:
          CheckpointError: The array does not have the heads that the model has.
        """
        array = stored[(*self.index, ...)]
        if self.rope_heads:
            if len(array) % (2 * self.rope_heads):
                raise CheckpointError(f"has {len(array)} rows, which are not {self.rope_heads} heads")
            # Per head, from [D / 2, 2] to [2, D / 2]. A row is a number, or the bytes of blocks.
            pairs = array.reshape(self.rope_heads, -1, 2, *array.shape[1:])
            array = pairs.swapaxes(1, 2).reshape(array.shape)
        return array.astype(np.float32) - np.float32(1) if self.has_one_added else array


@dataclass(frozen=True, kw_only=True)
class ArchitectureNames:
    """How an architecture's tensors are called in Hugging Face checkpoints.

    Attributes:
      block: Name in the file, without `blk.N.` and `.weight`, -> name in the layer. A value that ends in "=" is the
        whole name, without `.weight` or `.bias`.
      experts: Name in the layer of what holds the experts.
      projections: What an expert's gate, up and down projections are called.
      permutes_rope: Whether rows of queries and keys are stored so that rotated dimensions are neighbours.
      adds_one_to_norms: Whether the file's norms have the 1 added that the model adds.
    """

    block: Mapping[str, str]
    experts: str = "mlp.experts"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    permutes_rope: bool = False
    adds_one_to_norms: bool = False


_ATTENTION = {
    **{f"attn_{each}": f"self_attn.{each}_proj" for each in "qkv"},
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MLP = {f"ffn_{each}": f"mlp.{each}_proj" for each in ("gate", "up", "down")}
_ROUTER = {"ffn_gate_inp": "mlp.gate", "exp_probs_b": "mlp.gate.e_score_correction_bias="}
_SHARED_EXPERTS = {f"ffn_{each}_shexp": f"mlp.shared_experts.{each}_proj" for each in ("gate", "up", "down")}
_LLAMA = {**_ATTENTION, "ffn_norm": "post_attention_layernorm", **_MLP}
_GEMMA = {
    **_ATTENTION,
    **_HEAD_NORMS,
    **_MLP,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LATENT_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    # The two parts of kv_b_proj, the first transposed: `LatentHeadsFormat` joins them.
    "attn_k_b": "self_attn.kv_b_proj.k_b=",
    "attn_v_b": "self_attn.kv_b_proj.v_b=",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
_FEED_FORWARD = {name: target.replace("mlp.", "feed_forward.") for name, target in _MLP.items()}

# By `general.architecture`; "mixtral" is a llama with experts.
NAMES: Mapping[str, ArchitectureNames] = {
    "llama": ArchitectureNames(block=_LLAMA, permutes_rope=True),
    "mixtral": ArchitectureNames(
        block={**_LLAMA, "ffn_gate_inp": "block_sparse_moe.gate"},
        experts="block_sparse_moe.experts",
        projections=("w1", "w3", "w2"),
        permutes_rope=True,
    ),
    "granite": ArchitectureNames(block=_LLAMA, permutes_rope=True),
    "mistral3": ArchitectureNames(block=_LLAMA, permutes_rope=True),
    "qwen2": ArchitectureNames(block=_LLAMA),
    "qwen3": ArchitectureNames(block={**_LLAMA, **_HEAD_NORMS}),
    "qwen3moe": ArchitectureNames(block={**_LLAMA, **_HEAD_NORMS, **_ROUTER}),
    "phi3": ArchitectureNames(block={**_LLAMA, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
    "olmo2": ArchitectureNames(
        block={
            **_ATTENTION,
            **_HEAD_NORMS,
            **_MLP,
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        }
    ),
    "gpt-oss": ArchitectureNames(
        block={
            **_ATTENTION,
            "attn_sinks": "self_attn.sinks=",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router",
        }
    ),
    "starcoder2": ArchitectureNames(block={**_LLAMA, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
    "glm4": ArchitectureNames(
        block={
            **_ATTENTION,
            "post_attention_norm": "post_self_attn_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        }
    ),
    "glm4moe": ArchitectureNames(
        block={
            **_ATTENTION,
            **_HEAD_NORMS,
            **_MLP,
            **_ROUTER,
            **_SHARED_EXPERTS,
            "post_attention_norm": "post_attention_layernorm",
        }
    ),
    "gemma2": ArchitectureNames(block=_GEMMA, adds_one_to_norms=True),
    "gemma3": ArchitectureNames(block=_GEMMA, adds_one_to_norms=True),
    "command-r": ArchitectureNames(block={**_ATTENTION, **_HEAD_NORMS, **_MLP}),
    "cohere2": ArchitectureNames(block={**_ATTENTION, **_MLP}),
    "deepseek2": ArchitectureNames(block={**_LATENT_ATTENTION, **_MLP, **_ROUTER, **_SHARED_EXPERTS}),
    "llama4": ArchitectureNames(
        block={
            **_ATTENTION,
            **_FEED_FORWARD,
            "ffn_norm": "post_attention_layernorm",
            "ffn_gate_inp": "feed_forward.router",
            **{f"ffn_{each}_shexp": f"feed_forward.shared_expert.{each}_proj" for each in ("gate", "up", "down")},
        },
        experts="feed_forward.experts",
    ),
}


def parts_of(tensor: GGUFTensor, names: ArchitectureNames, sizes: Sizes) -> list[StoredPart]:
    """The Hugging Face tensors that one of the file becomes; empty if it is none that the model's logits need.

    Raises:
      CheckpointError: The architecture has no such tensor.
    """
    top_level = {
        "token_embd.weight": StoredPart("model.embed_tokens.weight"),
        "output_norm.weight": StoredPart("model.norm.weight", has_one_added=names.adds_one_to_norms),
        "output_norm.bias": StoredPart("model.norm.bias"),
        "output.weight": StoredPart("lm_head.weight"),
        "output.scale": StoredPart("lm_head.scale"),
    }
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
    return list(_parts_of_block(tensor, f"model.layers.{layer}.", base, suffix, names, sizes))


def _parts_of_block(
    tensor: GGUFTensor, prefix: str, base: str, suffix: str, names: ArchitectureNames, sizes: Sizes
) -> Iterator[StoredPart]:
    if experts := _OF_EXPERTS.fullmatch(base):
        if tensor.shape[:1] != (sizes.num_experts,):
            raise CheckpointError(
                f"tensor {tensor.name!r} {list(tensor.shape)} is not of the {sizes.num_experts} experts of the model"
            )
        yield from _parts_of_experts(tensor, prefix + names.experts, experts[1], suffix, names.projections)
        return
    if base == "attn_qkv" and base not in names.block:
        yield from _parts_of_qkv(prefix, suffix, names, sizes)
        return
    if base not in names.block:
        raise _unknown(tensor)
    target = names.block[base]
    name = prefix + (target[:-1] if target.endswith("=") else f"{target}.{suffix}")
    heads = {"attn_q": sizes.num_heads, "attn_k": sizes.num_kv_heads}.get(base, 0)
    permutes = names.permutes_rope and suffix != "scale"
    yield StoredPart(
        name,
        rope_heads=heads if permutes else 0,
        has_one_added=names.adds_one_to_norms and base.endswith("_norm"),
    )


def _parts_of_qkv(prefix: str, suffix: str, names: ArchitectureNames, sizes: Sizes) -> Iterator[StoredPart]:
    """The projections of queries, keys and values, which the file has one below the other."""
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
