"""HRM-Text: two stacks of layers, of which the lower runs several times for each run of the upper, over and over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxis.config.hf_config import HFConfig
from jaxis.layers.checkpoint_names import Rename
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.leaves import rms_norm
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.module import make_parameter
from jaxis.layers.output_gate import OutputGate
from jaxis.layers.qkv_packing import QKVPacking
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM, DecoderOptions, RunOfLayer
from jaxis.models.common.family import Family
from jaxis.models.common.looped import LoopedModel, caches_of_later_runs

_norm = partial(rms_norm, use_weight=False)


@dataclass(frozen=True)
class GatesFirst(QKVPacking):
    """The gates of all heads, then their queries, keys and values; here each head's gates follow its queries."""

    num_heads: int = 1

    def split(self, packed: jax.Array, q_size: int) -> list[jax.Array]:
        gates_and_queries, k, v = super().split(packed, q_size)
        by_head = gates_and_queries.reshape(packed.shape[0], 2, self.num_heads, -1)[:, ::-1].swapaxes(1, 2)
        return [by_head.reshape(packed.shape[0], -1), k, v]

    def rows(self, q_size: int, kv_size: int) -> list[np.ndarray]:
        gates_and_queries, k, v = super().rows(q_size, kv_size)
        return [gates_and_queries.reshape(2, self.num_heads, -1)[::-1].swapaxes(0, 1).ravel(), k, v]


class HrmTextDecoderLayer(PreNormDecoderLayer):
    """A layer of the lower stack, or of the upper one, whose numbers follow."""

    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        num_heads: int = config["num_attention_heads"]
        attention = GroupedQueryAttention(
            scope / "self_attn",
            head_dim=128,
            num_kv_heads=num_heads,
            packing=GatesFirst(num_heads=num_heads),
            output_gate=OutputGate(),
        )
        mlp = GatedMLP(scope / "mlp", packed_gate_up=True)
        super().__init__(scope, self_attn=attention, mlp=mlp)
        high_cycles, low_cycles = _cycles(config)
        is_upper = scope.layer_index >= _layers_per_stack(config)
        num_runs = high_cycles if is_upper else high_cycles * low_cycles
        self.self_attn_again = caches_of_later_runs(attention.kv_cache_spec, num_runs)


class HrmTextModel(LoopedModel):
    """`low = norm(lower(low + high))`, several times, then `high = norm(upper(high + low))`, all this several times.

    Derivatives are of the last `trained_cycles` of the lower stack's runs before each of the upper's, as config.json's
    `L_bp_cycles` says, and not of the start, which is no trained weight.
    """

    def add_parts(self, scope: LayerScope) -> None:
        self.high_cycles, self.low_cycles = _cycles(scope.config)
        trained: list[int] = scope.config.get("L_bp_cycles", [2])
        self.trained_cycles = (*[1] * (self.high_cycles - len(trained)), *trained)
        size = (scope.config["hidden_size"],)
        self.z_L_init = make_parameter(scope.rngs, nnx.initializers.zeros, size, scope.dtype, axes=(None,))

    def run_layers(self, x: jax.Array, run: RunOfLayer) -> jax.Array:
        size = len(self.layers) // 2
        high, low = x, jax.lax.stop_gradient(jnp.broadcast_to(self.z_L_init[...].astype(x.dtype), x.shape))
        for high_cycle in range(self.high_cycles):
            if high_cycle:
                high = self.norm(high)
            for low_cycle in range(self.low_cycles):
                low = low + high
                for i in range(size):
                    low = run(i, low, high_cycle * self.low_cycles + low_cycle)
                low = self.norm(low)
                if low_cycle < self.low_cycles - self.trained_cycles[high_cycle]:
                    low = jax.lax.stop_gradient(low)
            high = high + low
            for i in range(size, 2 * size):
                high = run(i, high, high_cycle)
        return high


class HrmTextForCausalLM(CausalLM):
    layer_class = HrmTextDecoderLayer
    make_norm = _norm
    model_class = HrmTextModel

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        config.expect_all(attention_bias=False, mlp_bias=False)
        if "num_layers_per_stack" in config:
            config.ignore("num_hidden_layers", because="it counts layers as often as they run")
        config.ignore("prefix_lm", because="prompts are read causally, as the reference reads them without token types")

    @classmethod
    def all_renames(cls, config: HFConfig) -> Sequence[Rename]:
        size = _layers_per_stack(config)
        upper = [(f"model.H_module.layers.{i}", f"model.layers.{size + i}") for i in range(size)]
        attention = ("attn.gqkv_proj", "self_attn.qkv_proj"), ("attn.o_proj", "self_attn.o_proj")
        return (("model.L_module.layers", "model.layers"), *upper, *attention)

    @classmethod
    def options(cls, scope: LayerScope) -> DecoderOptions:
        config = scope.config
        scale = config.get("embedding_scale") or 1 / config.get("initializer_range", 0.02)
        return DecoderOptions(embedding_multiplier=scale, num_layers=2 * _layers_per_stack(config))


def _layers_per_stack(config: HFConfig) -> int:
    return config.get("num_layers_per_stack") or config["num_hidden_layers"]


def _cycles(config: HFConfig) -> tuple[int, int]:
    return config.get("H_cycles", 2), config.get("L_cycles", 3)


FAMILY = Family(
    "HRM-Text",
    (HrmTextForCausalLM,),
    "two stacks of layers, one run 3 times for each run of the other, all twice, with keys and values of each run; "
    "gated attention; norms without weights; prompts are read causally, as transformers reads them without token types",
    gguf=("hrm_text",),
)
