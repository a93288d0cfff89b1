"""StarCoder2 (arXiv:2402.19173): layer norms and biases throughout, a feed-forward block without a gate."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
from flax import nnx

from jaxis.layers.decoder_layer import PreNormDecoderLayer, attention_from_config
from jaxis.layers.linear import JaxLinear
from jaxis.layers.mlp import activation_function
from jaxis.layers.module import JaxModule
from jaxis.layers.norm import JaxLayerNorm
from jaxis.models.common.decoder import CausalLM

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.quantization.config import QuantizationConfig


class Starcoder2MLP(JaxModule):
    """`c_proj(act(c_fc(x)))`."""

    def __init__(
        self, vllm_config: VllmConfig, rng: nnx.Rngs, quant_config: QuantizationConfig | None, prefix: str
    ) -> None:
        config = vllm_config.model_config.hf_config
        hidden_size, intermediate_size = config["hidden_size"], config["intermediate_size"]

        def linear(name: str, size_in: int, size_out: int, axes: tuple[str, str]) -> JaxLinear:
            return JaxLinear(
                size_in,
                size_out,
                rng,
                use_bias=config.get("use_bias", True),
                dtype=vllm_config.model_config.dtype,
                kernel_axes=axes,
                quant_config=quant_config,
                prefix=f"{prefix}.{name}",
            )

        self.c_fc = linear("c_fc", hidden_size, intermediate_size, ("mlp", "embed"))
        self.c_proj = linear("c_proj", intermediate_size, hidden_size, ("embed", "mlp"))
        self.activation = activation_function(config.get("hidden_act", "gelu_pytorch_tanh"))

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [T, E] -> [T, E]."""
        return self.c_proj(self.activation(self.c_fc(x)))


class Starcoder2DecoderLayer(PreNormDecoderLayer):
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
        use_bias = config.get("use_bias", True)
        super().__init__(
            vllm_config,
            rng,
            self_attn=attention_from_config(
                vllm_config,
                rng,
                quant_config,
                f"{prefix}.self_attn",
                qkv_bias=use_bias,
                o_bias=use_bias,
                sliding_window=config.get("sliding_window"),
            ),
            mlp=Starcoder2MLP(vllm_config, rng, quant_config, f"{prefix}.mlp"),
            make_norm=functools.partial(_norm, vllm_config, rng),
        )


def _norm(vllm_config: VllmConfig, rng: nnx.Rngs) -> JaxLayerNorm:
    config = vllm_config.model_config.hf_config
    epsilon = config.get("norm_epsilon", 1e-5)
    return JaxLayerNorm(config["hidden_size"], rng, epsilon=epsilon, dtype=vllm_config.model_config.dtype)


class Starcoder2ForCausalLM(CausalLM):
    layer_class = Starcoder2DecoderLayer

    def __init__(self, vllm_config: VllmConfig, rng: nnx.Rngs, quant_config: QuantizationConfig | None = None) -> None:
        config = vllm_config.model_config.hf_config
        config.expect("norm_type", "layer_norm")
        config.expect("mlp_type", "default")
        super().__init__(vllm_config, rng, quant_config, tied_by_default=True, norm=_norm(vllm_config, rng))
