"""Models that run layers several times in a step over the same weights, each run with keys and values of its own."""

from __future__ import annotations

import dataclasses

from jaxis.config.attention_span import AttentionSpan
from jaxis.layers.kv_cache_spec import KVCacheSpec
from jaxis.layers.module import JaxModule, named_modules, named_parameters
from jaxis.models.common.decoder import DecoderModel


class RunCache(JaxModule):
    """Cache of a later run of a layer; the first run has that of the layer's attention."""

    def __init__(self, kv_cache_spec: KVCacheSpec) -> None:
        self.kv_cache_spec = kv_cache_spec


def caches_of_later_runs(first: KVCacheSpec, num_runs: int, span: AttentionSpan | None = None) -> list[RunCache]:
    """Returns the caches of a layer's runs after the first, for a child of the layer after its attention, by name too.

    `first` is the spec of the first run's cache; `span` is that of later runs if it differs.
    """
    return [RunCache(first if span is None else dataclasses.replace(first, span=span)) for _ in range(num_runs - 1)]


class LoopedModel(DecoderModel):
    """A decoder whose layers have a cache for each of their runs; a family overrides `run_layers`."""

    def num_runs(self, layer: int) -> int:
        return len(self.cache_entries[layer])

    def entries_of_run(self, layer: int, number: int) -> tuple[int, ...]:
        return (self.cache_entries[layer][number],)


def runs_of_weights(model: JaxModule) -> dict[str, int]:
    """Returns how often a step uses each weight that it uses more than once, by the weight's name."""
    decoders = [(name, module) for name, module in named_modules(model) if isinstance(module, LoopedModel)]
    return {
        weight: decoder.num_runs(i)
        for name, decoder in decoders
        for i, layer in enumerate(decoder.layers)
        for weight, _ in named_parameters(layer, f"{name}.layers.{i}")
    }
