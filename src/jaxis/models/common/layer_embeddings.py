from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxis.config.hf_config import HFConfig
from jaxis.kernels.materialize import materialize
from jaxis.layers.leaves import embedding, linear, rms_norm
from jaxis.layers.scale import scaled
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import DecoderModel


class LayerEmbeddingsModel(DecoderModel):
    """The decoder with a table of each layer's own embeddings (Gemma 3n, Gemma 4), if the model has one.

    Tokens beyond the end of the table, used by some checkpoints for images and sound, have the embedding of token 0.

    Attributes:
      placeholders: Tokens that stand for something else, such as an image.
      padding_id: Token whose embeddings the placeholders have, unless `inputs_embeds` has others.
    """

    @classmethod
    def layer_table(cls, config: HFConfig) -> tuple[int, int]:
        """Returns P, the size of a layer's embeddings, 0 for none, and the number of tokens in the table."""
        raise NotImplementedError

    def add_parts(self, scope: LayerScope) -> None:
        layer_size, num_embeddings = self.layer_table(scope.config)
        hidden_size: int = scope.config["hidden_size"]
        self.projection_scale = hidden_size**-0.5
        self.num_layer_embeddings = num_embeddings
        self.placeholders: tuple[int, ...] = ()
        self.padding_id = 0
        self.embed_tokens_per_layer = self.per_layer_model_projection = None
        if layer_size:
            total = len(self.layers) * layer_size
            place, scale = scope / "embed_tokens_per_layer", layer_size**0.5
            self.embed_tokens_per_layer = embedding(place, total, num_embeddings=num_embeddings, scale=scale)
            self.per_layer_model_projection = linear(
                scope / "per_layer_model_projection", hidden_size, total, axes=(None, "embed")
            )
            self.per_layer_projection_norm = rms_norm(scope, layer_size)

    @property
    def has_layer_inputs(self) -> bool:
        return self.embed_tokens_per_layer is not None

    def embed(self, input_ids: jax.Array) -> jax.Array:
        return super().embed(self._without_placeholders(input_ids))

    def layer_inputs(self, input_ids: jax.Array, embeddings: jax.Array) -> Sequence[tuple[jax.Array, ...]]:
        """Returns each layer's own embeddings, [T, P], mixed with a projection of the common embeddings."""
        if self.embed_tokens_per_layer is None or self.per_layer_model_projection is None:
            return super().layer_inputs(input_ids, embeddings)
        shape = (input_ids.shape[0], len(self.layers), -1)
        projected = scaled(self.per_layer_model_projection(embeddings), self.projection_scale).reshape(shape)
        in_table = self._without_placeholders(input_ids)
        in_table = jnp.where(in_table < self.num_layer_embeddings, in_table, 0)
        # Rounded, so that no program fuses its factor with the sum that follows.
        own = materialize(self.embed_tokens_per_layer(in_table)).reshape(shape)
        mixed = scaled(self.per_layer_projection_norm(projected) + own, 2**-0.5)
        return [(mixed[:, i],) for i in range(len(self.layers))]

    def _without_placeholders(self, input_ids: jax.Array) -> jax.Array:
        for token_id in self.placeholders:
            input_ids = jnp.where(input_ids == token_id, self.padding_id, input_ids)
        return input_ids
