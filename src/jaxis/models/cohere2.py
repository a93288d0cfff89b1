"""Command R7B and Command A (Cohere 2): Cohere with window and rope in three of four layers, neither in the fourth."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flax import nnx

from jaxis.config.layer_types import SLIDING_ATTENTION, layer_type, layer_window
from jaxis.layers.decoder_layer import attention_from_config, mlp_from_config
from jaxis.models.cohere import CohereForCausalLM, ParallelDecoderLayer

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.quantization.config import QuantizationConfig


class Cohere2DecoderLayer(ParallelDecoderLayer):
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
        kind = layer_type(config, layer_index, full_every=4)
        use_bias = config.get("attention_bias", False)
        # Layers that see everything have no positional encoding.
        no_rope = {} if kind == SLIDING_ATTENTION else {"rope": None}
        super().__init__(
            vllm_config,
            rng,
            self_attn=attention_from_config(
                vllm_config,
                rng,
                quant_config,
                f"{prefix}.self_attn",
                interleaved_rope=True,
                qkv_bias=use_bias,
                o_bias=use_bias,
                sliding_window=layer_window(config, kind, default=4096),
                **no_rope,
            ),
            mlp=mlp_from_config(vllm_config, rng, quant_config, f"{prefix}.mlp"),
        )


class Cohere2ForCausalLM(CohereForCausalLM):
    layer_class = Cohere2DecoderLayer

    def __init__(self, vllm_config: VllmConfig, rng: nnx.Rngs, quant_config: QuantizationConfig | None = None) -> None:
        config = vllm_config.model_config.hf_config
        # What the published configs say of the architecture besides what makes it.
        for key in ("use_parallel_block", "use_gated_activation", "use_embedding_sharing"):
            config.expect(key, True)
        config.expect("use_qk_norm", False)
        config.expect("rotary_pct", 1.0)
        config.expect("position_embedding_type", "rope_gptj")
        config.expect("order_of_interleaved_layers", "local_attn_first")
        # The pattern of layers once more, which the reference does not read.
        config.get("layer_switch")
        super().__init__(vllm_config, rng, quant_config)
