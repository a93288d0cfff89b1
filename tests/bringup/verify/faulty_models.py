"""Faults: each makes one thing wrong in a layer of a right model."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxis.layers.glu import GLU
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.linear import JaxLinear
from jaxis.layers.mlp import GatedMLP


def become(module, base, **methods):
    """Makes the module one of a class with these methods in the place of `base`'s own."""
    module.__class__ = type(f"Faulty{base.__name__}", (base,), methods)


def change(module, name, value):
    """Sets an attribute that the module has, to another value."""
    assert getattr(module, name) is not value
    setattr(module, name, value)


def other_rope_pairing(layer):
    rope = layer.self_attn.rope
    change(layer.self_attn, "rope", dataclasses.replace(rope, interleaved=not rope.interleaved))


def rope_of_half_the_head(layer):
    rope = layer.self_attn.rope
    change(layer.self_attn, "rope", dataclasses.replace(rope, inv_freq=rope.inv_freq[: len(rope.inv_freq) // 2]))


def norms_swapped(layer):
    def call(self, kv_cache, x, metadata):
        kv_cache, attended = self.self_attn(kv_cache, self.post_attention_layernorm(x), metadata)
        x = x + attended
        return kv_cache, x + self.mlp(self.input_layernorm(x))

    become(layer, type(layer), __call__=call)


def norm_after_instead_of_before(layer):
    def call(self, kv_cache, x, metadata):
        kv_cache, attended = self.self_attn(kv_cache, x, metadata)
        x = x + self.input_layernorm(attended)
        return kv_cache, x + self.mlp(self.post_attention_layernorm(x))

    become(layer, type(layer), __call__=call)


def no_residual_around_the_mlp(layer):
    def call(self, kv_cache, x, metadata):
        kv_cache, attended = self.self_attn(kv_cache, self.input_layernorm(x), metadata)
        return kv_cache, self.mlp(self.post_attention_layernorm(x + attended))

    become(layer, type(layer), __call__=call)


def window_one_too_long(layer):
    span = layer.self_attn.span
    layer.self_attn.span = dataclasses.replace(span, sliding_window=span.sliding_window + 1)


def scale_of_the_hidden_size(layer):
    change(layer.self_attn, "scale", layer.self_attn.q_proj.input_size**-0.5)


def head_norms_forgotten(layer):
    def call(self, kv_cache, x, metadata):
        norms, (self.q_norm, self.k_norm) = (self.q_norm, self.k_norm), (None, None)
        try:
            return GroupedQueryAttention.__call__(self, kv_cache, x, metadata)
        finally:
            self.q_norm, self.k_norm = norms

    become(layer.self_attn, GroupedQueryAttention, __call__=call)


def bias_forgotten(layer):
    become(layer.self_attn.k_proj, JaxLinear, __call__=lambda self, x: self.product(x))


def weight_transposed(layer):
    become(layer.self_attn.o_proj, JaxLinear, __call__=lambda self, x: x @ self.weight[...])


def norm_with_one_added_to_its_weight(layer):
    change(layer.post_attention_layernorm, "add_unit_offset", True)


def gate_and_up_exchanged(layer):
    def call(self, x, _metadata=None):
        return self.down_proj(self.gated_unit(self.up_proj(x), self.gate_proj(x)))

    become(layer.mlp, GatedMLP, __call__=call)


def other_activation(layer):
    change(layer.mlp, "gated_unit", GLU(lambda x: jax.nn.gelu(x, approximate=False)))


def selection_bias_forgotten(layer):
    layer.mlp.gate.e_score_correction_bias.set_value(jnp.zeros_like(layer.mlp.gate.e_score_correction_bias[...]))


def _route(layer, **changes):
    layer.mlp.gate.routing = dataclasses.replace(layer.mlp.gate.routing, **changes)


def experts_of_all_groups(layer):
    _route(layer, num_allowed_groups=layer.mlp.gate.routing.num_groups)


def weights_not_renormalized(layer):
    _route(layer, renormalize=not layer.mlp.gate.routing.renormalize)


def scaling_factor_forgotten(layer):
    _route(layer, scaling_factor=1.0)


def shared_experts_forgotten(layer):
    def call(self, x, _metadata=None):
        return self.experts(x, *self.gate(x))

    become(layer.mlp, type(layer.mlp), __call__=call)


def shared_experts_gate_and_up_exchanged(layer):
    shared = layer.mlp.shared_experts
    become(
        shared,
        type(shared),
        __call__=lambda self, x, _metadata=None: self.down_proj(self.gated_unit(self.up_proj(x), self.gate_proj(x))),
    )


def each_expert_exchanged_with_its_neighbour(layer):
    stack = layer.mlp.experts.down_proj
    stack.set_value(jnp.roll(stack[...], 1, axis=0))


def two_experts_exchanged(layer):
    stack = layer.mlp.experts.down_proj
    stack.set_value(stack[...].at[:2].set(stack[...][1::-1]))


def sinks_forgotten(layer):
    change(layer.self_attn, "sinks", None)


def chunk_one_too_long(layer):
    span = layer.self_attn.span
    layer.self_attn.span = dataclasses.replace(span, attention_chunk_size=span.attention_chunk_size + 1)


def temperature_forgotten(layer):
    change(layer.self_attn, "query_scale", None)


def scale_without_that_of_the_context_extension(layer):
    change(layer.self_attn, "scale", layer.self_attn.sizes.qk_head_dim**-0.5)


def rounded_to_bfloat16(layer):
    def call(self, x):
        return JaxLinear.__call__(self, x.astype(jnp.bfloat16).astype(x.dtype))

    become(layer.mlp.down_proj, JaxLinear, __call__=call)
