"""Analyses whether jaxis can run a model, by its keys, modules and tensors, from config.json and headers alone."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from jaxis.bringup.analyze.closest import all_findings, closest_families
from jaxis.bringup.analyze.construction import construct
from jaxis.bringup.analyze.finding import ModelFinding
from jaxis.bringup.analyze.module_tree import ModuleRow, module_tree
from jaxis.bringup.analyze.sizes import CacheKind, Fit, ParameterCount, cache_kinds, count_parameters, fits_in
from jaxis.bringup.analyze.source import ModelSource, open_source
from jaxis.bringup.analyze.widths import ANY_LENGTH, other_widths, width_of
from jaxis.config.hf_config import KeyUse
from jaxis.config.key_rules import READ_BY_REFERENCE
from jaxis.engine.engine_config import KV_CACHE_DTYPES
from jaxis.engine.execution.cache_memory import machine_memory
from jaxis.engine.memory_account import Width
from jaxis.host.byte_size import parse_bytes
from jaxis.host.json_object import json_object_text
from jaxis.loading.safetensors import TensorInfo

SCHEMA = 3
"""Version of the JSON that `Analysis.to_json` writes; incremented when a field changes its meaning or is removed."""


@dataclass(frozen=True)
class SizeFigures:
    """SizeFigures of a model that can be constructed.

    Attributes:
      kv_cache: Cache of each kind of layer, in `kv_cache_dtype`.
      max_context: Most tokens that the config allows; None if it has no limit.
      memory_name: Name of the memory for weights and cache: "RAM", a device's, or "given".
      fits: Fit of the weights as stored, and as loading can make them.
    """

    parameters: ParameterCount
    kv_cache_dtype: str
    kv_cache: tuple[CacheKind, ...]
    max_context: int | None
    memory_name: str
    memory_bytes: int
    fits: tuple[Fit, ...]


@dataclass(frozen=True)
class Analysis:
    """The result of `jaxis analyze`.

    Attributes:
      findings: Reasons why the model cannot run; empty if it can.
      keys: Uses of config.json's keys; of an architecture without a family, by the closest one or its reference.
      modules: Modules of the constructed model; None, like `sizes`, if it cannot be constructed.
      bytes_by_dtype: Bytes of the checkpoint's tensors of each type, largest first; None without weights.
      not_checked: Reason why tensors were not compared with parameters; empty if they were.
      closest_families: Families to start from if jaxis lacks the architecture, the closest first.
    """

    model: str
    architectures: tuple[str, ...]
    findings: tuple[ModelFinding, ...]
    keys: tuple[KeyUse, ...]
    modules: tuple[ModuleRow, ...] | None
    num_tensors: int | None
    bytes_by_dtype: dict[str, int] | None
    not_checked: str
    sizes: SizeFigures | None
    closest_families: tuple[str, ...]

    @property
    def can_run(self) -> bool:
        """True if jaxis can run the model, regardless of memory."""
        return not self.findings

    @property
    def fits(self) -> bool:
        """True if the weights fit into the memory at some width."""
        return self.sizes is not None and any(fit.fits for fit in self.sizes.fits)

    def to_json(self) -> str:
        """Returns one JSON object, described in docs/bring-up.md."""
        status = "can_run" if self.can_run else "cannot_run"
        facts = {"schema": SCHEMA, "status": status, "can_run": self.can_run, "fits": self.fits}
        return json_object_text(facts | dataclasses.asdict(self))


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
    name, of_devices = machine_memory() if memory is None else ("given", [parse_bytes(memory, "--memory")])
    source = open_source(model, revision=revision)
    construction = construct(source.config, source.config_path, tensors=source.tensors)
    keys, modules, sizes, closest = construction.uses, None, None, []
    if construction.model is not None and construction.vllm_config is not None:
        modules = module_tree(construction.model, in_order_of_calls=in_order_of_calls)
        stored = width_of(source, construction.model, construction.vllm_config)
        sizes = _sizes(source, stored, kv_cache_dtype, name, sum(of_devices))
        findings = all_findings(construction, source.tensors)
    elif construction.findings[0].code == "no_family":
        closest = closest_families(source.config, source.tensors)
        names = ", ".join(like for like, _ in closest)
        [missing] = construction.findings
        findings = [replace(missing, sentence=f"{missing.sentence}; the closest are {names}"), *closest[0][1].findings]
        of_closest = {use.key: use for use in closest[0][1].uses}
        keys = [_as_in(use, of_closest.get(use.key.removeprefix("text_config."))) for use in keys]
    else:
        findings = construction.findings
    not_checked = source.no_tensors_reason
    if construction.findings and source.tensors is not None:
        not_checked = "the model could not be constructed as its checkpoint has it"
    refused = tuple(f"{name}." for finding in construction.findings for name in finding.names)
    return Analysis(
        model=source.name,
        architectures=tuple(source.config.get("architectures") or ()),
        findings=tuple(findings),
        keys=tuple(replace(use, use="refused") if f"{use.key}.".startswith(refused) else use for use in keys),
        modules=modules,
        num_tensors=None if source.tensors is None else len(source.tensors),
        bytes_by_dtype=None if source.tensors is None else _bytes_by_dtype(source.tensors.values()),
        not_checked=not_checked,
        sizes=sizes,
        closest_families=tuple(like for like, _ in closest),
    )


def _as_in(use: KeyUse, of_closest: KeyUse | None) -> KeyUse:
    """Returns a key's use as the closest family has it; what only the reference says that it reads is used."""
    if of_closest is None:
        return use
    is_used = of_closest.because == READ_BY_REFERENCE
    return replace(use, use="used" if is_used else of_closest.use, because="" if is_used else of_closest.because)


def _sizes(source: ModelSource, stored: Width, kv_cache_dtype: str, memory_name: str, memory_bytes: int) -> SizeFigures:
    dtype = KV_CACHE_DTYPES[kv_cache_dtype]
    config = stored.vllm_config.model_config
    longest = config.max_model_len
    return SizeFigures(
        parameters=count_parameters(stored.model(), config.hf_config.get_text_config()),
        kv_cache_dtype=kv_cache_dtype,
        kv_cache=tuple(cache_kinds(stored, dtype)),
        max_context=None if longest == ANY_LENGTH else longest,
        memory_name=memory_name,
        memory_bytes=memory_bytes,
        fits=tuple(fits_in([stored, *other_widths(source, stored)], dtype, memory_bytes)),
    )


def _bytes_by_dtype(tensors: Iterable[TensorInfo]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for info in tensors:
        found[str(info.dtype)] += info.nbytes
    return dict(found.most_common())
