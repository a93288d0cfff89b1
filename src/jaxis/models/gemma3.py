"""Gemma 3 (arXiv:2503.19786), text: Gemma 2 with norms on heads for soft caps, and a window and a rope of their own in
five of six layers."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from flax import nnx

from jaxis.config.layer_types import layer_type, layer_window
from jaxis.config.rope_config import rope_config
from jaxis.layers.decoder_layer import SandwichNormDecoderLayer, attention_from_config
from jaxis.layers.norm import rms_norm_from_config
from jaxis.models.common.text_part import TextPart
from jaxis.models.gemma2 import GemmaCausalLM, gemma_mlp

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.quantization.config import QuantizationConfig


class Gemma3DecoderLayer(SandwichNormDecoderLayer):
    def __init__(
        self,
        vllm_config: VllmConfig,
        rng: nnx.Rngs,
        quant_config: QuantizationConfig | None,
        *,
        layer_index: int,
        prefix: str,
    ) -> None:
        config = vllm_config.model_config.hf_config
        head_dim, use_bias = config.get("head_dim", 256), config.get("attention_bias", False)
        kind = layer_type(config, layer_index, full_every=6)
        # The reference has the key and does nothing with it.
        config.expect("attn_logit_softcapping", None)
        super().__init__(
            self_attn=attention_from_config(
                vllm_config,
                rng,
                quant_config,
                f"{prefix}.self_attn",
                head_dim=head_dim,
                rope_settings=rope_config(config, kind, default_theta=1_000_000.0, default_local_theta=10_000.0),
                scale=config.get("query_pre_attn_scalar", 256) ** -0.5,
                qkv_bias=use_bias,
                o_bias=use_bias,
                q_norm=rms_norm_from_config(vllm_config, rng, head_dim, add_unit_offset=True),
                k_norm=rms_norm_from_config(vllm_config, rng, head_dim, add_unit_offset=True),
                sliding_window=layer_window(config, kind, default=4096),
            ),
            mlp=gemma_mlp(vllm_config, rng, quant_config, f"{prefix}.mlp"),
            make_norm=functools.partial(rms_norm_from_config, vllm_config, rng, add_unit_offset=True),
        )


class Gemma3ForCausalLM(GemmaCausalLM):
    layer_class = Gemma3DecoderLayer

    def __init__(
        self,
        vllm_config: VllmConfig,
        rng: nnx.Rngs,
        quant_config: QuantizationConfig | None = None,
        *,
        prefix: str = "",
    ) -> None:
        soft_cap = vllm_config.model_config.hf_config.get("final_logit_softcapping")
        super().__init__(vllm_config, rng, quant_config, logits_soft_cap=soft_cap, prefix=prefix)


class Gemma3ForConditionalGeneration(TextPart):
    """The checkpoints that also see, from 4B parameters; images are not served."""

    language_model_class = Gemma3ForCausalLM
    other_parts = ("vision_tower", "multi_modal_projector")
    other_keys = ("vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index")
