"""IQuest-Coder Loop: all layers run twice, and then mix the first pass's context with a window of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxis.config.attention_span import AttentionSpan
from jaxis.config.hf_config import HFConfig
from jaxis.kernels.gates import gated
from jaxis.kernels.materialize import materialize
from jaxis.layers.attention import apply_rope, attention
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.checkpoint_names import Rename
from jaxis.layers.decoder_layer import LayerCache, LayerOutput, PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.module import JaxModule, make_parameter
from jaxis.layers.scope import LayerScope
from jaxis.layers.uncached import is_cache
from jaxis.models.common.decoder import CausalLM, RunOfLayer
from jaxis.models.common.family import Family
from jaxis.models.common.looped import LoopedModel, caches_of_later_runs


class LoopGate(JaxModule):
    """The product of each query with a weight of its head, as the logit of the first pass's share."""

    def __init__(self, scope: LayerScope, num_heads: int, head_dim: int) -> None:
        zeros = nnx.initializers.zeros
        self.weight = make_parameter(scope.rngs, zeros, (num_heads, head_dim), scope.dtype, axes=("heads", None))
        self.bias = make_parameter(scope.rngs, zeros, (num_heads,), scope.dtype, axes=("heads",))

    def __call__(self, q: jax.Array) -> jax.Array:
        """Returns float32 logits [T, H] of q [T, H, D]."""
        sums = materialize(q.astype(jnp.float32) * self.weight[...].astype(jnp.float32))
        sums = jnp.pad(sums, ((0, 0), (0, 0), (0, (1 << (q.shape[-1] - 1).bit_length()) - q.shape[-1])))
        while sums.shape[-1] > 1:  # in one order, whatever else is in the batch
            first, second = jnp.split(sums, 2, axis=-1)
            sums = first + second
        return sums[..., 0] + self.bias[...].astype(jnp.float32)


class LoopAttention(GroupedQueryAttention):
    """Attention whose later passes mix the context of the first pass and their own, as far as a window reaches."""

    def __init__(self, scope: LayerScope, **options: Any) -> None:
        super().__init__(scope, **options)
        self.window = AttentionSpan(scope.config.get("loop_window_size", 64))
        self.loop_gate = LoopGate(scope, self.num_heads, self.head_dim)

    def __call__(self, kv_cache: LayerCache, x: jax.Array, metadata: AttentionMetadata) -> LayerOutput:
        if not isinstance(kv_cache, tuple):
            return super().__call__(kv_cache, x, metadata)
        first, own = kv_cache
        q, k, v = (each.reshape(x.shape[0], -1, self.head_dim) for each in self.project(x))
        q, k = apply_rope(self.rope, q, k, metadata, is_paged=is_cache(own))
        _, far = attention(first, q, None, None, metadata, rope=None, scale=self.scale)
        own, near = attention(own, q, k, v, metadata, rope=None, scale=self.scale, span=self.window)
        logits = self.loop_gate(q)
        far, near = (each.reshape(x.shape[0], -1) for each in (far, near))
        mixed = gated(far, logits, "sigmoid") + gated(near, -logits, "sigmoid")
        return (first, own), self.o_proj(mixed)


class IQuestLoopCoderDecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        use_bias = config.get("attention_bias", False)
        attention = LoopAttention(scope / "self_attn", qkv_bias=use_bias, o_bias=use_bias)
        super().__init__(
            scope, self_attn=attention, mlp=GatedMLP(scope / "mlp", use_bias=config.get("mlp_bias", False))
        )
        self.self_attn_again = caches_of_later_runs(attention.kv_cache_spec, _num_loops(config), attention.window)


class IQuestLoopCoderModel(LoopedModel):
    def entries_of_run(self, layer: int, number: int) -> tuple[int, ...]:
        """Returns the first pass's entry, too, in later ones."""
        first = self.cache_entries[layer][:1]
        return first if number == 0 else first + super().entries_of_run(layer, number)

    def run_layers(self, x: jax.Array, run: RunOfLayer) -> jax.Array:
        for number in range(self.num_runs(0)):
            for i in range(len(self.layers)):
                x = run(i, x, number)
        return x


class IQuestLoopCoderForCausalLM(CausalLM):
    layer_class = IQuestLoopCoderDecoderLayer
    model_class = IQuestLoopCoderModel

    @classmethod
    def all_renames(cls, config: HFConfig) -> Sequence[Rename]:
        layers = range(config["num_hidden_layers"])
        return [(f"model.gate_projections.{i}", f"model.layers.{i}.self_attn.loop_gate") for i in layers]


def _num_loops(config: HFConfig) -> int:
    return config.get("loop_num", 2)


FAMILY = Family(
    "IQuest-Coder Loop",
    (IQuestLoopCoderForCausalLM,),
    "all layers run twice; the second pass mixes the first one's context and a window of its own by gates of heads",
)
