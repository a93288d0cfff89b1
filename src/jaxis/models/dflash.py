"""DFlash heads (arXiv:2602.06036): layers that draft a block of tokens in one pass, from states of their target.

The files are those of its authors (`DFlashDraftModel`), or Muse Glimmer's, which `transformers` runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxis.config.dflash_config import DFlashConfig, dflash_layer_attention
from jaxis.errors import ConfigError
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.block_attention import BlockAttention
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.leaves import linear, rms_norm
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.module import JaxModule, NamedByCheckpoint
from jaxis.layers.scope import LayerScope
from jaxis.layers.uncached import KVCache
from jaxis.models.common.interfaces import DraftTarget, LoadableWithIterator

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.config.quantization import QuantizationConfig

ARCHITECTURES = ("DFlashDraftModel", "MuseGlimmerAssistantModel")
# What modules are called in the second kind of files.
_OTHER_NAMES = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}


class DFlashLayer(PreNormDecoderLayer):
    """A Qwen3 layer whose attention is a `BlockAttention`."""

    mixer = NamedByCheckpoint[BlockAttention]("_mixer_name")

    def __init__(self, scope: LayerScope) -> None:
        use_bias = scope.config.get("attention_bias", False)
        span, is_causal = dflash_layer_attention(scope.config, scope.layer_index)
        super().__init__(
            scope,
            self_attn=BlockAttention(
                scope / "self_attn",
                is_causal=is_causal,
                head_dim=128,
                qkv_bias=use_bias,
                o_bias=use_bias,
                span=span,
            ),
            mlp=GatedMLP(scope / "mlp"),
        )


class DFlashHead(JaxModule, LoadableWithIterator):
    """Drafts blocks of tokens for a target model, with its embeddings and its head.

    The keys and values of all layers' contexts are made of the same states: those that some of the target's layers
    return, projected by `fc` and normed. A block is the newest token and mask tokens; the row of each mask token
    gives the draft at its place.

    Args:
      vllm_config: Names the head's folder; `max_model_len` is the target's.
      rng: For the initial weights.
      quant_config: Decides how weights are stored and applied; None leaves them as they are.

    Attributes:
      reads_next_token: The row of a token takes nothing but the target's states.
      settings: What config.json says of the blocks and of the target.

    Raises:
      ConfigError: config.json lacks a key, or asks for something that is not supported.
    """

    reads_next_token = False

    def __init__(self, vllm_config: VllmConfig, rng: nnx.Rngs, quant_config: QuantizationConfig | None = None) -> None:
        scope = LayerScope(vllm_config, rng, quant_config)
        size: int = scope.config["hidden_size"]
        self.settings = DFlashConfig.read(scope.config)
        self.fc = linear(scope / "fc", len(self.settings.target_layer_ids) * size, size, axes=("embed", None))
        self.hidden_norm = rms_norm(scope)
        self.layers = [DFlashLayer(scope.layer(i)) for i in range(scope.config["num_hidden_layers"])]
        self.norm = rms_norm(scope)

    @property
    def block_size(self) -> int:
        """See `DraftsBlocks`."""
        return self.settings.block_size

    def target_layers(self, num_layers: int) -> tuple[int, ...]:
        """The layers of a target with so many whose inputs the head reads: those after the ones in config.json.

        Raises:
          ConfigError: The head was trained for a target of another number of layers.
        """
        layer_ids = self.settings.target_layer_ids
        expected = self.settings.num_target_layers or num_layers
        # What the last layer returns is normed for some programs, and not for others.
        if expected != num_layers or layer_ids[-1] >= num_layers - 1:
            raise ConfigError(
                f"the DFlash head reads what layers {', '.join(map(str, layer_ids))} of a model of at least "
                f"{max(expected, layer_ids[-1] + 2)} layers return, and the model has {num_layers}: it was not trained "
                "for this model"
            )
        return tuple(i + 1 for i in layer_ids)

    def write_context(
        self, kv_caches: Sequence[KVCache], aux_hidden_states: Sequence[jax.Array], metadata: AttentionMetadata
    ) -> list[KVCache]:
        """Writes a step's tokens into the layers' caches, which are returned.

        Args:
          kv_caches: Of the layers.
          aux_hidden_states: What entered the target's layers, each [T, E].
          metadata: Of the tokens.
        """
        context = self.hidden_norm(self.fc(jnp.concatenate(aux_hidden_states, axis=-1)))
        attentions = [layer.mixer for layer in self.layers]
        return [
            attention.write_context(cache, context, metadata)
            for attention, cache in zip(attentions, kv_caches, strict=True)
        ]

    def draft_blocks(
        self,
        target: DraftTarget,
        kv_caches: Sequence[KVCache],
        newest_ids: jax.Array,
        num_drafts: int,
        metadata: AttentionMetadata,
    ) -> tuple[list[KVCache], jax.Array]:
        """Drafts the tokens after the newest one of each sequence.

        Args:
          target: The model whose embeddings and head it uses.
          kv_caches: Of the layers; they have the tokens before the newest ones.
          newest_ids: i32 [R].
          num_drafts: For each sequence.
          metadata: Of R requests that compute 1 + num_drafts tokens each.

        Returns:
          The updated caches, and float32 logits [R * num_drafts, V] of the drafts, sequence by sequence.
        """
        masks = jnp.full((newest_ids.shape[0], num_drafts), self.settings.mask_token_id, jnp.int32)
        block_ids = jnp.concatenate([newest_ids[:, None], masks], axis=1)
        # As the reference does: without the norm that some models have behind their embeddings.
        x = target.decoder.embed_tokens(block_ids.reshape(-1))
        caches = []
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            cache, x = layer(kv_cache, x, metadata)
            caches.append(cache)
        of_masks = x.reshape(*block_ids.shape, -1)[:, 1:].reshape(masks.size, -1)
        return caches, target.compute_logits(self.norm(of_masks))

    def load_weights(self, weights: Iterable[tuple[str, np.ndarray]]) -> set[str]:
        return super().load_weights((_parameter_name(name), tensor) for name, tensor in weights)


def _parameter_name(name_in_file: str) -> str:
    for other, name in _OTHER_NAMES.items():
        if name_in_file.startswith(other):
            return name + name_in_file.removeprefix(other)
    return name_in_file
