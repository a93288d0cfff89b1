"""The axes along which decoder models differ: the features that a config asks for, and whether jaxis provides them.

A detector (`detectors.py`) turns keys of a config into features. Each feature names the code that provides it. That
code is looked up, so the table cannot promise anything that jaxis lacks.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from jaxis.bringup.analyze.figures import cache_span, has_tied_head
from jaxis.config import VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.engine.execution.cache_specs import cache_specs
from jaxis.layers.checkpoint_names import checkpoint_names_of
from jaxis.layers.module import JaxModule, named_modules, named_parameters
from jaxis.layers.rope import RotaryEmbedding
from jaxis.models.common.text_part import TextPart

_CODE = re.compile(r"([\w.]+):(\w+)(?:\((\w+)\)|\[(.+)\])?")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(.+)$")


@runtime_checkable
class _HasRope(Protocol):
    """An attention layer of any kind."""

    @property
    def rope(self) -> RotaryEmbedding | None: ...


@dataclass(frozen=True)
class Feature:
    """One feature that a config asks for.

    Attributes:
      code: Code that provides it: "package.module:name", a parameter as "...:name(parameter)", or an entry of a table
        or tuple as "...:name[key]". "" means that every model here has it; None means that no code provides it.
      files: Files of src/jaxis where it belongs.
    """

    value: str
    code: str | None = ""
    files: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()

    @property
    def is_provided(self) -> bool:
        return self.code == "" or (self.code is not None and _exists(self.code))


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a constructed model.

    Attributes:
      layers: Name of a parameter below its layer -> (shape, number of layers that have it).
      spans: (kind of cache, most tokens it ever needs or None) -> number of layers.
      rope_counts: Layer has RoPE -> number of layers; empty if layers do not say.
      rope_kinds: Differences of the layers' RoPE from pairs of halves that rotate forwards.
      has_tower: True if the model has an image encoder.
    """

    layers: dict[str, tuple[tuple[int, ...], int]]
    is_tied: bool
    spans: dict[tuple[str, int | None], int]
    norms: tuple[str, ...]
    rope_counts: dict[bool, int]
    rope_kinds: tuple[str, ...]
    has_tower: bool = False

    @classmethod
    def of(cls, model: JaxModule, vllm_config: VllmConfig) -> ModelFacts:
        layers: dict[str, tuple[tuple[int, ...], int]] = {}
        known_as = checkpoint_names_of(model).name_in_checkpoint
        for name, param in named_parameters(model):
            if match := _LAYER.search(known_as(name)):
                shape, count = layers.get(match[2], (tuple(getattr(param.get_value(), "shape", ())), 0))
                layers[match[2]] = shape, count + 1
        spans = Counter(cache_span(spec) for spec in cache_specs(model, vllm_config))
        modules = [(known_as(name), module) for name, module in named_modules(model)]
        inside = [match[2] for name, _ in modules if (match := _LAYER.search(name))]
        norms = tuple(dict.fromkeys(name for name in inside if "." not in name and "norm" in name))
        ropes = [module.rope for _, module in modules if isinstance(module, _HasRope)]
        rope_kinds = dict.fromkeys(word for rope in ropes if rope is not None for word in _rope_words(rope))
        has_tower = isinstance(model, TextPart) and model.tower is not None
        return cls(
            layers,
            has_tied_head(model),
            dict(spans),
            norms,
            Counter(rope is not None for rope in ropes),
            tuple(rope_kinds),
            has_tower,
        )


def _rope_words(rope: RotaryEmbedding) -> Iterator[str]:
    if rope.interleaved:
        yield "pairs of neighbours"
    if any(frequency < 0 for frequency in rope.inv_freq):
        yield "rotating backwards"


@dataclass(frozen=True)
class Axis:
    """A model's value on one axis.

    Attributes:
      keys: Keys of the config that determine it -> True if the value differs from the default.
    """

    name: str
    features: tuple[Feature, ...]
    keys: dict[str, bool] = field(default_factory=dict)

    @property
    def missing(self) -> tuple[Feature, ...]:
        return tuple(feature for feature in self.features if not feature.is_provided)


Detector = Callable[[HFConfig, ModelFacts | None], Sequence[Feature]]


@dataclass(frozen=True)
class AxisRow:
    """A row of the table of axes.

    Attributes:
      other_keys: Further keys that belong to the axis and that the detector does not read.
    """

    name: str
    detector: Detector
    other_keys: tuple[str, ...] = ()

    def detect(self, config: HFConfig, facts: ModelFacts | None) -> Axis:
        """Returns the model's value on the axis; reading a key of `config` here does not mark it as used."""
        view = HFConfig(config.to_dict(), source=config.source)
        features = tuple(self.detector(view, facts))
        for key in self.other_keys:
            if key in view:
                view.get(key)
        keys = {use.key: use.use == "used" for use in view.key_uses() if use.use in ("used", "default")}
        return Axis(self.name, features, keys)


def files_of(feature: Feature) -> tuple[str, ...]:
    if feature.files or not feature.code:
        return feature.files
    module = feature.code.partition(":")[0]
    return (module.removeprefix("jaxis.").replace(".", "/") + ".py",)


def _exists(code: str) -> bool:
    match = _CODE.fullmatch(code)
    if match is None:
        raise ValueError(f"{code!r} names no code")
    module, name, parameter, key = match.groups()
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return False
    if parameter is not None:
        # Not looked up on the class: the metaclass of modules has its own `__call__`.
        return parameter in inspect.signature(found.__init__ if isinstance(found, type) else found).parameters
    return key is None or key in found
