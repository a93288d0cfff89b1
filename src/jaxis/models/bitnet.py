"""BitNet: the Llama layer with norms before the output projections of attention and of the feed-forward block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax

from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.leaves import rms_norm
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family, PlainGGUF

if TYPE_CHECKING:
    from jaxis.loading.gguf.config_reader import ConfigReader


class BitNetAttention(GroupedQueryAttention):
    def __init__(self, scope: LayerScope) -> None:
        use_bias = scope.config.get("attention_bias", False)
        super().__init__(scope, qkv_bias=use_bias, o_bias=use_bias)
        self.attn_sub_norm = rms_norm(scope, self.num_heads * self.head_dim)

    def project_output(self, attended: jax.Array) -> jax.Array:
        return self.o_proj(self.attn_sub_norm(attended))


class BitNetMLP(GatedMLP):
    def __init__(self, scope: LayerScope) -> None:
        super().__init__(scope, activation=scope.config.get("hidden_act", "relu2"))
        self.ffn_sub_norm = rms_norm(scope, scope.config["intermediate_size"])

    def __call__(self, x: jax.Array, _metadata: AttentionMetadata | None = None) -> jax.Array:
        gate, up = self._gate_and_up(x)
        return self.down_proj(self.ffn_sub_norm(self.gated_unit(gate, up)))


class BitNetDecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        super().__init__(scope, self_attn=BitNetAttention(scope / "self_attn"), mlp=BitNetMLP(scope / "mlp"))


class BitNetForCausalLM(CausalLM):
    layer_class = BitNetDecoderLayer


def _activation(reader: ConfigReader) -> Mapping[str, str]:
    """Returns the activation of llama.cpp's files, which do not name it: the first models share no keys among heads."""
    return {"hidden_act": "silu" if reader.num_heads == reader.num_kv_heads else "relu2"}


_TENSORS = {"attn_sub_norm": "self_attn.attn_sub_norm", "ffn_sub_norm": "mlp.ffn_sub_norm"}

FAMILY = Family(
    "BitNet b1.58 2B4T",
    (BitNetForCausalLM,),
    "ternary weights, norms before output projections, squared ReLU",
    formats=("bitnet",),
    gguf=(
        PlainGGUF("bitnet-b1.58", constants={"hidden_act": "relu2"}, tensors=_TENSORS),  # bitnet.cpp's
        PlainGGUF("bitnet", quirks=(_activation,), tensors=_TENSORS),
    ),
)
