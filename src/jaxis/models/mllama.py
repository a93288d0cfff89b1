"""Llama 3.2 Vision (text only): the Llama layer; cross-attention layers have no effect without images."""

from __future__ import annotations

from collections.abc import Sequence

from jaxis.config.hf_config import HFConfig
from jaxis.layers.checkpoint_names import Rename
from jaxis.layers.leaves import embedding
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM, DecoderModel, DecoderOptions
from jaxis.models.common.family import Family
from jaxis.models.common.llama import LlamaDecoderLayer
from jaxis.models.common.text_part import TextPart

_IMAGE_TOKENS = 8


def _layers_of_images(config: HFConfig) -> list[int]:
    return sorted(config.get("cross_attention_layers", [3, 8, 13, 18, 23, 28, 33, 38]))


class MllamaTextModel(DecoderModel):
    """The decoder, whose embeddings have rows beyond the vocabulary, for tokens of images."""

    def add_parts(self, scope: LayerScope) -> None:
        self.embed_tokens = embedding(scope / "embed_tokens", num_embeddings=scope.config["vocab_size"] + _IMAGE_TOKENS)


class MllamaForConditionalGeneration(TextPart, CausalLM):
    layer_class = LlamaDecoderLayer
    model_class = MllamaTextModel
    text_model_types = ("mllama_text_model",)
    other_parts = ("vision_model", "multi_modal_projector", "model.layers_of_images")

    @classmethod
    def inner_renames(cls, config: HFConfig) -> Sequence[Rename]:
        """Also renumbers: cross-attention layers move out, and the other layers fill their places."""
        skipped = _layers_of_images(config)
        kept = [i for i in range(config["num_hidden_layers"]) if i not in skipped]
        return (
            *super().inner_renames(config),
            *((f"model.layers.{i}", f"model.layers_of_images.{i}") for i in skipped),
            *((f"model.layers.{old}", f"model.layers.{new}") for new, old in enumerate(kept) if new != old),
        )

    @classmethod
    def options(cls, scope: LayerScope) -> DecoderOptions:
        config = scope.config
        return DecoderOptions(num_layers=config["num_hidden_layers"] - len(_layers_of_images(config)))


FAMILY = Family(
    "Llama 3.2 Vision (text)",
    (MllamaForConditionalGeneration,),
    "as Llama 3.1, without the layers that attend to images",
    tiny={"cross_attention_layers": [0]},
)
