"""Dory: a normalized transformer, whose states have length 1; the layers in the middle run twice."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from jaxis.config.hf_config import HFConfig
from jaxis.config.layer_types import FULL_ATTENTION, SLIDING_ATTENTION, layer_span, listed_layer_type
from jaxis.config.rope_config import rope_config
from jaxis.kernels.materialize import materialize
from jaxis.kernels.norms import rms_norm
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.checkpoint_names import CheckpointNames
from jaxis.layers.decoder_layer import LayerCache, LayerOutput
from jaxis.layers.embed import JaxLmHead
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.linear import apply_together
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.module import JaxModule, make_parameter
from jaxis.layers.norm import JaxRmsNorm
from jaxis.layers.output_gate import OutputGate
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM, DecoderOptions, RunOfLayer
from jaxis.models.common.family import Family
from jaxis.models.common.looped import LoopedModel, caches_of_later_runs

_EPSILON = 1e-6


def unit(x: jax.Array) -> jax.Array:
    """Vectors of length 1 in the direction of those along the last axis of x."""
    size = x.shape[-1]
    return rms_norm(x, jnp.full(size, size**-0.5, jnp.float32), epsilon=_EPSILON / size)


class UnitNorm(JaxRmsNorm):
    """Norm that gives vectors the length 1."""

    def __init__(self, scope: LayerScope, size: int) -> None:
        super().__init__(size, scope.rngs, epsilon=_EPSILON / size, use_weight=False)

    @property
    def scale(self) -> jax.Array:
        return jnp.full(self.num_features, self.num_features**-0.5, jnp.float32)


@dataclass(frozen=True)
class UnitGate(OutputGate):
    """An output gate after which the heads of a token together have length 1."""

    def __call__(self, out: jax.Array, logits: jax.Array) -> jax.Array:
        return unit(super().__call__(out, logits).reshape(out.shape[0], -1)).reshape(out.shape)


class QueryGains(JaxModule):
    """Learned factors of the elements of rotated queries."""

    def __init__(self, scope: LayerScope, num_heads: int, head_dim: int) -> None:
        self.factor = head_dim**0.5 / _initial(scope.config)
        self.sqk = _gains(scope, num_heads * head_dim, axis="heads")

    def __call__(self, q: jax.Array, positions: jax.Array) -> jax.Array:
        del positions
        return (q * jnp.square(self.sqk[...] * self.factor).reshape(q.shape[1:])).astype(q.dtype)


class DoryAttention(GroupedQueryAttention):
    """Gated attention with queries, keys and outputs of length 1."""

    def __init__(self, scope: LayerScope, kind: str) -> None:
        config = scope.config
        super().__init__(
            scope,
            rope_settings=rope_config(config, kind, default_theta=10_000_000.0, default_local_theta=10_000.0),
            qk_norm=lambda _, head_dim: UnitNorm(scope, head_dim),
            span=layer_span(config, kind, default_window=1024),
            output_gate=UnitGate("gate_proj"),
        )
        self.query_scale = QueryGains(scope, self.num_heads, self.head_dim)
        self.s_gate = _gains(scope, self.num_heads * self.head_dim, axis="heads")
        self.gate_factor = config["hidden_size"] ** 0.25 / _initial(config)

    def project(self, x: jax.Array) -> list[jax.Array]:
        *projected, gate = super().project(x)
        return [*projected, (gate * jnp.square(self.s_gate[...] * self.gate_factor)).astype(gate.dtype)]


class DoryMLP(GatedMLP):
    """`down_proj(unit(act(gate_proj(x) * a) * up_proj(x) * b))`, with a learned a and b of each element."""

    def __init__(self, scope: LayerScope) -> None:
        super().__init__(scope)
        size: int = scope.config["intermediate_size"]
        self.suv_gate, self.suv_up = (_gains(scope, size, axis="mlp") for _ in range(2))
        self.factor = scope.config["hidden_size"] ** 0.5

    def __call__(self, x: jax.Array, _metadata: AttentionMetadata | None = None) -> jax.Array:
        gate, up = apply_together(x, self.gate_proj, self.up_proj)
        gate = materialize((gate * (self.suv_gate[...] * self.factor)).astype(x.dtype))
        up = (up * (self.suv_up[...] * self.factor)).astype(x.dtype)
        return self.down_proj(unit(self.gated_unit(gate, up)))


class DoryDecoderLayer(JaxModule):
    """`x = unit(x)`, then `x = x + rate * (unit(self_attn(x)) - x)`, and both with `mlp`; each element has a rate."""

    def __init__(self, scope: LayerScope) -> None:
        config, index = scope.config, scope.layer_index
        kind = listed_layer_type(config, index * _blocks_per_layer(config), FULL_ATTENTION, SLIDING_ATTENTION)
        self.self_attn = DoryAttention(
            scope / "self_attn", kind or (FULL_ATTENTION if (index + 1) % 4 == 0 else SLIDING_ATTENTION)
        )
        self.mlp = DoryMLP(scope / "mlp")
        size: int = config["hidden_size"]
        self.lambda_1, self.lambda_2 = (_gains(scope, size) for _ in range(2))
        self.rate_factor = config.get("ngpt_alpha_init", 0.05) / _initial(config)
        num_loops = config.get("n_recurrent_loops", 2) if index in _looped(config) else 1
        self.self_attn_again = caches_of_later_runs(self.self_attn.kv_cache_spec, num_loops)

    def __call__(self, kv_cache: LayerCache, x: jax.Array, metadata: AttentionMetadata) -> LayerOutput:
        x = unit(x)
        kv_cache, attended = self.self_attn(kv_cache, x, metadata)
        x = unit(self._towards(attended, x, self.lambda_1[...]))
        return kv_cache, self._towards(self.mlp(x, metadata), x, self.lambda_2[...])

    def _towards(self, block: jax.Array, x: jax.Array, gains: jax.Array) -> jax.Array:
        rate = jnp.abs(gains * self.rate_factor).astype(x.dtype)
        return materialize(x + materialize(rate * (unit(block) - x)))


class DoryHead(JaxLmHead):
    """An output head with a learned factor of each logit."""

    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        super().__init__(config["hidden_size"], config["vocab_size"], **scope.of_weights)
        self.logit_scale = _gains(scope, config["vocab_size"])
        self.logit_factor = 1 / _initial(config)

    def __call__(self, hidden_states: jax.Array) -> jax.Array:
        gains = self.logit_scale[...].astype(jnp.float32) * self.logit_factor
        return materialize(super().__call__(hidden_states) * gains)


class DoryModel(LoopedModel):
    def add_parts(self, scope: LayerScope) -> None:
        self.looped = _looped(scope.config)

    def run_layers(self, x: jax.Array, run: RunOfLayer) -> jax.Array:
        for i in range(self.looped.start):
            x = run(i, x)
        start = self.norm(x)
        for number in range(self.num_runs(self.looped.start)):
            x = self.norm(x) + start
            for i in self.looped:
                x = run(i, x, number)
        for i in range(self.looped.stop, len(self.layers)):
            x = run(i, x)
        return x


def _final_norm(scope: LayerScope) -> UnitNorm:
    return UnitNorm(scope, scope.config["hidden_size"])


class DoryForCausalLM(CausalLM):
    layer_class = DoryDecoderLayer
    make_final_norm = _final_norm
    model_class = DoryModel
    renames = (
        ("backbone", "model"),
        ("model.embeddings", "model.embed_tokens"),
        ("self_attn.g_proj", "self_attn.gate_proj"),
        ("self_attn.sqk", "self_attn.query_scale.sqk"),
    )
    module_renames = ()
    unadaptable = ("lm_head",)  # PEFT adds after the scale of the logits
    # With the last loop's keys and values alone, earlier loops see them of past tokens but their own of new ones:
    # what they see would depend on how the engine cuts prompts into steps.
    supported_values = (("recurrent_kv_cache_mode", "per_loop"), ("attention_bias", False), ("mlp_bias", False))

    @classmethod
    def names_of(cls, config: HFConfig) -> CheckpointNames:
        """Returns the names that transformers saves; published files have two layers where it has one."""
        published = [
            pair
            for i in range(_num_layers(config))
            for pair in (
                (f"layers.{2 * i}.mixer", f"layers.{i}.self_attn"),
                (f"layers.{2 * i}.attn_alpha", f"layers.{i}.lambda_1"),
                (f"layers.{2 * i + 1}.mixer", f"layers.{i}.mlp"),
                (f"layers.{2 * i + 1}.mlp_alpha", f"layers.{i}.lambda_2"),
            )
        ]
        return dataclasses.replace(super().names_of(config), other_names=published)

    @classmethod
    def options(cls, scope: LayerScope) -> DecoderOptions:
        return DecoderOptions(num_layers=_num_layers(scope.config))

    @classmethod
    def head(cls, scope: LayerScope, options: DecoderOptions) -> JaxLmHead:
        del options
        return DoryHead(scope)


def _gains(scope: LayerScope, size: int, *, axis: str | None = None) -> nnx.Param:
    return make_parameter(scope.rngs, nnx.initializers.ones, (size,), scope.dtype, axes=(axis,))


def _initial(config: HFConfig) -> float:
    """Returns the value that stored gains had before training, of which they are multiples."""
    return config.get("initializer_range", 0.0177)


def _blocks_per_layer(config: HFConfig) -> int:
    """Returns 2 if config.json counts attention and feed-forward block of each layer, as published ones do."""
    return 2 if "mlp" in (config.get("layer_types") or ()) else 1


def _num_layers(config: HFConfig) -> int:
    return config["num_hidden_layers"] // _blocks_per_layer(config)


def _looped(config: HFConfig) -> range:
    first, last = (config.get(key, 8) // _blocks_per_layer(config) for key in ("n_input_layers", "n_output_layers"))
    config.ignore("n_recurrent_layers", because="it is the number of all other layers")
    return range(first, _num_layers(config) - last)


FAMILY = Family(
    "Nemotron-Labs Dory",
    (DoryForCausalLM,),
    "states, queries and keys of length 1 (nGPT); the middle layers run twice, with keys and values of each run; "
    "gated attention, a window in three of four layers",
)
