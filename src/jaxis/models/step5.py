"""Step 5: Step 3.5, whose full attention is to groups of tokens that an indexer selects for each kv head.

The published file is of "step4" with `sparse_config`. `ssmax_s` is in it, and unused: scores of the indexer are
weighted and rectified.
"""

from __future__ import annotations

import dataclasses
from functools import partial

from jaxis.config.checkpoint_values import value_of_either
from jaxis.config.hf_config import HFConfig
from jaxis.config.layer_types import FULL_ATTENTION
from jaxis.layers.group_indexer import GroupIndexerSizes, RotatedGroupIndexer
from jaxis.layers.rope import RotaryEmbedding, make_rotary_embedding
from jaxis.layers.scope import LayerScope
from jaxis.layers.selected_attention import SelectedAttention
from jaxis.models.common.family import Family
from jaxis.models.common.step import StepCausalLM, StepDecoderLayer, rope_of_layer
from jaxis.models.common.text_part import TextPart

_INDEXER = (("q", "q_proj"), ("k", "k_proj"), ("z", "z_proj"), ("w", "weights_proj"), ("q_norm",) * 2, ("k_norm",) * 2)

_EXPECTED = {
    "enabled": True,
    "sparse_indexer_use_rope": True,
    "sparse_indexer_num_k_heads": 1,
    "sparse_indexer_q_norm_type": "rmsnorm",
    "sparse_indexer_k_norm_type": "layernorm",
    "sparse_indexer_csa_z_norm_type": "none",
    "compression_method": "csa_block_compress",
    "attention_impl": "sparse_gqa",
    "apply_to_layer_types": [FULL_ATTENTION],
}


class Step5DecoderLayer(StepDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        super().__init__(scope, full_attention=partial(SelectedAttention, make_indexer=_indexer))


def _indexer(scope: LayerScope, rope: RotaryEmbedding) -> RotatedGroupIndexer:
    del rope  # it rotates other dimensions
    sparse = scope.config["sparse_config"]
    sizes = GroupIndexerSizes(
        num_heads=sparse.get("sparse_indexer_num_heads", 16),
        head_dim=sparse.get("proxy_dim", 256),
        group_size=sparse.get("region_block_size", 8),
        num_groups=sparse.get("topk", 512),
        delay=1,
        num_selections=sparse.get("num_provider_groups", 4),
    )
    settings = rope_of_layer(scope.config, scope.layer_index, FULL_ATTENTION)
    share = sparse.get("sparse_indexer_rope_dim", 32) / sizes.head_dim
    settings = dataclasses.replace(settings, partial_rotary_factor=share)
    index_rope = make_rotary_embedding(settings, head_dim=sizes.head_dim, max_model_len=scope.max_model_len)
    return RotatedGroupIndexer(scope, sizes, rope=index_rope)


class Step5ForCausalLM(StepCausalLM):
    layer_class = Step5DecoderLayer
    renames = (
        *StepCausalLM.renames,
        *((f"sparse_indexer_{name}", f"indexer.{own}") for name, own in _INDEXER),
    )
    buffers = (*StepCausalLM.buffers, ".ssmax_s")

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        super().check_config(config)
        config.ignore("fp32_residual_connection", because="residuals have the type of the activations")
        config.ignore("norm_dtype", because="norms compute in float32 in any case")
        num_kv_heads = value_of_either(config, "num_attention_groups", "num_key_value_heads")
        for kind in ("full_attention", "sliding_attention"):
            config.expect(f"head_dim_{kind}", config["head_dim"])
            config.expect(f"num_attention_groups_{kind}", num_kv_heads)
        sparse = config["sparse_config"]
        for key, value in _EXPECTED.items():
            sparse.expect(key, value)
        for key in ("sparse_indexer_softmax_variant", "sparse_indexer_ssmax_s_granularity"):
            sparse.ignore(key, because="no softmax is over the indexer's scores")
        if sparse.get("num_provider_groups", 4) != value_of_either(
            config, "num_attention_groups", "num_key_value_heads"
        ):
            raise config.fault("sparse_config", why="whose num_provider_groups is not the number of kv heads")


class Step5ForConditionalGeneration(TextPart, Step5ForCausalLM):
    """The multimodal checkpoints; images are not supported."""

    text_renames = ()
    text_model_types = ("step4", "step5", "step3p5")
    other_parts = ("vision_model", "vit_large_projector", "model.vision_model", "model.vit_large_projector")
    other_keys = ("projector_bias", "understand_projector_stride", "image_token_len", "patch_token_len")


FAMILY = Family(
    "Step 5 Preview (text)",
    (Step5ForCausalLM, Step5ForConditionalGeneration),
    "Step 3.5 with attention to 512 groups of 8 tokens and the own one, selected for each kv head, in place of full "
    "attention",
    other_names={"MMGPTStepRoboticsForCausalLM": Step5ForConditionalGeneration},
)
