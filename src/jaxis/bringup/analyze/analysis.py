"""Analyses whether jaxis can run a model, by its keys, modules and tensors, from config.json and headers alone."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from dataclasses import dataclass
from typing import Any, Literal

from jax.typing import DTypeLike

from jaxis.bringup.analyze.closest import ClosestFamily, closest_families, families_that_read
from jaxis.bringup.analyze.config import Construction, construct
from jaxis.bringup.analyze.figures import (
    BLOCK_SIZE,
    CacheKind,
    Fit,
    ParameterCount,
    bytes_by_dtype,
    cache_kinds,
    constructed_in,
    count_parameters,
    fits_in,
)
from jaxis.bringup.analyze.module_tree import ModuleRow, module_tree
from jaxis.bringup.analyze.source import ModelSource, open_source
from jaxis.bringup.analyze.tensors import TensorProblem, check_tensors
from jaxis.config import CacheConfig, SchedulerConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.config.usual_keys import with_defaults
from jaxis.engine.engine_config import DEFAULT_MAX_NUM_BATCHED_TOKENS, DEFAULT_MAX_NUM_SEQS, KV_CACHE_DTYPES
from jaxis.engine.execution.cache_memory import machine_memory
from jaxis.host.byte_size import parse_bytes
from jaxis.quantization_rules import DEQUANTIZE

SCHEMA = 2
"""Version of the JSON that `Analysis.to_json` writes; incremented when a field changes its meaning or is removed."""
Status = Literal["supported", "default", "neutral", "unsupported", "unread", "unknown"]
_STATUS_OF_USE: dict[str, Status] = {
    "used": "supported",
    "default": "default",
    "neutral": "neutral",
    "ignored": "neutral",
}
_NUM_READERS = 3
_ANY_LENGTH = 1 << 20  # tokens, where a config has no limit


@dataclass(frozen=True)
class KeyStatus:
    """One key of config.json.

    Attributes:
      key: Name of the key, dotted if it is nested.
      status: "supported": read and honoured. "default": read, and equal to what the family assumes anyway. "neutral":
        cannot change logits. "unsupported": refused. "unread": not read before something else was refused. "unknown":
        the family does not know it; of an architecture without a family, the closest one.
    """

    key: str
    value: Any
    status: Status


@dataclass(frozen=True)
class Memory:
    """Memory for weights and cache: its name ("RAM", a device's, or "given"), and an entry for each precision of the
    weights.
    """

    name: str
    nbytes: int
    fits: tuple[Fit, ...]


@dataclass(frozen=True)
class Analysis:
    """The result of `jaxis analyze`.

    Attributes:
      problems: Reasons why the model cannot run, one line each; empty if it can.
      modules: Modules of the constructed model; None, like `kv_cache`, `parameters` and `memory`, if it cannot be
        constructed.
      tensor_problems: Mismatches of tensors and parameters; None without weights, or without a family to check.
      no_tensors_reason: Reason why tensors were not checked; empty if they were.
      kv_cache: Cache of each kind of layer, in `kv_cache_dtype`.
      max_context: Most tokens that the config allows; None if it has no limit.
      closest_families: Families to start from if jaxis lacks the architecture, the closest first.
    """

    model: str
    architectures: tuple[str, ...]
    problems: tuple[str, ...]
    keys: tuple[KeyStatus, ...]
    modules: tuple[ModuleRow, ...] | None
    tensor_problems: tuple[TensorProblem, ...] | None
    no_tensors_reason: str
    num_tensors: int | None
    bytes_by_dtype: dict[str, int] | None
    parameters: ParameterCount | None
    kv_cache_dtype: str
    kv_cache: tuple[CacheKind, ...] | None
    max_context: int | None
    memory: Memory | None
    closest_families: tuple[ClosestFamily, ...]

    @property
    def can_run(self) -> bool:
        """True if jaxis can run the model, regardless of memory."""
        return not self.problems

    @property
    def fits(self) -> bool:
        """True if the weights fit into the memory at some precision."""
        return self.memory is not None and any(fit.fits for fit in self.memory.fits)

    def to_json(self) -> str:
        """Returns one JSON object, described in docs/bring-up.md."""
        status = "can_run" if self.can_run else "cannot_run"
        facts = {"schema": SCHEMA, "status": status, "can_run": self.can_run, "fits": self.fits}
        return json.dumps(_finite(facts | dataclasses.asdict(self)), indent=2)


def analyze(
    model: str | os.PathLike[str],
    *,
    memory: int | str | None = None,
    kv_cache_dtype: str = "bfloat16",
    revision: str | None = None,
    in_order_of_calls: bool = False,
) -> Analysis:
    """Analyses a model, of which only config.json and headers are downloaded.

    `memory` is for weights and cache, in bytes or as "80GiB"; None is this machine's. The sizes assume a cache of
    `kv_cache_dtype`. `in_order_of_calls` is that of `module_tree`.

    Raises:
      CheckpointError: There is no such model, or a file is broken.
      ConfigError: `memory` is not a size.
    """
    name, sizes = machine_memory() if memory is None else ("given", [parse_bytes(memory, "--memory")])
    given = name, sum(sizes)
    return analyze_source(open_source(model, revision=revision), given, kv_cache_dtype, in_order_of_calls)


def analyze_source(
    source: ModelSource, memory: tuple[str, int], kv_cache_dtype: str = "bfloat16", in_order_of_calls: bool = False
) -> Analysis:
    """Like `analyze`, for a source that was already read; `memory` is (name, bytes)."""
    construction = construct(source.config, source.config_path, tensors=source.tensors)
    tensor_problems = modules = None
    plain = construction
    if construction.model is not None and construction.vllm_config is not None:
        modules = module_tree(construction.model, in_order_of_calls=in_order_of_calls)
        if construction.vllm_config.quant_config is not None or source.tensors is not None:
            # For the figures: the model without quantization, and with parameters that stay empty.
            plain = constructed_in(source, DEQUANTIZE)
        if source.tensors is not None and not construction.refusals:
            quant_config = construction.vllm_config.quant_config
            tensor_problems = tuple(check_tensors(construction.model, source.tensors, quant_config))
    closest = () if construction.is_known else closest_families(source.config, source.tensors)
    keys = _key_statuses(construction, closest)
    parameters = kinds = fits = None
    text_view = _text_view(source.config)
    max_context = text_view.get("max_position_embeddings")
    if plain.model is not None and plain.vllm_config is not None:
        parameters = count_parameters(plain.model, text_view)
        kinds = tuple(cache_kinds(plain.model, plain.vllm_config, KV_CACHE_DTYPES[kv_cache_dtype]))
        sized = _sized(plain.vllm_config, max_context or _ANY_LENGTH, KV_CACHE_DTYPES[kv_cache_dtype])
        fits = Memory(*memory, tuple(fits_in(source, plain.model, sized, memory[1])))
    return Analysis(
        model=source.name,
        architectures=tuple(source.config.get("architectures") or ()),
        problems=tuple(_problems(construction, keys, tensor_problems, closest)),
        keys=keys,
        modules=modules,
        tensor_problems=tensor_problems,
        no_tensors_reason=_no_tensors_reason(source, construction, tensor_problems),
        num_tensors=None if source.tensors is None else len(source.tensors),
        bytes_by_dtype=None if source.tensors is None else bytes_by_dtype(source.tensors),
        parameters=parameters,
        kv_cache_dtype=kv_cache_dtype,
        kv_cache=kinds,
        max_context=max_context,
        memory=fits,
        closest_families=closest,
    )


def _text_view(values: dict[str, Any]) -> HFConfig:
    """The text model's part of a config, plus the keys that only the outer config has."""
    text = values.get("text_config")
    if not isinstance(text, dict):
        return HFConfig(values)
    outer = {key: value for key, value in values.items() if key != "text_config"}
    return HFConfig({**outer, **with_defaults(text)})


def _key_statuses(construction: Construction, closest: tuple[ClosestFamily, ...]) -> tuple[KeyStatus, ...]:
    unknown = set(closest[0].unknown_keys) if closest else None
    statuses = []
    for use in construction.uses:
        if any(f"{use.key}.".startswith(f"{refused}.") for refused in construction.refused_keys):
            status = "unsupported"
        elif use.use in _STATUS_OF_USE:
            status = _STATUS_OF_USE[use.use]
        elif construction.is_known:
            status = "unread" if construction.model is None else "unknown"
        else:
            is_read = unknown is not None and use.key.removeprefix("text_config.").partition(".")[0] not in unknown
            status = "supported" if is_read else "unknown"
        statuses.append(KeyStatus(use.key, use.value, status))
    return tuple(statuses)


def _problems(
    construction: Construction,
    keys: tuple[KeyStatus, ...],
    tensor_problems: tuple[TensorProblem, ...] | None,
    closest: tuple[ClosestFamily, ...],
) -> list[str]:
    problems = list(construction.refusals)
    if not construction.is_known:
        near = f"; the closest by {closest[0].by}: {', '.join(family.like for family in closest)}" if closest else ""
        problems.append(f"no family of this architecture: belongs in models/{near}")
        for family in closest[:1]:
            problems += [f"unlike {family.like}: {words}" for words in family.differences()]
    elif unknown := [key.key for key in keys if key.status == "unknown"]:
        problems.append(f"config.json has keys that the family does not know: {', '.join(map(_with_readers, unknown))}")
    for kind, words in (("refused", "tensors of the checkpoint are refused"), ("unfilled", "parameters stay unfilled")):
        if count := sum(problem.count for problem in tensor_problems or () if problem.kind == kind):
            problems.append(f"{count} {words}")
    return problems


def _with_readers(key: str) -> str:
    """Writes a key with the families that read it, which have what it asks for."""
    if not (readers := families_that_read(key.rpartition(".")[2])):
        return key
    return f"{key} (known to {', '.join(readers[:_NUM_READERS])}{', ...' if len(readers) > _NUM_READERS else ''})"


def _no_tensors_reason(
    source: ModelSource, construction: Construction, tensor_problems: tuple[TensorProblem, ...] | None
) -> str:
    if source.tensors is None or tensor_problems is not None:
        return source.no_tensors_reason
    return "there is no model to check them against" if construction.model is None else "their format is not supported"


def _sized(vllm_config: VllmConfig, max_context: int, cache_dtype: DTypeLike) -> VllmConfig:
    return dataclasses.replace(
        vllm_config,
        model_config=dataclasses.replace(vllm_config.model_config, max_model_len=max_context),
        cache_config=CacheConfig(block_size=BLOCK_SIZE, cache_dtype=cache_dtype),
        scheduler_config=SchedulerConfig(DEFAULT_MAX_NUM_SEQS, DEFAULT_MAX_NUM_BATCHED_TOKENS),
    )


def _finite(value: object) -> Any:
    """Replaces infinity, which some configs contain and JSON lacks, with a string."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
