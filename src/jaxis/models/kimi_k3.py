"""Kimi K3: Kimi Linear's layers with gates, attention residuals over blocks of layers, experts in a latent space."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import jax
import numpy as np

from jaxis.config.hf_config import HFConfig
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.attention_residual import BlockMixture
from jaxis.layers.checkpoint_names import Rename
from jaxis.layers.decoder_layer import LayerCache, LayerOutput
from jaxis.layers.glu import SiTU
from jaxis.layers.leaves import rms_norm
from jaxis.layers.mlp import FeedForward
from jaxis.layers.module import named_parameters
from jaxis.layers.scope import LayerScope
from jaxis.models.common.family import Family
from jaxis.models.common.kimi import KimiCausalLM, kimi_feed_forward, kimi_mixer
from jaxis.models.common.residual_blocks import MixingDecoderLayer, MixingModel
from jaxis.models.common.text_part import TextPart
from jaxis.models.common.towers.kimi import KimiK3Vision

_MIXTURES = ("self_attention_res", "mlp_res", "output_attn_res")


class KimiK3DecoderLayer(MixingDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        super().__init__(scope, scope.config["attn_res_block_size"])
        self.input_layernorm = rms_norm(scope)
        self.post_attention_layernorm = rms_norm(scope)
        self.self_attention_res = BlockMixture(scope / "self_attention_res")
        self.mlp_res = BlockMixture(scope / "mlp_res")
        self.self_attn = kimi_mixer(scope / "self_attn")
        self.mlp = _feed_forward(scope)

    def attend(self, kv_cache: LayerCache, vectors: jax.Array, metadata: AttentionMetadata) -> LayerOutput:
        return self.self_attn(kv_cache, self.input_layernorm(self.self_attention_res(vectors)), metadata)

    def feed(self, kv_cache: LayerCache, vectors: jax.Array, metadata: AttentionMetadata) -> LayerOutput:
        return kv_cache, self.mlp(self.post_attention_layernorm(self.mlp_res(vectors)), metadata)


def _feed_forward(scope: LayerScope) -> FeedForward:
    config = scope.config
    unit = SiTU(config.get("activation_situ_beta") or 1.0, config.get("activation_situ_linear_beta"))
    return kimi_feed_forward(
        scope,
        gated_unit=unit,
        block_unit=unit,
        latent_size=config.get("routed_expert_hidden_size"),
        use_latent_norm=config.get("latent_moe_use_norm", False),
    )


class KimiK3Model(MixingModel):
    block_size_key = "attn_res_block_size"
    make_mixture = BlockMixture


class KimiK3ForCausalLM(KimiCausalLM):
    layer_class = KimiK3DecoderLayer
    model_class = KimiK3Model
    renames = (
        *((f"{name}_{part}", f"{name}.{part}") for name in _MIXTURES for part in ("norm", "proj")),
        ("routed_expert_down_proj", "fc1_latent_proj"),
        ("routed_expert_up_proj", "fc2_latent_proj"),
        ("routed_expert_norm", "latent_norm"),
    )
    other_names = tuple(
        (f"{name}.{part}_weight", f"{name}.{part}.weight") for name in _MIXTURES for part in ("norm", "proj")
    )

    @classmethod
    def all_renames(cls, config: HFConfig) -> Sequence[Rename]:
        return *cls.renames, *super().all_renames(config)

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        super().check_config(config)
        config.expect_all(hidden_act="situ", topk_method="noaux_tc")
        if config["attn_res_block_size"] < 1:
            raise config.fault(
                "attn_res_block_size", why="expected the layers of a block, at least 1: correct the file"
            )

    def without_redundant_tensors(self, weights: Iterable[tuple[str, np.ndarray]]) -> Iterable[tuple[str, np.ndarray]]:
        """Also cuts off the rates of decay that have no head: published files have 128 of them."""
        rates = {name: param.get_value().size for name, param in named_parameters(self) if name.endswith(".A_log")}
        for name, tensor in super().without_redundant_tensors(weights):
            yield name, tensor.reshape(-1)[: rates[name]] if name in rates else tensor


class KimiK3ForConditionalGeneration(TextPart, KimiK3ForCausalLM):
    """The text model, with its image encoder; videos are not supported."""

    tower = KimiK3Vision
    other_names = (*TextPart.other_names, *KimiK3ForCausalLM.other_names)
    text_model_types = ("kimi_linear", "kimi_k3_text")
    other_parts = ("vision_tower", "vision_model", "multi_modal_projector", "mm_projector")
    other_keys = (
        *("vision_config", "ignore_index", "media_placeholder_token_id", "image_placeholder", "video_placeholder"),
        *("use_unified_vision_chunk", "image_token_id", "video_token_id"),
    )


FAMILY = Family(
    "Kimi K3",
    (KimiK3ForConditionalGeneration, KimiK3ForCausalLM),
    "Kimi Linear with gates after latent attention, bounded decays, SiTU units and experts in a latent space; "
    "each block of layers reads a mixture of the residuals before it; MoonViT",
    formats=("MXFP4",),
    gguf=("kimi-k3",),
)
