"""Multi-head latent attention: over a paged cache of latents while serving, over whole sequences without one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.errors import ConfigError
from jaxis.kernels import native
from jaxis.kernels.batch import sees_in_request
from jaxis.kernels.latent_attention import context_parallel, latent_attention, latent_cache_layout, layout
from jaxis.kernels.latent_attention.reference import softmax_with_sinks
from jaxis.kernels.paged_cache import CacheLayout, PagedCache
from jaxis.layers.attention_metadata import AttentionMetadata, in_consecutive_blocks
from jaxis.layers.leaves import latent_up_projection, linear, rms_norm
from jaxis.layers.linear import apply_together
from jaxis.layers.module import JaxModule, make_parameter
from jaxis.layers.output_gate import OutputGate
from jaxis.layers.query_scale import ScalesQueries
from jaxis.layers.rope import RotaryEmbedding
from jaxis.layers.scale import scaled
from jaxis.layers.scope import LayerScope
from jaxis.parallel.mesh import on_each_device

# For the norms of latents: the reference uses its default, not the config's value.
LATENT_NORM_EPSILON = 1e-6


@dataclass(frozen=True)
class LatentCacheSpec:
    """Specification of a cache of one compressed latent and one rope key per token, shared by all heads.

    Attributes:
      latent_dim: Elements of a latent.
      rope_dim: Elements of a rope key.
      num_selected: Most tokens that a token attends to, whose entries are read one by one; None: all tokens.
      context_devices: Devices that share each block's tokens; with one, every device has all of them.
    """

    span: ClassVar[AttentionSpan] = FULL_CONTEXT

    latent_dim: int
    rope_dim: int
    num_selected: int | None = None
    context_devices: int = 1

    def layout(self, block_size: int, dtype: DTypeLike) -> CacheLayout:
        if self.context_devices > 1:
            return layout.latent_cache_layout(block_size, self.latent_dim + self.rope_dim, dtype, "context")
        return latent_cache_layout(block_size, self.latent_dim, self.rope_dim, dtype)

    def on_devices(self, tensor_parallel_size: int) -> LatentCacheSpec:
        del tensor_parallel_size
        return self


@dataclass(frozen=True)
class LatentAttentionSizes:
    """Dimensions of tokens and heads at each stage.

    Attributes:
      hidden_size: E.
      num_heads: H.
      q_lora_rank: Size of the queries' latent; None if queries are projected directly.
      kv_lora_rank: L, the size of the latent that keys and values are projected from.
      qk_nope_head_dim: N, the dimensions of a query or key that the rope does not rotate.
      qk_rope_head_dim: R, the dimensions that the rope rotates.
      v_head_dim: V, the dimensions of a value.
    """

    hidden_size: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim


class LatentAttention(JaxModule):
    """Self-attention whose keys and values are linear in one latent per token (arXiv:2405.04434).

    With a paged cache, the projections from the latent are absorbed, so that the cache holds
    `kv_lora_rank + qk_rope_head_dim` elements per token. This takes more arithmetic (about twice as much in a long
    prefill) but reads far less memory in a decode. Without a cache, keys and values are materialized.

    Args:
      rope: Rotates the last `qk_rope_head_dim` dimensions of each query head, and the rope key that all heads share;
        None leaves them as they are.
      scale: Multiplies the scores.
      query_scale: Multiplies queries by factors that depend on their positions; None for none.
      use_bias: True if the projections of hidden states to latents, and of the output, have biases.
      output_gate: Multiplies the output before `o_proj`; None for no gate.
      latent_norm_epsilon: Epsilon of the norms of latents.
      use_sinks: True for a parameter `sinks` [H], one extra score per head that has no value.
      has_latents: False for the latents and rope keys of an earlier layer, instead of projections to its own.

    Attributes:
      latent_multiplier: Factor of the normed latents, which a family sets.

    Raises:
      ConfigError: decode_context_parallel_size would divide the context of attention with sinks.
    """

    latent_multiplier: float = 1.0

    def __init__(
        self,
        scope: LayerScope,
        sizes: LatentAttentionSizes,
        *,
        rope: RotaryEmbedding | None,
        scale: float,
        query_scale: ScalesQueries | None = None,
        use_bias: bool = False,
        output_gate: OutputGate | None = None,
        latent_norm_epsilon: float = LATENT_NORM_EPSILON,
        use_sinks: bool = False,
        has_latents: bool = True,
    ) -> None:
        self.sizes, self.rope, self.scale, self.query_scale = sizes, rope, scale, query_scale
        self.output_gate = output_gate
        self.context_devices = scope.vllm_config.parallel_config.decode_context_parallel_size
        self._gate_name = None if output_gate is None else output_gate.name
        hidden_size, latent_axes = sizes.hidden_size, (None, "embed")
        q_size, v_size = sizes.num_heads * sizes.qk_head_dim, sizes.num_heads * sizes.v_head_dim
        if sizes.q_lora_rank is None:
            self.q_proj = linear(scope / "q_proj", hidden_size, q_size, axes=("heads", "embed"))
        else:
            self.q_a_proj = linear(
                scope / "q_a_proj", hidden_size, sizes.q_lora_rank, axes=latent_axes, use_bias=use_bias
            )
            self.q_a_layernorm = rms_norm(scope, sizes.q_lora_rank, epsilon=latent_norm_epsilon)
            self.q_b_proj = linear(scope / "q_b_proj", sizes.q_lora_rank, q_size, axes=("heads", None))
        if has_latents:
            kv_size = sizes.kv_lora_rank + sizes.qk_rope_head_dim
            self.kv_a_proj_with_mqa = linear(
                scope / "kv_a_proj_with_mqa", hidden_size, kv_size, axes=latent_axes, use_bias=use_bias
            )
            self.kv_a_layernorm = rms_norm(scope, sizes.kv_lora_rank, epsilon=latent_norm_epsilon)
        self.kv_b_proj = latent_up_projection(
            scope / "kv_b_proj", sizes.num_heads, sizes.kv_lora_rank, sizes.qk_nope_head_dim, sizes.v_head_dim
        )
        if output_gate is not None:
            if self._gate_name is None:
                raise ValueError("a gate on latent attention's output needs a matrix of its own: give its name")
            gate_size = sizes.num_heads if output_gate.per_head else v_size
            gate_proj = linear(scope / self._gate_name, hidden_size, gate_size, axes=("heads", "embed"))
            setattr(self, self._gate_name, gate_proj)
        self.sinks = None
        if use_sinks:
            if self.context_devices > 1:
                raise ConfigError(
                    f"decode_context_parallel_size={self.context_devices} cannot divide the context of a model with "
                    "attention sinks: use 1"
                )
            zeros = nnx.initializers.zeros
            self.sinks = make_parameter(scope.rngs, zeros, (sizes.num_heads,), jnp.float32, axes=("heads",))
        self.o_proj = linear(scope / "o_proj", v_size, hidden_size, axes=("embed", "heads"), use_bias=use_bias)

    def _attend(
        self,
        kv_cache: PagedCache | None,
        q: jax.Array,
        latents: jax.Array,
        rope_key: jax.Array,
        metadata: AttentionMetadata,
        *,
        selection: jax.Array | None = None,
        gate: Sequence[jax.Array] = (),
    ) -> tuple[PagedCache | None, jax.Array]:
        """Returns the updated cache (None without one) and [T, E] for the results of `_project` and a selection."""
        if self.query_scale is not None:
            q = self.query_scale(q, metadata.input_positions)
        q_nope, q_rope = jnp.split(q, [self.sizes.qk_nope_head_dim], axis=-1)
        operands = (q_nope, q_rope, latents, rope_key, metadata, selection)
        if kv_cache is None and metadata.scratch is None:
            out = self._attend_to_whole_sequences(*operands)
        else:
            kv_cache, out = self._attend_to_cache(kv_cache, *operands)
        if self.output_gate is not None:
            out = self.output_gate(out, *gate)
        return kv_cache, self.o_proj(out.reshape(q.shape[0], -1))

    def _project(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """Returns queries [T, H, N + R], latents [T, L], rope keys [T, 1, R], the queries' input, the gate's logits.

        The rope is not applied yet. The queries' input is their normed latent, or x. There may be no gate.
        """
        first = self.q_proj if self.sizes.q_lora_rank is None else self.q_a_proj
        gate_proj = [] if self._gate_name is None else [getattr(self, self._gate_name)]
        q, compressed, *gate = apply_together(x, first, self.kv_a_proj_with_mqa, *gate_proj)
        query_latent = x
        if self.sizes.q_lora_rank is not None:
            query_latent = self.q_a_layernorm(q)
            q = self.q_b_proj(query_latent)
        latents, rope_key = jnp.split(compressed, [self.sizes.kv_lora_rank], axis=-1)
        q = q.reshape(x.shape[0], self.sizes.num_heads, self.sizes.qk_head_dim)
        latents = scaled(self.kv_a_layernorm(latents), self.latent_multiplier)
        return q, latents, rope_key[:, None], query_latent, *gate

    def _attend_to_cache(
        self,
        kv_cache: PagedCache | None,
        q_nope: jax.Array,
        q_rope: jax.Array,
        latents: jax.Array,
        rope_key: jax.Array,
        metadata: AttentionMetadata,
        selection: jax.Array | None,
    ) -> tuple[PagedCache | None, jax.Array]:
        """Returns the updated cache (None for a cache of this call only) and [T, H, V]."""
        if self.rope is not None:
            q_rope, rope_key = self.rope(q_rope, rope_key, metadata.input_positions)
        q = jnp.concatenate([self.kv_b_proj.absorb_into_queries(q_nope), q_rope], axis=-1)
        entries = jnp.concatenate([latents, rope_key[:, 0]], axis=-1)
        options = {"value_dim": self.sizes.kv_lora_rank, "scale": self.scale}
        sinks = None if self.sinks is None else self.sinks[...]
        if kv_cache is None:
            attended = _attention_through_scratch(q, entries, sinks, metadata, **options)
            return None, self.kv_b_proj.values_of(attended)
        operands = (
            q,
            entries,
            kv_cache,
            metadata.batch_for(FULL_CONTEXT),
            *([] if selection is None else [selection]),
        )
        if self.context_devices > 1:
            kv_cache, attended = context_parallel.latent_attention(*operands, **options)
        else:
            kernel = functools.partial(latent_attention, **options)
            kernel = _on_each_devices_heads(kernel, self.sizes.num_heads, len(operands))
            kv_cache, attended = kernel(sinks, *operands)
        return kv_cache, self.kv_b_proj.values_of(attended)

    def _attend_to_whole_sequences(
        self,
        q_nope: jax.Array,
        q_rope: jax.Array,
        latents: jax.Array,
        rope_key: jax.Array,
        metadata: AttentionMetadata,
        selection: jax.Array | None,
    ) -> jax.Array:
        num_tokens = q_nope.shape[0]
        request, valid = metadata.batch.request_of_token()
        if self.rope is not None:
            q_rope, rope_key = self.rope(q_rope, rope_key, metadata.input_positions, metadata.seq_lens[request])
        k_nope, v = self.kv_b_proj.keys_and_values(latents)
        visible = sees_in_request(request, valid)
        if selection is not None:
            visible &= selection
        # Padding tokens see themselves, to keep their rows finite.
        visible |= jnp.eye(num_tokens, dtype=bool) & ~valid
        scores = jnp.einsum("thd,shd->hts", q_nope, k_nope, preferred_element_type=jnp.float32)
        scores += jnp.einsum("thd,sd->hts", q_rope, rope_key[:, 0], preferred_element_type=jnp.float32)
        scores = jnp.where(visible, scores * self.scale, -jnp.inf)
        weights = softmax_with_sinks(scores, None if self.sinks is None else self.sinks[:, None, None])
        return jnp.einsum("hts,shv->thv", weights.astype(v.dtype), v)


class MultiHeadLatentAttention(LatentAttention):
    """Latent attention with a cache of its own."""

    @property
    def kv_cache_spec(self) -> LatentCacheSpec:
        sizes = self.sizes
        return LatentCacheSpec(sizes.kv_lora_rank, sizes.qk_rope_head_dim, context_devices=self.context_devices)

    def __call__(
        self, kv_cache: PagedCache | None, x: jax.Array, metadata: AttentionMetadata
    ) -> tuple[PagedCache | None, jax.Array]:
        q, latents, rope_key, _, *gate = self._project(x)
        return self._attend(kv_cache, q, latents, rope_key, metadata, gate=gate)


def _attention_through_scratch(
    q: jax.Array,
    entries: jax.Array,
    sinks: jax.Array | None,
    metadata: AttentionMetadata,
    *,
    value_dim: int,
    scale: float,
) -> jax.Array:
    """Returns attention [T, H, value_dim] of q [T, H, D] to entries [T, D] by the paged kernel, within each sequence.

    The derivative is that of the definition, at the entries as the cache has them; rounding them to its type counts as
    the identity.
    """
    scratch = metadata.scratch
    assert scratch is not None

    def paged(q: jax.Array, entries: jax.Array, sinks: jax.Array | None, metadata: AttentionMetadata) -> jax.Array:
        cache_layout = latent_cache_layout(scratch.block_size, value_dim, entries.shape[1] - value_dim, scratch.dtype)
        batch, num_blocks = in_consecutive_blocks(metadata, scratch.block_size)
        cache = cache_layout.cache(jnp.zeros((num_blocks, *cache_layout.shape), cache_layout.dtype))
        return latent_attention(q, entries, cache, batch, value_dim=value_dim, scale=scale, sinks=sinks)[1]

    def definition(q: jax.Array, entries: jax.Array, sinks: jax.Array | None, metadata: AttentionMetadata) -> jax.Array:
        entries = entries.astype(scratch.dtype).astype(jnp.float32)
        request, valid = metadata.batch.request_of_token()
        visible = sees_in_request(request, valid) | (jnp.eye(len(q), dtype=bool) & ~valid)
        scores = jnp.where(visible, jnp.einsum("thd,sd->hts", q.astype(jnp.float32), entries) * scale, -jnp.inf)
        weights = softmax_with_sinks(scores, None if sinks is None else sinks[:, None, None])
        return jnp.einsum("hts,sd->thd", weights, entries[:, :value_dim]).astype(q.dtype)

    described = dataclasses.replace(metadata, block_tables=None, state_slots=None, scratch=None)
    return native.transformable(paged, definition)(q, entries, sinks, described)


def _on_each_devices_heads(kernel: Callable[..., Any], num_heads: int, num_operands: int) -> Callable[..., Any]:
    """Returns `latent_attention` with the heads of q split over the mesh, if possible, and the cache replicated.

    Its first argument is `sinks`, which are split likewise.
    """

    def with_sinks(sinks: jax.Array | None, *operands: Any) -> Any:
        return kernel(*operands, sinks=sinks)

    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.shape["model"] == 1:
        return with_sinks
    whole = PartitionSpec()
    is_split = num_heads % mesh.shape["model"] == 0
    heads, of_sinks = (PartitionSpec(None, "model", None), PartitionSpec("model")) if is_split else (whole, whole)
    return on_each_device(with_sinks, (of_sinks, heads, *[whole] * (num_operands - 1)), (whole, heads))
