"""MiniCPM (arXiv:2404.06395), MiniCPM4: Llama with multipliers; MiniCPM3 has latent attention as well."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from jaxis.config.hf_config import HFConfig
from jaxis.errors import ConfigError
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM, DecoderOptions
from jaxis.models.common.deepseek import latent_attention
from jaxis.models.common.family import Family, PlainGGUF

if TYPE_CHECKING:
    from jaxis.loading.gguf.config_reader import ConfigReader


def _residual_multiplier(config: HFConfig) -> float:
    return config["scale_depth"] / math.sqrt(config["num_hidden_layers"])


class MiniCPMDecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        sparse = scope.config.read_object("sparse_config") or {}
        dense_len = sparse.get("dense_len", scope.max_model_len)
        if dense_len < scope.max_model_len:
            raise ConfigError(
                f"{scope.config.source} has sparse_config, attention to chosen blocks beyond {dense_len} tokens, which "
                f"is not supported: give max_model_len={dense_len} or less",
                keys=["sparse_config"],
            )
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(scope / "self_attn"),
            mlp=GatedMLP(scope / "mlp"),
            residual_multiplier=_residual_multiplier(scope.config),
        )


class MiniCPM3DecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        super().__init__(
            scope,
            self_attn=latent_attention(scope / "self_attn", interleaved_rope=False),
            mlp=GatedMLP(scope / "mlp", use_bias=scope.config.get("mlp_bias", False)),
            residual_multiplier=_residual_multiplier(scope.config),
        )


class MiniCPMForCausalLM(CausalLM):
    layer_class = MiniCPMDecoderLayer
    tied_by_default = True
    supported_values = (("num_experts", 0), ("attention_bias", False))
    ignored_keys = (("mup_denominator", "only training computes with it"),)

    @classmethod
    def options(cls, scope: LayerScope) -> DecoderOptions:
        config = scope.config
        return DecoderOptions(
            embedding_multiplier=float(config["scale_emb"]),
            logits_multiplier=config["dim_model_base"] / config["hidden_size"],
        )


class MiniCPM3ForCausalLM(MiniCPMForCausalLM):
    layer_class = MiniCPM3DecoderLayer


def _gguf_scales(reader: ConfigReader) -> dict[str, Any]:
    """MiniCPM4's long rope, and the multipliers of MiniCPM 1B and 2B, which older GGUF files lack."""
    keys = reader.keys
    found: dict[str, Any] = {"scale_emb": keys.get_or_assume("embedding_scale", "scale_emb", 12.0)}
    residual, logits = keys.get("residual_scale"), keys.get("logit_scale")
    found["scale_depth"] = keys.assume("scale_depth", 1.4) if residual is None else residual * reader.num_layers**0.5
    found["dim_model_base"] = reader.hidden_size / logits if logits else keys.assume("dim_model_base", 256)
    if (scaling := reader.long_factors()) is not None:
        original = {"original_max_position_embeddings": reader.original_context}
        found["rope_scaling"] = scaling | {"attention_factor": 1.0} | original
    return found


FAMILY = Family(
    "MiniCPM 1B, 2B, MiniCPM4; MiniCPM3 4B",
    (MiniCPMForCausalLM, MiniCPM3ForCausalLM),
    "multipliers on embeddings, residuals and logits; MiniCPM3: latent attention",
    gguf=(PlainGGUF("minicpm", permutes_rope=True, quirks=(_gguf_scales,), model_type="minicpm"), "minicpm3"),
)
