from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.config.rope_config import RopeConfig, rope_config
from jaxis.errors import ConfigError
from jaxis.kernels.rotary_embedding import HeadNorms
from jaxis.layers.alibi import Alibi
from jaxis.layers.attention import apply_rope, attention
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.kv_cache_spec import KVCacheSpec
from jaxis.layers.leaves import linear, rms_norm
from jaxis.layers.linear import apply_together
from jaxis.layers.module import JaxModule, calls_are_observed, make_parameter
from jaxis.layers.norm import HeadLayerNorms, JaxLayerNorm, JaxRmsNorm, L2Clip
from jaxis.layers.output_gate import OutputGate
from jaxis.layers.qkv_packing import QKVPacking
from jaxis.layers.rope import make_rotary_embedding
from jaxis.layers.row_order import RowOrder, has_movable_rows, put_in_order
from jaxis.layers.scope import LayerScope
from jaxis.layers.uncached import KVCache, is_cache
from jaxis.layers.weight_loader import place_array
from jaxis.parallel.mesh import devices_of_layer

HeadNorm = JaxRmsNorm | JaxLayerNorm | HeadLayerNorms | L2Clip
MakeHeadNorm = Callable[[int, int], HeadNorm]
"""(number of heads, D) -> a norm of queries or keys. Its weight is [D] for a norm over each head, [heads, D] for each
head with weights of its own, [heads * D] for a norm over all heads together.
"""

ScaleQueries = Callable[[jax.Array, jax.Array], jax.Array]
"""(rotated queries [T, H, D], positions [T]) -> the queries that keys are multiplied with."""


