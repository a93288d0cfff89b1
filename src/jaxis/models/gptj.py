"""GPT-J 6B and CodeGen: attention and MLP in parallel, a rope that pairs neighbours, a head with a bias."""

from __future__ import annotations

from jaxis.config.rope_config import rope_config
from jaxis.layers.decoder_layer import ParallelDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.qkv_packing import QKVPacking
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM, DecoderOptions
from jaxis.models.common.family import GPT2_NAMES, Family
from jaxis.models.common.gpt2 import ungated_mlp
from jaxis.models.common.layer_norms import biased_layer_norm


class GPTJDecoderLayer(ParallelDecoderLayer):
    """The layer of both families. CodeGen packs queries, values and keys in four parts, by quarters of the heads."""

    def __init__(self, scope: LayerScope, *, packing: QKVPacking | None = None) -> None:
        config = scope.config
        head_dim = config["hidden_size"] // config["num_attention_heads"]
        rotated = config.get("rotary_dim", head_dim) / head_dim
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(
                scope / "self_attn",
                num_kv_heads=config["num_attention_heads"],
                rope_settings=rope_config(config, default_partial_rotary_factor=rotated),
                interleaved_rope=True,
                packing=packing,
            ),
            mlp=ungated_mlp(scope / "mlp", "gelu_new"),
        )


class GPTJForCausalLM(CausalLM):
    layer_class = GPTJDecoderLayer
    make_norm = biased_layer_norm
    renames = (
        ("transformer.wte", "model.embed_tokens"),
        ("transformer.h", "model.layers"),
        ("transformer.ln_f", "model.norm"),
        ("ln_1", "input_layernorm"),
        ("attn.q_proj", "self_attn.q_proj"),
        ("attn.k_proj", "self_attn.k_proj"),
        ("attn.v_proj", "self_attn.v_proj"),
        ("attn.out_proj", "self_attn.o_proj"),
        ("mlp.fc_in", "mlp.up_proj"),
        ("mlp.fc_out", "mlp.down_proj"),
    )
    buffers = (".attn.bias", ".attn.masked_bias", ".attn.embed_positions")

    @classmethod
    def options(cls, scope: LayerScope) -> DecoderOptions:
        del scope
        return DecoderOptions(head_bias=True)


def _codegen_layer(scope: LayerScope) -> GPTJDecoderLayer:
    return GPTJDecoderLayer(scope, packing=QKVPacking(4, values_first=True))


class CodeGenForCausalLM(GPTJForCausalLM):
    layer_class = _codegen_layer
    renames = (("attn.qkv_proj", "self_attn.qkv_proj"), *GPTJForCausalLM.renames)
    buffers = (".attn.causal_mask",)


FAMILY = Family(
    "GPT-J 6B",
    (GPTJForCausalLM,),
    "parallel attention and feed-forward, interleaved partial RoPE, a head with a bias",
    names={"gptj": GPT2_NAMES},
)

CODEGEN_FAMILY = Family(
    "CodeGen", (CodeGenForCausalLM,), "as GPT-J, with packed projections", names={"codegen": GPT2_NAMES}
)
