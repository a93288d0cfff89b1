"""Tensors of checkpoints in Mistral's own format, under Hugging Face's names and in its order of rows.

`layers.0.attention.wq.weight` is `model.layers.0.self_attn.q_proj.weight`, and so on. The rope of such files turns
neighbouring rows of queries and keys; that of Hugging Face's format turns rows of the two halves of a head. Latent
attention turns neighbouring rows in both.
Source: transformers' conversions of Ministral 3 and Mistral 4; vLLM's mistral_large_3.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxis.config.mistral_params import PARAMS
from jaxis.errors import CheckpointError
from jaxis.host.json_object import read_json_object

# Parts of a dotted name in the file -> here, one after the other.
_RENAMES = (
    (".tok_embeddings.", ".model.embed_tokens."),
    (".layers.", ".model.layers."),
    (".attention_norm.", ".input_layernorm."),
    (".ffn_norm.", ".post_attention_layernorm."),
    (".attention.wkv_a_with_mqa.", ".self_attn.kv_a_proj_with_mqa."),
    (".attention.wkv_b.", ".self_attn.kv_b_proj."),
    (".attention.kv_a_norm.", ".self_attn.kv_a_layernorm."),
    (".attention.wq_a.", ".self_attn.q_a_proj."),
    (".attention.wq_b.", ".self_attn.q_b_proj."),
    (".attention.q_a_norm.", ".self_attn.q_a_layernorm."),
    *((f".attention.w{each}.", f".self_attn.{each}_proj.") for each in "qkvo"),
    # Mixtral's experts, which Hugging Face's files have under the same names of projections.
    (".feed_forward.gate.", ".block_sparse_moe.gate."),
    (".feed_forward.experts.", ".block_sparse_moe.experts."),
    (".feed_forward.", ".mlp."),
)
# Of the model with experts and shared ones, whose names have no part for the feed-forward block.
_EXPERTS = ("gate", "experts", "shared_experts")
_PROJECTIONS = ((".w1.", ".gate_proj."), (".w2.", ".down_proj."), (".w3.", ".up_proj."))
_OTHER_PARTS = ("vision_encoder", "vision_language_adapter", "patch_merger", "pre_mm_projector_norm")


@dataclass(frozen=True)
class MistralNames:
    """Conversion of a folder's tensors, with H and K heads."""

    num_heads: int
    num_kv_heads: int

    @classmethod
    def of_folder(cls, folder: Path) -> MistralNames:
        """Reads the folder's params.json. Raises CheckpointError if it has no numbers of heads."""
        params = read_json_object(folder / PARAMS)
        heads, kv_heads = params.get("n_heads"), params.get("n_kv_heads")
        if not isinstance(heads, int) or not isinstance(kv_heads, int):
            raise CheckpointError(f"{folder / PARAMS} has no n_heads and n_kv_heads: fetch the file again")
        return cls(heads, kv_heads)

    def name_here(self, stored_name: str) -> str | None:
        """Returns the tensor's name in Hugging Face's format; None if it is not the text model's."""
        if stored_name.startswith(_OTHER_PARTS):
            return None
        first, *rest = stored_name.split(".")
        if first == "output":
            return ".".join(["lm_head", *rest])
        if first == "norm":
            return ".".join(["model.norm", *rest])
        dotted = f".{stored_name}."
        if first == "layers" and len(rest) > 1 and rest[1] in _EXPERTS:
            dotted = dotted.replace(f".{rest[1]}.", f".mlp.{rest[1]}.", 1)
        for old, new in _RENAMES:
            dotted = dotted.replace(old, new, 1)
        if ".block_sparse_moe." not in dotted:
            for old, new in _PROJECTIONS:
                dotted = dotted.replace(old, new, 1)
        return dotted[1:-1]

    def value_here(self, stored_name: str, tensor: np.ndarray) -> np.ndarray:
        """Returns the tensor with the rows of queries and keys in the order of Hugging Face's format."""
        *_, module, suffix = stored_name.split(".")
        heads = {"wq": self.num_heads, "wk": self.num_kv_heads}.get(module)
        # A scale of a whole tensor has no rows.
        if heads is None or tensor.ndim != 2 or tensor.shape[0] == 1:
            return tensor
        rows, columns = tensor.shape
        if rows % (2 * heads):
            raise CheckpointError(f"{stored_name} of {suffix} has {rows} rows, which {heads} heads cannot share")
        return tensor.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