class GroupedQueryAttention(JaxModule):
    """Self-attention whose H query heads share K key-value heads (arXiv:2305.13245).

    Sizes are config.json's: `hidden_size` E, `num_attention_heads` H, `num_key_value_heads` K, `head_dim` D. Families
    override the attributes and methods without an underscore for what they alone have.

    Args:
      num_heads, num_kv_heads: H and K of this layer; None means config.json's.
      head_dim: D for a config.json without it; None means E / H.
      layer_head_dim: D of this layer; None means config.json's.
      use_rope: True to rotate queries and keys; False for a layer without positional encoding.
      rope_settings: Rope of this layer; None means config.json's settings for all layers.
      interleaved_rope: True if the rope pairs neighbouring dimensions.
      alibi: Biases of scores by distance; None for none.
      scale: Multiplies the scores; None means D ** -0.5.
      use_bias: True if all projections have biases.
      qkv_bias, o_bias: True if those projections alone have biases.
      packing: Order of the rows of the checkpoint's one `qkv_proj`; None if it has three matrices.
      qkv_clip: Bound of the magnitude of queries, keys and values; None for none.
      qk_norm: Function that creates the norms of queries and keys; True for an RMS norm over each head; False for none.
      norm_after_rope: True to apply these norms after the rope, False before it.
      query_scale: Multiplies rotated queries, such as by factors that depend on their positions; None for none.
      span: The tokens that a token sees.
      soft_cap: Scores become `soft_cap * tanh(scores / soft_cap)`.
      use_sinks: True for a parameter `sinks` [H], one extra score per head that has no value.
      output_gate: Multiplies the output before `o_proj`; None for no gate.

    Raises:
      ConfigError: config.json's rope is not supported, or heads with ALiBi share keys.
    """

    num_inputs: ClassVar[int] = 1
    """Number of vectors [E] that x has side by side for each token."""
    kv_projections: ClassVar[tuple[str, ...]] = ("k_proj", "v_proj")
    """Names of the projections of keys and values in a checkpoint without packing."""

    def __init__(
        self,
        scope: LayerScope,
        *,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        layer_head_dim: int | None = None,
        use_rope: bool = True,
        rope_settings: RopeConfig | None = None,
        interleaved_rope: bool = False,
        alibi: Alibi | None = None,
        scale: float | None = None,
        use_bias: bool = False,
        qkv_bias: bool = False,
        o_bias: bool = False,
        packing: QKVPacking | None = None,
        qkv_clip: float | None = None,
        qk_norm: MakeHeadNorm | bool = False,
        norm_after_rope: bool = False,
        query_scale: ScaleQueries | None = None,
        span: AttentionSpan = FULL_CONTEXT,
        soft_cap: float | None = None,
        use_sinks: bool = False,
        output_gate: OutputGate | None = None,
    ) -> None:
        config = scope.config
        hidden_size: int = config["hidden_size"]
        input_size = self.num_inputs * hidden_size
        self.num_heads: int = num_heads or config["num_attention_heads"]
        self.num_kv_heads: int = num_kv_heads or config.get("num_key_value_heads") or self.num_heads
        common_head_dim: int = config.get("head_dim") or head_dim or hidden_size // self.num_heads
        self.head_dim: int = layer_head_dim or common_head_dim
        self.value_dim = self.size_of_values(scope)
        if alibi is not None and self.num_kv_heads != self.num_heads:
            raise ConfigError(f"{config.source} has ALiBi with heads that share keys, which is not supported")
        self.alibi = alibi
        self.cached_dim = self.head_dim if alibi is None else alibi.dims_with(self.head_dim)
        self.rope = None
        if use_rope:
            self.rope = make_rotary_embedding(
                rope_settings or rope_config(config),
                head_dim=self.head_dim,
                max_model_len=scope.max_model_len,
                interleaved=interleaved_rope,
            )
        self.scale = self.head_dim**-0.5 if scale is None else scale
        self.span = span
        self.soft_cap = soft_cap
        q_norm = k_norm = None
        if qk_norm:
            make_norm = (lambda _, head_dim: rms_norm(scope, head_dim)) if qk_norm is True else qk_norm
            q_norm, k_norm = (make_norm(heads, self.head_dim) for heads in (self.num_heads, self.num_kv_heads))
        self.output_gate = output_gate
        heads, kv_heads = ("heads", "embed"), ("kv_heads", "embed")
        qkv_bias, o_bias = use_bias or qkv_bias, use_bias or o_bias
        q_size = self._q_size
        self.qkv_proj = None
        self.qkv_clip = qkv_clip
        self.packing = packing
        if packing is not None:
            self.packing = dataclasses.replace(packing, num_parts=packing.num_parts or self.num_kv_heads)
            qkv_size = q_size + 2 * self.num_kv_heads * self.head_dim
            self.qkv_proj = linear(scope / "qkv_proj", input_size, qkv_size, axes=heads, use_bias=qkv_bias)
        else:
            self.q_proj = linear(scope / "q_proj", input_size, q_size, axes=heads, use_bias=qkv_bias)
            for name, dim in zip(self.kv_projections, (self.head_dim, self.value_dim), strict=False):
                size = self.num_kv_heads * dim
                setattr(self, name, linear(scope / name, input_size, size, axes=kv_heads, use_bias=qkv_bias))
        if output_gate is not None and output_gate.name is not None:
            gate_size = self.num_heads if output_gate.per_head else self.num_heads * self.value_dim
            gate_proj = linear(scope / output_gate.name, input_size, gate_size, axes=heads)
            setattr(self, output_gate.name, gate_proj)
        o_size = self.num_heads * self.value_dim
        self.o_proj = linear(scope / "o_proj", o_size, hidden_size, axes=("embed", "heads"), use_bias=o_bias)
        self.q_norm, self.k_norm = q_norm, k_norm
        self.norm_after_rope = norm_after_rope
        self.query_scale: ScaleQueries | None = query_scale
        self.sinks = None
        if use_sinks:
            zeros = nnx.initializers.zeros
            self.sinks = make_parameter(scope.rngs, zeros, (self.num_heads,), scope.dtype, axes=("heads",))

    @property
    def kv_cache_spec(self) -> KVCacheSpec:
        holds_biases = self.alibi is not None
        return KVCacheSpec(self.num_kv_heads, self.cached_dim, self.span, self.num_heads, holds_biases=holds_biases)

    def row_orders(self, num_devices: int) -> list[RowOrder]:
        """Returns the row orders of projections on `num_devices` devices, as far as they differ from the checkpoint's.

        With fewer key-value heads than devices, each device has the one that its queries use. A packed projection
        begins with the first device's queries, keys and values. Raises ConfigError if the devices cannot share the
        heads equally.
        """
        copies = self.kv_cache_spec.on_devices(num_devices).num_kv_heads // self.num_kv_heads
        if self.qkv_proj is None or self.packing is None:
            projections = [getattr(self, name) for name in self.kv_projections]
            if copies == 1 or not all(map(has_movable_rows, projections)):
                return []
            rows = [np.arange(self.num_kv_heads * dim).reshape(-1, dim) for dim in (self.head_dim, self.value_dim)]
            return [
                RowOrder(each, np.repeat(heads, copies, axis=0).ravel())
                for each, heads in zip(projections, rows, strict=False)
            ]
        is_same = copies == 1 and self.packing.num_parts % num_devices == 0
        if num_devices == 1 or not has_movable_rows(self.qkv_proj) or is_same:
            return []
        q_rows, *of_keys = self.packing.rows(self._q_size, self.num_kv_heads * self.head_dim)
        parts = [q_rows, *(np.repeat(rows.reshape(self.num_kv_heads, -1), copies, axis=0) for rows in of_keys)]
        rows = np.concatenate([part.reshape(num_devices, -1) for part in parts], axis=1)
        return [RowOrder(self.qkv_proj, rows.ravel())]

    def after_loading(self) -> None:
        """Puts the rows of projections in the order of the devices, and repeats the norms of repeated keys."""
        num_devices = devices_of_layer()
        orders = self.row_orders(num_devices)
        if not orders:
            return
        for order in orders:
            put_in_order(order)
        if self.qkv_proj is not None:
            self.packing = QKVPacking(num_devices)
        copies = max(1, num_devices // self.num_kv_heads)
        weight = None if self.k_norm is None else self.k_norm.weight
        if weight is not None and weight.shape != (self.head_dim,) and copies > 1:
            _repeat_heads(weight, self.head_dim, copies)

    def __call__(self, kv_cache: KVCache, x: jax.Array, metadata: AttentionMetadata) -> tuple[KVCache, jax.Array]:
        q, k, v, gate = self.heads(x, metadata, is_paged=is_cache(kv_cache))
        kv_cache, out = attention(
            kv_cache,
            q,
            k,
            v,
            metadata,
            rope=None,
            scale=self.scale,
            span=self.span,
            soft_cap=self.soft_cap,
            sinks=None if self.sinks is None else self.sinks[...],
        )
        return kv_cache, self.output(out, gate)

    def heads(
        self, x: jax.Array, metadata: AttentionMetadata, *, is_paged: bool
    ) -> tuple[jax.Array, jax.Array, jax.Array, list[jax.Array]]:
        """Returns queries [T, H, D], keys and values [T, K, D] with copies, as they are attended to, and gate logits.

        `is_paged` is True if the keys go into a cache.
        """
        return self.heads_of(self.project(x), metadata, is_paged=is_paged)

    def heads_of(
        self, projected: list[jax.Array], metadata: AttentionMetadata, *, is_paged: bool
    ) -> tuple[jax.Array, jax.Array, jax.Array, list[jax.Array]]:
        """Returns `heads` of what `project` returns."""
        q, k, v, *gate = projected
        num_tokens = q.shape[0]
        if self.qkv_clip is not None:
            q, k, v = (jnp.clip(each, -self.qkv_clip, self.qkv_clip) for each in (q, k, v))
        norms = self._norms_of_rope_kernel()
        if norms is None and not self.norm_after_rope:
            q, k = self._normed(q, k)
        q = q.reshape(num_tokens, self.num_heads, self.head_dim)
        # The number of heads may be larger than the model's: `after_loading` repeats them for devices.
        k = k.reshape(num_tokens, -1, self.head_dim)
        v = self.values(v.reshape(num_tokens, -1, self.value_dim))
        if self.value_dim < self.cached_dim:
            v = jnp.pad(v, ((0, 0), (0, 0), (0, self.cached_dim - self.value_dim)))
        q, k = apply_rope(self.rope, q, k, metadata, norms=norms, is_paged=is_paged)
        if self.norm_after_rope:
            q, k = self._normed(q, k)
        if self.query_scale is not None:
            q = self.query_scale(q, metadata.input_positions)
        if self.alibi is not None:
            q, k = self.alibi.extend(q, k, metadata.input_positions, scale=self.scale)
        return q, k, v, gate

    def output(self, out: jax.Array, gate: list[jax.Array]) -> jax.Array:
        """Returns [T, E] for attention [T, H, D] and the gate's logits."""
        out = out[..., : self.value_dim]
        if self.output_gate is not None:
            out = self.output_gate(out, *gate)
        return self.project_output(out.reshape(out.shape[0], self.num_heads * self.value_dim))

    def project_output(self, attended: jax.Array) -> jax.Array:
        """All heads' values [T, H * V] -> attention's output [T, E]; overridden by families that norm them."""
        return self.o_proj(attended)

    def values(self, v: jax.Array) -> jax.Array:
        """Projected values [T, K, V] -> the values attended to; overridden by families that scale or norm them."""
        return v

    def size_of_values(self, scope: LayerScope) -> int:  # noqa: ARG002 (config.json's may differ from D)
        """Returns the size of a value head, at most D, which fills it up with zeros in the cache; D for packed rows."""
        return self.head_dim

    @property
    def _q_size(self) -> int:
        q_size = self.num_heads * self.head_dim
        has_gate = self.output_gate is not None and self.output_gate.is_in_queries
        return 2 * q_size if has_gate else q_size

    def project(self, x: jax.Array) -> list[jax.Array]:
        """Returns queries [T, H * D], keys [T, K * D] with copies, values, and any logits of the gate, of x."""
        num_tokens, gate = x.shape[0], self.output_gate
        gate_proj = [] if gate is None or gate.name is None else [getattr(self, gate.name)]
        if self.qkv_proj is None or self.packing is None:
            kv_proj = [getattr(self, name) for name in self.kv_projections]
            projected = apply_together(x, self.q_proj, *kv_proj, *gate_proj)
        else:
            qkv = self.packing.split(self.qkv_proj(x), self._q_size)
            projected = [*qkv, *(layer(x) for layer in gate_proj)]
        if gate is None or not gate.is_in_queries:
            return projected
        q_and_gate, k, v = projected
        q, logits = jnp.split(q_and_gate.reshape(num_tokens, self.num_heads, 2 * self.head_dim), 2, axis=-1)
        return [q.reshape(num_tokens, -1), k, v, logits]

    def _norms_of_rope_kernel(self) -> HeadNorms | None:
        """Returns the norms that `apply_rope` can fuse with the rope into one kernel; None for other kinds of norms."""
        q_norm, k_norm = self.q_norm, self.k_norm
        if self.norm_after_rope or calls_are_observed():
            return None
        if not isinstance(q_norm, JaxRmsNorm) or not isinstance(k_norm, JaxRmsNorm):
            return None
        if not q_norm.num_features == k_norm.num_features == self.head_dim:
            return None
        return HeadNorms(q_norm.scale, k_norm.scale, q_norm.epsilon)

    def _normed(self, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        if self.q_norm is None or self.k_norm is None:
            return q, k
        return _apply_norm(self.q_norm, q, self.head_dim), _apply_norm(self.k_norm, k, self.head_dim)


def _repeat_heads(param: nnx.Param, head_dim: int, copies: int) -> None:
    heads = jnp.repeat(param[...].reshape(-1, head_dim), copies, axis=0)
    shape = (-1,) if param.get_value().ndim == 1 else heads.shape
    param.set_value(place_array(heads.reshape(shape), param.get_metadata().get("logical_axes")))


def _apply_norm(norm: HeadNorm, x: jax.Array, head_dim: int) -> jax.Array:
    over_all_heads = len(norm.shape) == 1 and norm.shape != (head_dim,)
    shape = (x.shape[0], -1) if over_all_heads else (x.shape[0], -1, head_dim)
    return norm(x.reshape(shape)).reshape(x.shape)
