"""The one account of a model's memory: the bytes of its weights and caches, and what fits beside the weights.

The engine's memory plan, `jaxis plan` and `jaxis analyze` ask it, and word the answer.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jax.sharding import AbstractMesh, Mesh

from jaxis.config.attention_span import AttentionSpan
from jaxis.config.quantization import HoldsWeights
from jaxis.engine.execution.cache_specs import cache_specs, own_cache_specs
from jaxis.engine.execution.kv_cache import (
    CPU_TOKENS_PER_SEQ,
    longest_context,
    most_sequences,
    num_cache_blocks,
    stage_share,
    widest_first,
)
from jaxis.engine.execution.state_cache import STATE_SHARE, num_state_slots, useful_slots
from jaxis.engine.scheduling.state_slots import MIN_SLOTS
from jaxis.layers.weight_bytes import StoredWeight, stored_weights, weight_bytes
from jaxis.models.model_loader import construct_abstractly
from jaxis.parallel.stages import WHOLE, Stage

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.layers.kv_cache_spec import CacheSpec
    from jaxis.layers.module import JaxModule
    from jaxis.layers.state_cache_spec import StateCacheSpec

LOW_PRECISION = ("int8", "int4")
"""Quantizations to try, in this order, for weights in floats that do not fit."""

Units = tuple[Mapping[AttentionSpan, int], int]
"""Bytes of one block in all layers of each span, and of one slot in all layers with a state; see `unit_bytes`."""


class Width:
    """A model whose weights are stored in one way, constructed without weights.

    Attributes:
      quantization: Value of `--quantization`; None leaves weights as stored.
      name: Type or format for people, such as "bfloat16", "fp8" or "int4".
      float_bytes: Argument of `stored_weights`.
    """

    def __init__(
        self,
        quantization: str | None,
        vllm_config: VllmConfig,
        model: JaxModule | None = None,
        *,
        name: str = "",
        float_bytes: int | None = None,
    ) -> None:
        """`model` is the whole model if it is already constructed."""
        self.quantization, self.vllm_config, self.name, self.float_bytes = quantization, vllm_config, name, float_bytes
        self._models = {} if model is None else {WHOLE: model}
        self._specs: dict[Stage, list[CacheSpec | StateCacheSpec]] = {}
        self._weights: dict[tuple[Stage, tuple[int, ...], bool], list[StoredWeight]] = {}

    def model(self, stage: Stage = WHOLE) -> JaxModule:
        """Returns a pipeline stage's part. Raises ConfigError if the model cannot be divided like this."""
        if stage not in self._models:
            self._models[stage] = construct_abstractly(self.vllm_config, check_config=False, stage=stage)
        return self._models[stage]

    def cache_specs(self, stage: Stage = WHOLE) -> list[CacheSpec | StateCacheSpec]:
        if stage not in self._specs:
            model = self.model(stage)
            # In a part of the model, no layer may have a cache.
            is_part = stage.num_stages > 1
            self._specs[stage] = own_cache_specs(model) if is_part else cache_specs(model, self.vllm_config)
        return self._specs[stage]

    def weights_on(
        self, mesh: Mesh | AbstractMesh, stage: Stage = WHOLE, *, spreads_experts: bool = False
    ) -> list[StoredWeight]:
        """Lists the weights as each device of a mesh holds them; see `stored_weights`."""
        key = (stage, tuple(mesh.axis_sizes), spreads_experts)
        if key not in self._weights:
            model = self.model(stage)
            self._weights[key] = stored_weights(
                model, mesh, spreads_experts=spreads_experts, float_bytes=self.float_bytes
            )
        return self._weights[key]

    def weight_bytes(self, mesh: Mesh, stage: Stage = WHOLE) -> int:
        """Returns the bytes of the weights on all devices of a mesh together."""
        if isinstance(config := self.vllm_config.quant_config, HoldsWeights):
            return config.weight_bytes
        return weight_bytes(self.model(stage), mesh, self.float_bytes)


@dataclass(frozen=True)
class MemoryPlace:
    """Memory with a limit of its own, such as a device's or a host's: the bytes held there beside caches, and units."""

    held_bytes: int
    units: Units


@dataclass(frozen=True)
class MemoryAccount:
    """The memory of a server, in one or more places with equal limits.

    Every place has a share of each request's caches, so the fullest one ends what fits.

    Attributes:
      num_ranks: Data ranks whose caches are in the places, each with as many blocks; `MemoryPlace.units` are of one.
    """

    vllm_config: VllmConfig
    places: Sequence[MemoryPlace]
    num_ranks: int = 1

    @property
    def held_bytes(self) -> int:
        return sum(place.held_bytes for place in self.places)

    @functools.cached_property
    def units(self) -> Units:
        """Units of all places together, the span that keeps most first."""
        per_block: Counter[AttentionSpan] = Counter()
        for place in self.places:
            per_block.update(place.units[0])
        return widest_first(per_block), sum(place.units[1] for place in self.places)

    def cache_bytes(self, limit: int) -> int:
        """Returns the bytes that caches may take in all places of `limit` bytes; negative if weights do not fit."""
        if (least := limit - max(place.held_bytes for place in self.places)) <= 0:
            return least * len(self.places)
        shares = [stage_share(place.units, self.units) for place in self.places]
        return min(
            int((limit - place.held_bytes) / (share or 1.0)) for place, share in zip(self.places, shares, strict=True)
        )

    def longest_context(self, limit: int) -> int:
        """Returns the tokens of the longest single request, at most the model's; 0 if none fits."""
        most = self.vllm_config.model_config.max_model_len
        return longest_context(self.vllm_config, self.units, self.cache_bytes(limit), most)

    def most_requests(self, limit: int, num_tokens: int) -> int:
        """Returns the number of requests of so many tokens that fit at once."""
        return most_sequences(self.vllm_config, self.units, max(0, self.cache_bytes(limit)), num_tokens)

    def needed_bytes(self, num_tokens: int) -> int:
        """Returns the requested size of caches, or else that for a request of `num_tokens` and its states."""
        per_block, per_slot = self.units
        num_blocks = -(-num_tokens // self.vllm_config.cache_config.block_size)
        paged, states = num_blocks * sum(per_block.values()), MIN_SLOTS * per_slot
        # States may take no more than their share of the caches.
        needed = max(paged + states, math.ceil(states / STATE_SHARE)) if per_block else states
        return self.vllm_config.cache_config.kv_cache_memory_bytes or self.num_ranks * needed

    def useful_bytes(self) -> int:
        """Returns the requested size of caches, or else that for one longest request or short ones of all that run."""
        config, states = self.vllm_config, useful_slots(self.vllm_config) - MIN_SLOTS
        short = config.scheduler_config.max_num_seqs * CPU_TOKENS_PER_SEQ
        longest = max(config.model_config.max_model_len, short)
        return self.needed_bytes(longest) + self.num_ranks * self.units[1] * states

    def context_in(self, cache_bytes: int, mesh: Mesh) -> int:
        """Returns the longest request of an engine with so many bytes of caches on its devices."""
        per_block, per_slot = self.units
        cache_config = dataclasses.replace(self.vllm_config.cache_config, kv_cache_memory_bytes=cache_bytes)
        config = dataclasses.replace(self.vllm_config, cache_config=cache_config)
        of_rank = cache_bytes // self.num_ranks
        state_bytes = per_slot * num_state_slots(config, per_slot, of_rank, attends=bool(per_block))
        return num_cache_blocks(config, per_block, mesh, state_bytes=state_bytes, memory=of_rank)[1]
