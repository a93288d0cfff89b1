"""The widths that a checkpoint's weights can have in memory, each as a model constructed without weights."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxis.bringup.analyze.config import Construction, construct
from jaxis.bringup.analyze.source import ModelSource
from jaxis.config import CacheConfig, SchedulerConfig, VllmConfig
from jaxis.config.checkpoint_values import trained_context_length
from jaxis.config.expert_counts import num_experts
from jaxis.engine.arguments import EngineArgs
from jaxis.engine.engine_config import DEFAULT_MAX_NUM_BATCHED_TOKENS, DEFAULT_MAX_NUM_SEQS
from jaxis.engine.execution.cache_specs import cache_specs, own_cache_specs
from jaxis.errors import ConfigError
from jaxis.layers.experts import JaxExperts
from jaxis.layers.kv_cache_spec import CacheSpec
from jaxis.layers.mlp import GatedMLP, UngatedMLP
from jaxis.layers.module import JaxModule, named_modules
from jaxis.layers.moe import SparseMoE
from jaxis.layers.state_cache_spec import StateCacheSpec
from jaxis.models.common.decoder import DecoderModel
from jaxis.models.model_loader import construct_abstractly
from jaxis.parallel.stages import WHOLE, Stage
from jaxis.planning.layout import Layout
from jaxis.planning.stored_weights import StoredWeight, stored_weights
from jaxis.quantization.rules import RuleQuantizationConfig
from jaxis.quantization_rules import DEQUANTIZE, SHORT_NAMES

LOW_PRECISION = ("int8", "int4")
"""Quantizations of a checkpoint in floats that does not fit."""
_FEED_FORWARDS = (GatedMLP, UngatedMLP, SparseMoE, JaxExperts)
_LAYER = re.compile(r".*?layers\.\d+(?=\.)")
ANY_LENGTH = 1 << 20
"""Tokens of the longest planned request of a model without a limit."""


@dataclass(frozen=True, eq=False)
class Width:
    """An abstract model, or a pipeline stage's part of it, with its weights stored in one way.

    `quantization` is the value for `--quantization`; None leaves weights as stored. `name` is a type or format for
    people, such as "bfloat16", "fp8" or "int4".
    """

    quantization: str | None
    name: str
    model: JaxModule
    vllm_config: VllmConfig
    of_stage: Stage = WHOLE
    _weights: dict[Layout, list[StoredWeight]] = field(default_factory=dict, init=False)
    _stages: dict[Stage, Width] = field(default_factory=dict, init=False)

    @functools.cached_property
    def cache_specs(self) -> list[CacheSpec | StateCacheSpec]:
        if self.of_stage.num_stages > 1:  # in which no layer may have one
            return own_cache_specs(self.model)
        return cache_specs(self.model, self.vllm_config)

    @functools.cached_property
    def layers_per_cache(self) -> list[int]:
        """The number of layers that use each of `cache_specs`."""
        decoder = next((module for _, module in named_modules(self.model) if isinstance(module, DecoderModel)), None)
        if decoder is None:
            return [1] * len(self.cache_specs)
        uses = Counter(entry for entries in decoder.cache_entries for entry in entries)
        return [uses[entry] for entry in range(len(self.cache_specs))]

    @functools.cached_property
    def num_feed_forwards(self) -> int:
        """Layers with a feed-forward block: a dense one, experts, or both."""
        blocks = [name for name, module in named_modules(self.model) if isinstance(module, _FEED_FORWARDS)]
        return len({match[0] if (match := _LAYER.match(name)) else name for name in blocks})

    @property
    def num_experts(self) -> int:
        return num_experts(self.vllm_config.model_config.hf_config.get_text_config())

    def stage(self, stage: Stage) -> Width:
        """Returns the part of a pipeline stage. Raises ConfigError if the model cannot be divided like this."""
        if stage == self.of_stage:
            return self
        if stage not in self._stages:
            model = construct_abstractly(self.vllm_config, check_config=False, stage=stage)
            self._stages[stage] = dataclasses.replace(self, model=model, of_stage=stage)
        return self._stages[stage]

    def weights_on(self, layout: Layout) -> list[StoredWeight]:
        if layout not in self._weights:
            self._weights[layout] = stored_weights(self.model, layout)
        return self._weights[layout]


def widths(source: ModelSource, quantization: str | None = None, dtype: str | None = None) -> list[Width]:
    """Constructs the widths of a checkpoint, the stored one first, or only that of a value of `--quantization`.

    `dtype` is the type of activations, and of weights in floats; None is the checkpoint's. Raises ConfigError if jaxis
    cannot run the model, or not with this quantization.
    """
    if dtype is not None:
        source = dataclasses.replace(source, config=_with_dtype(source.config, dtype))
    stored = _constructed(source, construct(source.config, source.config_path, tensors=source.tensors))
    is_quantized = stored.vllm_config.quant_config is not None
    if quantization is None:
        return [stored] if is_quantized else [stored, *_quantized_widths(source)]
    if quantization == "none":
        return [stored]
    if is_quantized != (quantization == DEQUANTIZE):
        raise ConfigError(
            f"--quantization {quantization}: the checkpoint is {'' if is_quantized else 'not '}quantized"
            + (f" and cannot be quantized again: leave it out, or give {DEQUANTIZE}" if is_quantized else "")
        )
    return [_width(source, quantization)]


def _quantized_widths(source: ModelSource) -> Iterator[Width]:
    for quantization in LOW_PRECISION:
        try:
            yield _width(source, quantization)
        except ConfigError:  # some layers' sizes do not allow it
            continue


def _with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    text = config.get("text_config")
    parts = {"text_config": {**text, "dtype": dtype}} if isinstance(text, dict) else {}
    return {**config, **parts, "dtype": dtype}


def _width(source: ModelSource, quantization: str) -> Width:
    rules = None
    if quantization != DEQUANTIZE:
        rules = RuleQuantizationConfig(SHORT_NAMES[quantization], must_match=False)
    plain = {**source.config, "quantization_config": None}
    return _constructed(source, construct(plain, source.config_path, rules), quantization)


def _constructed(source: ModelSource, construction: Construction, quantization: str | None = None) -> Width:
    model, vllm_config = construction.model, construction.vllm_config
    if construction.refusals or model is None or vllm_config is None:
        reason = construction.refusals[0] if construction.refusals else "its family is not one of jaxis's"
        raise ConfigError(f"{source.name} cannot run: {reason}; jaxis analyze says more")
    text_config = vllm_config.model_config.hf_config.get_text_config()
    longest = text_config.get("max_position_embeddings", vllm_config.model_config.max_model_len)
    if trained_context_length(vllm_config.model_config.hf_config) is None:
        longest = ANY_LENGTH
    sized = dataclasses.replace(
        vllm_config,
        model_config=dataclasses.replace(vllm_config.model_config, max_model_len=longest),
        cache_config=CacheConfig(block_size=EngineArgs.block_size),
        scheduler_config=SchedulerConfig(DEFAULT_MAX_NUM_SEQS, DEFAULT_MAX_NUM_BATCHED_TOKENS),
    )
    return Width(quantization, _name(source, vllm_config, quantization), model, sized)


def _name(source: ModelSource, vllm_config: VllmConfig, quantization: str | None) -> str:
    if quantization in LOW_PRECISION:
        return quantization
    if quantization is None and vllm_config.quant_config is not None:
        parts = (source.config, source.config.get("text_config"))
        stored = [part.get("quantization_config") for part in parts if isinstance(part, dict)]
        return next((str(each["quant_method"]) for each in stored if each and "quant_method" in each), "quantized")
    return np.dtype(vllm_config.model_config.dtype).name
