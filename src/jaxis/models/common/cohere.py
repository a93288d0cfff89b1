"""Code shared by Cohere's models: layer norms without bias, a tied head, scaled logits."""

from __future__ import annotations

from jaxis.config.hf_config import HFConfig
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM, DecoderOptions
from jaxis.models.common.layer_norms import unbiased_layer_norm


class CohereCausalLM(CausalLM):
    make_norm = unbiased_layer_norm
    tied_by_default = True

    @classmethod
    def options(cls, scope: LayerScope) -> DecoderOptions:
        return DecoderOptions(
            logits_multiplier=scope.config.get("logit_scale", 0.0625),
        )


class Cohere2CausalLM(CohereCausalLM):
    """Base of Cohere 2's models, dense or sparse: parallel layers, some of which have a window."""

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        config.expect_all(use_parallel_block=True, use_gated_activation=True, use_embedding_sharing=True)
        config.expect_all(use_qk_norm=False, rotary_pct=1.0, position_embedding_type="rope_gptj")
        config.expect("order_of_interleaved_layers", "local_attn_first")
        config.ignore("layer_switch", because="it is the pattern of layers once more, and the reference ignores it")
