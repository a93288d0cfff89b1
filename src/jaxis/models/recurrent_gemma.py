"""RecurrentGemma (Griffin, arXiv:2402.19427): linear recurrences, with windowed attention in every third layer."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from jaxis.config.hf_config import HFConfig
from jaxis.config.layer_types import SLIDING_ATTENTION, layer_span
from jaxis.config.rope_config import rope_config
from jaxis.kernels.gates import gated, softplus
from jaxis.kernels.materialize import in_whole_vectors, materialize
from jaxis.kernels.selective_scan import ScanOperands, selective_scan
from jaxis.kernels.weights import head_matmul
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.causal_conv import CausalConv
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.leaves import linear
from jaxis.layers.mlp import GatedMLP, activation_function
from jaxis.layers.module import JaxModule, make_parameter
from jaxis.layers.scope import LayerScope
from jaxis.layers.state_cache_spec import StateArray, StateCacheSpec
from jaxis.models.common.decoder import DecoderModel, DecoderOptions
from jaxis.models.common.family import Family
from jaxis.models.common.gemma import GemmaCausalLM, gemma_activation

State = tuple[jax.Array, jax.Array] | None
"""Inputs of the convolution and the recurrent state; None without a cache."""

_BLOCK_TYPES = ("recurrent", "recurrent", "attention")
_SHARPNESS = 8.0  # the paper's c
_TILE_TOKENS = 16


class RgLru(JaxModule):
    """The real-gated linear recurrent unit: `h[t] = a[t] * h[t - 1] + sqrt(1 - a[t] ** 2) * input_gate[t] * x[t]`.

    The logarithm of `a[t]` is `-8 * recurrent_gate[t] * softplus(recurrent_param)`; a sequence begins with
    `h[0] = input_gate[0] * x[0]`. The gates are sigmoids of products with a matrix [in, out] for each head.
    """

    def __init__(self, scope: LayerScope, num_channels: int) -> None:
        self.num_channels = num_channels
        self.num_heads: int = scope.config["num_attention_heads"]
        size = num_channels // self.num_heads
        init, zeros = nnx.initializers.lecun_normal(), nnx.initializers.zeros
        shape, rngs, dtype = (self.num_heads, size), scope.rngs, scope.dtype
        self.recurrent_param = make_parameter(rngs, zeros, (num_channels,), dtype, axes=("heads",))
        self.input_gate_weight = make_parameter(rngs, init, (*shape, size), dtype, axes=("heads", None, None))
        self.input_gate_bias = make_parameter(rngs, zeros, shape, dtype, axes=("heads", None))
        self.recurrent_gate_weight = make_parameter(rngs, init, (*shape, size), dtype, axes=("heads", None, None))
        self.recurrent_gate_bias = make_parameter(rngs, zeros, shape, dtype, axes=("heads", None))

    @property
    def state_array(self) -> StateArray:
        return StateArray((1, self.num_channels), (None, "heads"), jnp.float32)

    def __call__(
        self, state: jax.Array | None, x: jax.Array, metadata: AttentionMetadata
    ) -> tuple[jax.Array | None, jax.Array]:
        """Returns the updated state and [T, C], for a state [num_slots, 1, C] or None, and x [T, C]."""
        values = x.astype(jnp.float32)
        inputs = gated(values, self._logits(values, self.input_gate_weight, self.input_gate_bias), "sigmoid")
        logits = self._logits(values, self.recurrent_gate_weight, self.recurrent_gate_bias)
        steps = gated(jnp.ones_like(values), logits, "sigmoid")
        # Nothing precedes a sequence's first token: its step matters to its own input alone, which it must not change.
        is_first = (metadata.input_positions == 0)[:, None]
        steps = jnp.where(is_first, 1.0, jnp.maximum(steps, jnp.finfo(jnp.float32).tiny))
        param = self.recurrent_param[...].astype(jnp.float32)
        rates = -_SHARPNESS * softplus(param[None], jnp.zeros_like(param))[0]
        # Mamba's scan with one element of state per channel multiplies its input by the step, which is undone here.
        scaled = inputs * jnp.where(is_first, 1.0, _input_scale(steps * rates)) / steps
        ones = jnp.ones((x.shape[0], 1), jnp.float32)
        operands = ScanOperands(
            x=materialize(scaled),
            dt=steps,
            a=rates[:, None],
            b=ones,
            c=ones,
            d=jnp.zeros_like(param),
            states=metadata.states(state),
        )
        state, out = selective_scan(operands)
        return state, out.astype(x.dtype)

    def _logits(self, x: jax.Array, weight: nnx.Param, bias: nnx.Param) -> jax.Array:
        """x float32 [T, C] -> the logits of a gate, float32 [T, C]."""
        matrices = materialize(weight[...].astype(jnp.float32).swapaxes(1, 2))
        # By as many tokens at a time, whatever the step: XLA's sums, and last bits, depend on the number of rows.
        padded = materialize(jnp.pad(x, ((0, -x.shape[0] % _TILE_TOKENS), (0, 0))))
        tiles = padded.reshape(-1, _TILE_TOKENS, self.num_heads, x.shape[1] // self.num_heads)
        logits = jax.lax.map(lambda tile: head_matmul(tile, matrices), tiles).reshape(padded.shape)[: x.shape[0]]
        return materialize(logits) + bias[...].astype(jnp.float32).reshape(-1)


def _input_scale(log_decays: jax.Array) -> jax.Array:
    """Returns `sqrt(1 - a ** 2)` of logarithms of a; its derivative is finite where a is 1."""
    squares = -in_whole_vectors(jnp.expm1, 2.0 * log_decays)
    return jnp.sqrt(jnp.maximum(squares, jnp.finfo(jnp.float32).tiny))


class RecurrentBlock(JaxModule):
    """`linear_out(rg_lru(conv_1d(linear_x(x))) * act(linear_y(x)))`, in place of attention."""

    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        size: int = config["hidden_size"]
        channels: int = config.get("lru_width") or size
        if channels % config["num_attention_heads"]:
            raise config.fault("lru_width", "num_attention_heads", why="expected heads that divide the width")
        in_axes, out_axes = ("heads", "embed"), ("embed", "heads")
        self.linear_y = linear(scope / "linear_y", size, channels, axes=in_axes, use_bias=True)
        self.linear_x = linear(scope / "linear_x", size, channels, axes=in_axes, use_bias=True)
        width: int = config.get("conv1d_width", 4)
        self.conv_1d = CausalConv(scope / "conv_1d", channels, width, use_bias=True, activation=None)
        self.rg_lru = RgLru(scope / "rg_lru", channels)
        self.linear_out = linear(scope / "linear_out", channels, size, axes=out_axes, use_bias=True)
        self.activation = activation_function(gemma_activation(config))

    @property
    def state_cache_spec(self) -> StateCacheSpec:
        return StateCacheSpec((self.conv_1d.state_array, self.rg_lru.state_array))

    def __call__(self, kv_cache: State, x: jax.Array, metadata: AttentionMetadata) -> tuple[State, jax.Array]:
        inputs, recurrent = (None, None) if kv_cache is None else kv_cache
        gate = self.activation(self.linear_y(x))
        inputs, mixed = self.conv_1d(inputs, self.linear_x(x), metadata)
        recurrent, mixed = self.rg_lru(recurrent, mixed, metadata)
        state = None if inputs is None or recurrent is None else (inputs, recurrent)
        return state, self.linear_out(mixed * gate)


class RecurrentGemmaDecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        mixer = scope / "self_attn"
        super().__init__(
            scope,
            self_attn=_attention(mixer) if _has_attention(config, scope.layer_index) else RecurrentBlock(mixer),
            mlp=GatedMLP(
                scope / "mlp",
                intermediate_size=config["intermediate_size"] // 2,
                activation=gemma_activation(config),
                use_bias=True,
            ),
        )


def _has_attention(config: HFConfig, layer_index: int) -> bool:
    """Returns whether this is a layer of attention, by the types that repeat. Raises ConfigError for unknown types."""
    types = config.get("block_types", list(_BLOCK_TYPES))
    if not isinstance(types, list) or not types or not set(types) <= set(_BLOCK_TYPES):
        raise config.fault("block_types", why="expected a list of 'recurrent' and 'attention'")
    return types[layer_index % len(types)] == "attention"


def _attention(scope: LayerScope) -> GroupedQueryAttention:
    config = scope.config
    return GroupedQueryAttention(
        scope,
        rope_settings=rope_config(config, default_partial_rotary_factor=0.5),
        qkv_bias=config.get("attention_bias", False),
        o_bias=True,
        span=layer_span(config, SLIDING_ATTENTION, default_window=2048),
    )


class RecurrentGemmaModel(DecoderModel):
    def first_input(self, x: jax.Array) -> jax.Array:
        """Rounds the scaled embeddings, which some programs would fuse with the sum of the first layer."""
        return materialize(x)


class RecurrentGemmaForCausalLM(GemmaCausalLM):
    layer_class = RecurrentGemmaDecoderLayer
    model_class = RecurrentGemmaModel
    default_logits_soft_cap = 30.0
    renames = (
        ("model.final_norm", "model.norm"),
        ("temporal_pre_norm", "input_layernorm"),
        ("temporal_block", "self_attn"),
        ("channel_pre_norm", "post_attention_layernorm"),
        ("mlp_block", "mlp"),
    )

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        # The reference computes the size of heads, and always scales the embeddings.
        config.expect("head_dim", config["hidden_size"] // config["num_attention_heads"])
        config.expect("embeddings_scale_by_sqrt_dim", True)

    @classmethod
    def options(cls, scope: LayerScope) -> DecoderOptions:
        # In bfloat16 whatever the model's type, and applied to `inputs_embeds`, too.
        factor = float(np.asarray(scope.config["hidden_size"] ** 0.5, ml_dtypes.bfloat16))
        return dataclasses.replace(super().options(scope), embed_scale=1.0, embedding_multiplier=factor)


FAMILY = Family(
    "RecurrentGemma",
    (RecurrentGemmaForCausalLM,),
    "gated linear recurrences with short convolutions in two of three layers; attention with a window in the third",
    names={
        "recurrent_gemma": {"attention_window_size": "sliding_window", "logits_soft_cap": "final_logit_softcapping"}
    },
    # The length of its training; config.json has none.
    defaults={"recurrent_gemma": {"max_position_embeddings": 8192}},
    tiny={
        # Of which the square root is not exact in bfloat16.
        "hidden_size": 96,
        "head_dim": 24,
        "lru_width": 80,
        # The types of layers repeat.
        "num_hidden_layers": lambda twin: 2 * len(twin.get("block_types", _BLOCK_TYPES)),
    },
)
