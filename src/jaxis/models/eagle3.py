"""EAGLE-3 heads (arXiv:2503.01840): one layer that drafts tokens from hidden states of three layers of its target.

Files of two formats are read: those of SpecForge and of the paper's authors, and those of speculators, whose
config.json nests the layer's settings in `transformer_layer_config`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxis.config.hf_config import HFConfig
from jaxis.errors import ConfigError
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.decoder_layer import LayerCache, LayerOutput
from jaxis.layers.embed import JaxLmHead
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.leaves import embedding, linear, rms_norm
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.module import JaxModule, make_parameter
from jaxis.layers.scope import LayerScope
from jaxis.loading.open_checkpoint import TensorListing
from jaxis.models.common.interfaces import DraftTarget, LoadableWithIterator

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.config.quantization import QuantizationConfig

ARCHITECTURES = (
    *("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel"),
    *("Qwen3ForCausalLMEagle3", "Eagle3Qwen3ForCausalLM"),
)
NUM_TARGET_LAYERS = 3
_NOT_LOADED = ("t2d", "verifier_lm_head.weight", "verifier_norm.weight")


class Eagle3Attention(GroupedQueryAttention):
    """Attention of embeddings and states side by side."""

    num_inputs = 2


class Eagle3Layer(JaxModule):
    """A decoder layer that attends with the embeddings of tokens as well as their states.

    With `norm_before_residual`, the attention's output is added to the normed states, else to the states. With
    `qk_norm`, queries and keys have norms.
    """

    def __init__(self, scope: LayerScope, *, norm_before_residual: bool, qk_norm: bool) -> None:
        config = scope.config
        use_bias = config.get("attention_bias", False)
        self.norm_before_residual = norm_before_residual
        self.input_layernorm = rms_norm(scope)
        self.hidden_norm = rms_norm(scope)
        self.self_attn = Eagle3Attention(scope / "self_attn", qkv_bias=use_bias, o_bias=use_bias, qk_norm=qk_norm)
        self.post_attention_layernorm = rms_norm(scope)
        self.mlp = GatedMLP(scope / "mlp", use_bias=config.get("mlp_bias", False))

    def __call__(
        self, kv_cache: LayerCache, embeddings: jax.Array, x: jax.Array, metadata: AttentionMetadata
    ) -> LayerOutput:
        """Embeddings and x [T, E] -> the updated cache (None without one) and [T, E]."""
        normed = self.hidden_norm(x)
        both = jnp.concatenate([self.input_layernorm(embeddings), normed], axis=-1)
        kv_cache, attended = self.self_attn(kv_cache, both, metadata)
        x = (normed if self.norm_before_residual else x) + attended
        return kv_cache, x + self.mlp(self.post_attention_layernorm(x))


class Eagle3Head(JaxModule, LoadableWithIterator):
    """A head that drafts tokens for a target model.

    The first draft's state is computed from the target's states (`first_states`), the next ones are the layer's
    results. Logits are over the draft vocabulary, which has only the most frequent tokens. The configuration has the
    head's folder and the target's `max_model_len`.

    Attributes:
      reads_next_token: True: a token's row takes the token that follows, and has this token's position.
      embed_tokens: Embeddings of the head; None if its checkpoint has none, for the target's.
      d2t: i32 [V'], difference between token id and index in the draft vocabulary; None if they are equal.

    Raises:
      ConfigError: config.json asks for something that is not supported.
    """

    reads_next_token = True

    def __init__(self, vllm_config: VllmConfig, rng: nnx.Rngs, quant_config: QuantizationConfig | None = None) -> None:
        outer: HFConfig = vllm_config.model_config.hf_config
        nested = outer.get("transformer_layer_config")
        config = outer if nested is None else nested
        model_config = dataclasses.replace(vllm_config.model_config, hf_config=config)
        scope = LayerScope(dataclasses.replace(vllm_config, model_config=model_config), rng, quant_config)
        _check_config(outer, config)
        names = _names_in_file(vllm_config)
        size, vocab_size = config["hidden_size"], config["vocab_size"]
        draft_vocab_size = outer.get("draft_vocab_size") or vocab_size
        self.target_size: int = outer.get("target_hidden_size") or size
        self._layer_ids = _listed_layers(outer)
        self.embed_tokens = embedding(scope / "embed_tokens") if "embed_tokens.weight" in names else None
        self.fc = linear(scope / "fc", NUM_TARGET_LAYERS * self.target_size, size, axes=("embed", None))
        self.midlayer = Eagle3Layer(
            scope / "midlayer",
            norm_before_residual=outer.get("norm_before_residual", False),
            qk_norm="midlayer.self_attn.q_norm.weight" in names,
        )
        self.norm = rms_norm(scope)
        self.lm_head = JaxLmHead(
            size, draft_vocab_size, rng, dtype=scope.dtype, quant_config=quant_config, prefix="lm_head"
        )
        self.d2t = None
        if "d2t" in names or draft_vocab_size != vocab_size:
            self.d2t = make_parameter(rng, nnx.initializers.zeros, (draft_vocab_size,), jnp.int32, axes=(None,))

    def target_layers(self, num_layers: int) -> tuple[int, ...]:
        """Returns the layers whose inputs the head reads, of a target with `num_layers` layers.

        Raises ConfigError if config.json names layers that the target does not have.
        """
        layers = self._layer_ids or (2, num_layers // 2, num_layers - 3)
        is_ascending = all(a < b for a, b in itertools.pairwise(layers))
        if len(layers) != NUM_TARGET_LAYERS or not is_ascending or layers[0] < 0 or layers[-1] > num_layers:
            raise ConfigError(
                f"the EAGLE-3 head reads the states that enter layers {', '.join(map(str, layers))}, expected "
                f"{NUM_TARGET_LAYERS} of the model's {num_layers}, in their order: it was not trained for this model"
            )
        return tuple(layers)

    def first_states(self, hidden_states: jax.Array, aux_hidden_states: Sequence[jax.Array]) -> jax.Array:
        """Input states of the target's layers, each [T, E of the target] -> [T, E]."""
        del hidden_states
        return self.fc(jnp.concatenate(aux_hidden_states, axis=-1))

    def __call__(
        self,
        target: DraftTarget,
        kv_caches: list[Any] | None,
        next_ids: jax.Array,
        states: jax.Array,
        attention_metadata: AttentionMetadata,
    ) -> tuple[list[Any] | None, jax.Array]:
        """Runs the layer over a flat batch; arguments as in `PredictionLayer`."""
        embed = target.decoder.embed if self.embed_tokens is None else self.embed_tokens
        cache = None if kv_caches is None else kv_caches[0]
        cache, states = self.midlayer(cache, embed(next_ids), states, attention_metadata)
        return None if kv_caches is None else [cache], states

    def compute_logits(self, target: DraftTarget, states: jax.Array) -> jax.Array:
        """States [T, E] -> float32 logits [T, V'] of the draft vocabulary."""
        del target
        return self.lm_head(self.norm(states))

    def token_ids(self, indices: jax.Array) -> jax.Array:
        """Indices into the logits -> token ids of the target."""
        return indices if self.d2t is None else indices + self.d2t[...][indices]

    def load_weights(self, weights: Iterable[tuple[str, np.ndarray]]) -> set[str]:
        named = ((_parameter_name(name), tensor) for name, tensor in weights)
        return super().load_weights((name, tensor) for name, tensor in named if name not in _NOT_LOADED)


def _parameter_name(name_in_file: str) -> str:
    name = name_in_file.removeprefix("model.")
    return f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name


def _names_in_file(vllm_config: VllmConfig) -> set[str]:
    """Returns the parameters in the checkpoint: heads have different ones, and config.json does not say which."""
    if vllm_config.load_config.load_format == "dummy":
        return set()
    return {_parameter_name(name) for name in TensorListing(vllm_config.model_config.model)}


def _listed_layers(config: HFConfig) -> tuple[int, ...]:
    key = "eagle_aux_hidden_state_layer_ids"
    eagle_config = config.read_object("eagle_config") or {}
    return tuple(config.get(key) or eagle_config.get(key) or ())


def _check_config(outer: HFConfig, layer: HFConfig) -> None:
    eagle_config = outer.read_object("eagle_config") or {}
    if not eagle_config.get("use_aux_hidden_state", True):
        raise ConfigError(f"{outer.source} has use_aux_hidden_state=false, of which only true is supported")
    outer.expect("norm_before_fc", False)
    layer.expect_all(num_hidden_layers=1, use_sliding_window=False, logit_scale=1.0)
    for key in ("tie_word_embeddings", "sliding_window", "max_window_layers", "layer_types"):
        layer.ignore(key, because="the checkpoint has the head, and its layer sees all tokens")
    for key in ("speculators_config", "speculators_model_type", "speculators_version", "has_no_defaults_at_init"):
        outer.ignore(key, because="it says how the head was trained, or how another program runs it")
    outer.ignore("embed_requires_grad", "enable_sp_ulysses", "tie_word_embeddings", because="it concerns training")
