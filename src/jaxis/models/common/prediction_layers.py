"""Multi-token-prediction layers (arXiv:2412.19437), which some checkpoints have after the model's own.

They draft tokens for speculative decoding. The model's own logits do not depend on them; they are loaded on request.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.config.hf_config import HFConfig
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.leaves import linear, rms_norm
from jaxis.layers.module import JaxModule
from jaxis.layers.norm import Norm
from jaxis.layers.scope import LayerScope
from jaxis.models.common.interfaces import DraftTarget

_NUM_LAYERS = "num_nextn_predict_layers"


def num_prediction_layers(config: HFConfig, default: int = 0) -> int:
    """Returns the number of layers that predict later tokens."""
    return config.get(_NUM_LAYERS, default)


class DraftParts(Protocol):
    """Description of layers in a checkpoint that draft, whose parameters are in a model's `draft`."""

    def layers_read(self, num_layers: int) -> tuple[int, ...]:
        """Returns the layers, of so many, whose inputs are read, as `DecoderModel.aux_hidden_state_layers`."""
        ...

    def make_draft(self, scope: LayerScope, layer_class: Callable[[LayerScope], Any]) -> JaxModule:
        """Creates them from the model's scope and the factory of its layers."""
        ...

    def parameter_name(self, name_in_file: str, draft_name: str) -> str:
        """Returns the parameter below `draft_name` that a tensor fills; other names stay."""
        ...


@dataclass(frozen=True, kw_only=True)
class PredictionNames(DraftParts):
    """Names of a prediction layer's parts in a checkpoint, after its renames.

    Attributes:
      module: Prefix of all the names, without its dot.
      embedding_norm, hidden_norm, projection, norm: Modules of `PredictionLayer`, below `module`.
      hidden_projection: Projection of each residual stream, in which case `projection` is of the embedding alone; empty
        for one projection of both.
      layer: Decoder layer, below `module`; empty if its parts lie directly in `module`.
      shared: Modules below `module` that are copies of the model's own and are not loaded.
      layer_index: Index of the decoder layer, or of a layer of the model of the same kind.
      layer_class: Factory of the decoder layer; None means the model's own factory.
      make_norm: Factory of the norms.
      make_hidden_norm, make_final_norm: Factories of two of them; None means `make_norm`.
      hidden_first: True if the projection reads the hidden state before the embedding, False for the reverse.
      hands_on_normed: True if the hidden states that the model hands to the layer, and the layer to the next one, come
        after a final norm. Otherwise they come before it, and `norm` is a part of the head.
    """

    module: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    norm: str
    layer: str
    hidden_projection: str = ""
    shared: tuple[str, ...] = ()
    layer_index: int
    layer_class: Callable[[LayerScope], Any] | None = None
    make_norm: Callable[[LayerScope], Norm] = rms_norm
    make_hidden_norm: Callable[[LayerScope], Norm] | None = None
    make_final_norm: Callable[[LayerScope], Norm] | None = None
    hidden_first: bool = False
    hands_on_normed: bool = True

    @classmethod
    def numbered(cls, config: HFConfig, **others: Any) -> PredictionNames:
        """DeepSeek's names: a layer after the decoder's own, like the last one, has the other parts.

        `others` are attributes with other values, such as the `module` of families with the same parts elsewhere.
        """
        num_layers: int = config["num_hidden_layers"]
        usual = cls(
            module=f"model.layers.{num_layers}",
            embedding_norm="enorm",
            hidden_norm="hnorm",
            projection="eh_proj",
            norm="shared_head.norm",
            layer="",
            shared=("embed_tokens", "shared_head.head"),
            layer_index=num_layers - 1,
        )
        return dataclasses.replace(usual, **others)

    @classmethod
    def separate(cls, layer_index: int, **others: Any) -> PredictionNames:
        """Qwen's names: a module `mtp` beside the decoder. `others` are attributes with other values."""
        usual = cls(
            module="mtp",
            embedding_norm="pre_fc_norm_embedding",
            hidden_norm="pre_fc_norm_hidden",
            projection="fc",
            norm="norm",
            layer="layers.0",
            layer_index=layer_index,
        )
        return dataclasses.replace(usual, **others)

    def layers_read(self, num_layers: int) -> tuple[int, ...]:
        return () if self.hands_on_normed else (num_layers,)

    def make_draft(self, scope: LayerScope, layer_class: Callable[[LayerScope], Any]) -> PredictionLayer:
        return PredictionLayer(scope, layer_class, self)

    def parameter_name(self, name_in_file: str, draft_name: str) -> str:
        if not name_in_file.startswith(f"{self.module}."):
            return name_in_file
        rest = name_in_file.removeprefix(f"{self.module}.")
        for part in ("embedding_norm", "hidden_norm", "projection", "hidden_projection", "norm"):
            if rest.startswith(f"{getattr(self, part)}."):
                return f"{draft_name}.{part}.{rest.removeprefix(f'{getattr(self, part)}.')}"
        if rest.startswith(tuple(f"{name}." for name in self.shared)):
            return name_in_file
        layer = f"{self.layer}." if self.layer else ""
        return f"{draft_name}.layer.{rest.removeprefix(layer)}" if rest.startswith(layer) else name_in_file


