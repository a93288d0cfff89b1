"""Gemma 2 (arXiv:2408.00118): norms before and after each block, soft caps, a window over every second layer."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from flax import nnx

from jaxis.config.layer_types import layer_type, layer_window
from jaxis.layers.decoder_layer import SandwichNormDecoderLayer, attention_from_config, mlp_from_config
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.norm import rms_norm_from_config
from jaxis.models.common.decoder import CausalLM

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.quantization.config import QuantizationConfig


class Gemma2DecoderLayer(SandwichNormDecoderLayer):
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
        use_bias = config.get("attention_bias", False)
        window = layer_window(config, layer_type(config, layer_index, full_every=2), default=4096)
        super().__init__(
            self_attn=attention_from_config(
                vllm_config,
                rng,
                quant_config,
                f"{prefix}.self_attn",
                head_dim=256,
                scale=config.get("query_pre_attn_scalar", 256) ** -0.5,
                qkv_bias=use_bias,
                o_bias=use_bias,
                sliding_window=window,
                soft_cap=config.get_nullable("attn_logit_softcapping", 50.0),
            ),
            mlp=gemma_mlp(vllm_config, rng, quant_config, f"{prefix}.mlp"),
            make_norm=functools.partial(rms_norm_from_config, vllm_config, rng, add_unit_offset=True),
        )


def gemma_mlp(vllm_config: VllmConfig, rng: nnx.Rngs, quant_config: QuantizationConfig | None, prefix: str) -> GatedMLP:
    """The feed-forward block, whose activation is under a name of Gemma's own."""
    config = vllm_config.model_config.hf_config
    activation = config.get("hidden_activation", "gelu_pytorch_tanh")
    # Kept for older readers, who are told the same.
    config.expect("hidden_act", activation)
    return mlp_from_config(vllm_config, rng, quant_config, prefix, activation=activation)


class GemmaCausalLM(CausalLM):
    """What Gemma's models share: (1 + w) norms, embeddings scaled by sqrt(E) and tied to the head.

    Args:
      vllm_config, rng, quant_config: As for `CausalLM`.
      logits_soft_cap, prefix: As for `CausalLM`.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        rng: nnx.Rngs,
        quant_config: QuantizationConfig | None,
        *,
        logits_soft_cap: float | None,
        prefix: str = "",
    ) -> None:
        config = vllm_config.model_config.hf_config
        config.expect("use_bidirectional_attention", False)
        super().__init__(
            vllm_config,
            rng,
            quant_config,
            tied_by_default=True,
            logits_soft_cap=logits_soft_cap,
            norm=rms_norm_from_config(vllm_config, rng, add_unit_offset=True),
            embed_scale=config["hidden_size"] ** 0.5,
            prefix=prefix,
        )


class Gemma2ForCausalLM(GemmaCausalLM):
    layer_class = Gemma2DecoderLayer

    def __init__(self, vllm_config: VllmConfig, rng: nnx.Rngs, quant_config: QuantizationConfig | None = None) -> None:
        config = vllm_config.model_config.hf_config
        # The first checkpoints name the window twice.
        config.expect("sliding_window_size", config.get("sliding_window"))
        soft_cap = config.get_nullable("final_logit_softcapping", 30.0)
        super().__init__(vllm_config, rng, quant_config, logits_soft_cap=soft_cap)
