"""DSpark (arXiv:2607.05147): layers of DeepSeek V4's and V4.1's files that draft a block of tokens at once."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxis.config.hf_config import HFConfig
from jaxis.kernels.sampling import argmax
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.embed import JaxLmHead
from jaxis.layers.leaves import embedding, linear, rms_norm
from jaxis.layers.module import JaxModule
from jaxis.layers.scope import LayerScope, never_quantized
from jaxis.models.common.interfaces import DraftTarget
from jaxis.models.common.prediction_layers import DraftParts

NUM_LAYERS = 3  # of all published files, whatever their number of prediction layers
_FIRST, _LAST = "mtp.0", f"mtp.{NUM_LAYERS - 1}"
# Names after the families' renames, and in `DSpark`.
_PARTS = {
    "main_proj": "main_proj",
    "main_norm": "main_norm",
    "model.norm.mixer": "mixer",
    "model.norm": "norm",
    "markov_head.model.embed_tokens": "markov_embed",
    "markov_head.markov_w1": "markov_embed",
    "markov_head.lm_head": "markov_head",
    "markov_head.markov_w2": "markov_head",
    "confidence_head.proj": "confidence",
}


class DraftBlock(NamedTuple):
    """Drafts of N sequences, by B rows of each.

    Attributes:
      drafts: i32 [N, B], the tokens after the newest one.
      logits: float32 [N, B, V], from which they are chosen.
      chances: float32 [N, B], chance that a draft is right, if those before it are.
    """

    drafts: jax.Array
    logits: jax.Array
    chances: jax.Array


@dataclass(frozen=True, kw_only=True)
class DSparkParts(DraftParts):
    """DSpark's layers of a family.

    Attributes:
      config: The model's.
      reads_outputs: True if what leaves the layers of `dspark_target_layer_ids` is read, False for what enters them.
      make_mixer: Creates the last mixture of streams; None if `last_output` of the decoder is one.
    """

    config: HFConfig
    reads_outputs: bool
    make_mixer: Callable[[LayerScope], Callable[[jax.Array], jax.Array]] | None = None

    def layers_read(self, num_layers: int) -> tuple[int, ...]:
        listed = self.config["dspark_target_layer_ids"]
        if not listed or len(set(listed) & set(range(num_layers))) != len(listed):
            raise self.config.fault("dspark_target_layer_ids", why=f"expected different ones of {num_layers} layers")
        return tuple(i + self.reads_outputs for i in listed)

    def make_draft(self, scope: LayerScope, layer_class: Callable[[LayerScope], Any]) -> DSpark:
        return DSpark(scope, layer_class, self)

    def parameter_name(self, name_in_file: str, draft_name: str) -> str:
        if not (found := re.fullmatch(r"mtp\.(\d+)\.(.*)", name_in_file)):
            return name_in_file
        for there, here in _PARTS.items():
            if found[2].startswith(f"{there}."):
                return f"{draft_name}.{here}.{found[2].removeprefix(f'{there}.')}"
        return f"{draft_name}.layers.{found[1]}.{found[2]}"


class DSpark(JaxModule):
    """Layers that draft a block of B tokens, with the model's embeddings and head.

    Their attention sees the model's last tokens by a state of each, `main_norm(main_proj(states of some layers))`, and
    all of the block, which is the newest token and noise. Logits of a block's row are those of the token after it, and
    change by the token before: `head(norm(x)) + markov_head(markov_embed(token))`.

    Attributes:
      reads_next_token: False: the row of a token takes this token's states.
      block_size: B.
    """

    reads_next_token = False

    def __init__(self, scope: LayerScope, layer_class: Callable[[LayerScope], Any], parts: DSparkParts) -> None:
        config, first, last = scope.config, scope / _FIRST, never_quantized(scope / _LAST)
        size, rank = config["hidden_size"], config["dspark_markov_rank"]
        self.block_size: int = config["dspark_block_size"]
        self.noise_token_id: int = config["dspark_noise_token_id"]
        inputs = len(config["dspark_target_layer_ids"]) * size
        self.main_proj = linear(first / "main_proj", inputs, size, axes=("embed", None))
        self.main_norm = rms_norm(first)
        self.layers = [layer_class(_scope_of_layer(scope, i)) for i in range(NUM_LAYERS)]
        self.mixer = parts.make_mixer and parts.make_mixer(last / "norm" / "mixer")
        self.norm = rms_norm(last)
        self.markov_embed = embedding(last / "markov_embed", rank)
        self.markov_head = JaxLmHead(rank, config["vocab_size"], scope.rngs, dtype=scope.dtype, prefix="markov_head")
        self.confidence = linear(last / "confidence", size + rank, 1, axes=(None, None))

    def first_states(self, hidden_states: jax.Array, aux_hidden_states: Sequence[jax.Array]) -> jax.Array:
        """Streams [T, S, E] of the layers that are read -> [T, E]."""
        del hidden_states
        means = [jnp.mean(each.astype(jnp.float32), axis=1).astype(each.dtype) for each in aux_hidden_states]
        return self.main_norm(self.main_proj(jnp.concatenate(means, axis=-1)))

    def __call__(
        self,
        target: DraftTarget,
        kv_caches: list[Any],
        input_ids: jax.Array,
        states: jax.Array,
        attention_metadata: AttentionMetadata,
    ) -> tuple[list[Any], jax.Array]:
        """Writes the states [T, E] of tokens into the caches; arguments as in `PredictionLayer`."""
        del target, input_ids
        attentions = [layer.mixer for layer in self.layers]
        caches = zip(attentions, kv_caches, strict=True)
        return [attention.keep(cache, states, attention_metadata) for attention, cache in caches], states

    def draft_block(
        self, target: DraftTarget, kv_caches: list[Any], newest_ids: jax.Array, attention_metadata: AttentionMetadata
    ) -> tuple[list[Any], DraftBlock]:
        """Drafts after newest_ids i32 [N]; the metadata is of B tokens of each sequence, of which these are the first.

        Their entries are written into the caches, too, where those of the next tokens will be.
        """
        shape = len(newest_ids), self.block_size
        ids = jnp.full(shape, self.noise_token_id, jnp.int32).at[:, 0].set(newest_ids)
        x = target.decoder.first_input(target.decoder.embed(ids.reshape(-1)))
        caches = []
        for layer, cache in zip(self.layers, kv_caches, strict=True):
            updated, x = layer(cache, x, attention_metadata)
            caches.append(updated)
        x = target.decoder.last_output(x)
        states = x if self.mixer is None else self.mixer(x)
        before = target.compute_logits(self.norm(states)).reshape(*shape, -1)
        states, token_ids, drafts, logits, chances = states.reshape(*shape, -1), newest_ids, [], [], []
        for i in range(self.block_size):
            change = self.markov_embed(token_ids)
            logits.append(before[:, i] + self.markov_head(change))
            chance = self.confidence(jnp.concatenate([states[:, i], change], axis=-1).astype(jnp.float32))
            chances.append(jax.nn.sigmoid(chance[:, 0]))
            # The index is meaningless if logits are not finite.
            token_ids = jnp.clip(argmax(logits[-1])[0], 0, logits[-1].shape[-1] - 1)
            drafts.append(token_ids)
        return caches, DraftBlock(*(jnp.stack(each, axis=1) for each in (drafts, logits, chances)))


def _scope_of_layer(scope: LayerScope, number: int) -> LayerScope:
    """Returns the scope of a layer that drafts, whose config has its number of experts."""
    config, model_config = scope.config, scope.vllm_config.model_config
    own = {
        "n_routed_experts": config.get("dspark_n_routed_experts"),
        "num_experts_per_tok": config.get("dspark_num_experts_per_tok"),
    }
    changed = config.with_values({key: value for key, value in own.items() if value})
    vllm_config = dataclasses.replace(
        scope.vllm_config, model_config=dataclasses.replace(model_config, hf_config=changed)
    )
    index = config["num_hidden_layers"] + number
    return dataclasses.replace(scope / f"mtp.{number}", layer_index=index, vllm_config=vllm_config)