class PredictionLayer(JaxModule):
    """A layer that predicts the token after the next one.

    Its inputs are a token's hidden state h, after the model's final norm, and the embedding e of the token that
    follows:

    `h = norm(layer(projection([embedding_norm(e), hidden_norm(h)])))`
    `logits = head(h)`

    Some families project the two in the other order, or hand on h before its norm. Where h is of several residual
    streams, `projection(e)` is added to the projection of each of them. Embeddings and head are the model's
    own. This layer makes all predictions, each from the h of the one before, even if the checkpoint has further layers.

    Attributes:
      reads_next_token: True: a token's row takes the token that follows, and has this token's position.
    """

    reads_next_token = True

    def __init__(self, scope: LayerScope, layer_class: Callable[[LayerScope], Any], names: PredictionNames) -> None:
        size = scope.config["hidden_size"]
        scope = dataclasses.replace(scope / names.module, layer_index=names.layer_index)
        self.embedding_norm = names.make_norm(scope)
        self.hidden_norm = (names.make_hidden_norm or names.make_norm)(scope)
        self.hidden_projection = None
        if names.hidden_projection:
            self.hidden_projection = linear(scope / names.hidden_projection, size, size, axes=("embed", None))
        input_size = size if names.hidden_projection else 2 * size
        self.projection = linear(scope / names.projection, input_size, size, axes=("embed", None))
        layer_class = names.layer_class or layer_class
        self.layer = layer_class(scope / names.layer if names.layer else scope)
        self.norm = (names.make_final_norm or names.make_norm)(scope / names.norm)
        self.hidden_first = names.hidden_first
        self.hands_on_normed = names.hands_on_normed

    def first_states(self, hidden_states: jax.Array, aux_hidden_states: Sequence[jax.Array]) -> jax.Array:
        return hidden_states if self.hands_on_normed else aux_hidden_states[0]

    def __call__(
        self,
        target: DraftTarget,
        kv_caches: list[Any] | None,
        next_ids: jax.Array,
        states: jax.Array,
        attention_metadata: AttentionMetadata,
    ) -> tuple[list[Any] | None, jax.Array]:
        """Runs the layer over a flat batch; returns the updated caches, and states [T, E] or of streams [T, S, E].

        Args:
          target: Model whose embeddings the layer uses.
          kv_caches: Caches of the layer; None runs whole sequences without a cache.
          next_ids: i32 [T], the token after each token.
          states: The hidden state of each token, or the result of this layer for the token before.
          attention_metadata: Metadata of the tokens.
        """
        x = self._joined(self.embedding_norm(target.decoder.embed(next_ids)), self.hidden_norm(states))
        cache = None if kv_caches is None else kv_caches[0] if len(kv_caches) == 1 else tuple(kv_caches)
        cache, x = self.layer(cache, x, attention_metadata)
        if kv_caches is not None:
            kv_caches = [cache] if len(kv_caches) == 1 else list(cache)
        return kv_caches, self.norm(x) if self.hands_on_normed else x

    def _joined(self, embedding: jax.Array, hidden: jax.Array) -> jax.Array:
        """Normed embeddings [T, E] and states -> input of the decoder layer, shaped like states."""
        if self.hidden_projection is not None:
            return self.projection(embedding)[:, None] + self.hidden_projection(hidden)
        parts = [embedding, hidden]
        return self.projection(jnp.concatenate(parts[::-1] if self.hidden_first else parts, axis=-1))

    def compute_logits(self, target: DraftTarget, states: jax.Array) -> jax.Array:
        """States -> float32 logits [T, V] of the token after `next_ids`."""
        return target.compute_logits(states if self.hands_on_normed else self.norm(states))

    def token_ids(self, indices: jax.Array) -> jax.Array:
        """Returns the indices: indices into the logits are token ids of the model."""
        return indices


def without_layers(
    weights: Iterable[tuple[str, np.ndarray]], indices: Iterable[int]
) -> Iterator[tuple[str, np.ndarray]]:
    """Drops the tensors of these prediction layers, whose numbers follow the model's own layers."""
    prefixes = tuple(f"model.layers.{i}." for i in indices)
    return ((name, tensor) for name, tensor in weights if not name.startswith(prefixes))
