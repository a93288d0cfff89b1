"""Options of the vision transformer that families share, and the keys of config.json that say them.

A family states its options once: each is a value, or a key (`of_vision`, `of_model`) with the default of the reference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple, Self, TypeVar, cast

from jaxis.config.hf_config import HFConfig
from jaxis.layers.leaves import layer_norm, linear
from jaxis.layers.scope import LayerScope
from jaxis.models.common.towers.layers import MakeNorm, one_side
from jaxis.models.common.towers.positions import AxialRope, Positions, axial_rope_theta

_KEYS = {
    **{"hidden_size": "hidden_size", "intermediate_size": "intermediate_size", "patch_size": "patch_size"},
    **{"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads", "activation": "hidden_act"},
}
"""Options that most families say by these keys of `vision_config`."""

_SIDES = ("patch_size", "merge_size")
_T = TypeVar("_T")


class Key(NamedTuple):
    """An option that config.json may say.

    Attributes:
      part: Object of config.json that has the key; empty for config.json itself.
      name: The key.
      default: Value without the key; may be another key.
      convert: Function from the value to the option's; None for the value itself.
    """

    part: str
    name: str
    default: Any
    convert: Callable[[Any], Any] | None = None


def of_vision(name: str, default: _T) -> _T:
    """Declares an option that a key of `vision_config` says."""
    return cast("_T", Key("vision_config", name, default))


def of_model(name: str, default: _T) -> _T:
    """Declares an option that a key of config.json says."""
    return cast("_T", Key("", name, default))


def converted(key: Any, convert: Callable[[Any], _T]) -> _T:
    """Declares an option that is a function of a key's value."""
    return cast("_T", key._replace(convert=convert))


def resolved(value: _T, config: HFConfig) -> _T:
    """Returns a declaration with config.json's values of its keys."""
    if isinstance(value, Key):
        part: HFConfig = config[value.part] if value.part else config
        found = part.get(value.name, resolved(value.default, config))
        return found if value.convert is None else value.convert(found)
    if isinstance(value, tuple):
        return cast("_T", tuple(resolved(each, config) for each in value))
    if isinstance(value, dict):
        return cast("_T", {key: resolved(each, config) for key, each in value.items()})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (field.name for field in dataclasses.fields(value))
        return dataclasses.replace(value, **{name: resolved(getattr(value, name), config) for name in fields})
    return value


@dataclass(frozen=True)
class VisionOptions:
    """A family's vision transformer. `read` gives its options the values of a config.json.

    Attributes:
      hidden_size, intermediate_size: C and F.
      num_layers: Number of layers.
      num_heads, num_kv_heads: H and K, of which K divides H; None for K means H.
      patch_size: Pixels of a side of a patch.
      activation: Name of the activation of feed-forward blocks.
      head_size: D; None means C / H.
      merge_size: Patches of a side of the square that becomes one embedding.
      num_frames: Frames of a view of a video; 1 for images only.
      is_gated: True for feed-forward blocks with a gate.
      make_norm, epsilon: Factory of the norms, and their epsilon.
      embed_patches: Factory of the embedding of patches, called with a scope and the options; None: a convolution.
      patch_bias: True if it has a bias.
      positions: Table of positions; None for none.
      class_shape: Shape of the class token's parameter [..., C], without C; None for no class token.
      norms: Norms outside the layers: `patch_norm` (before positions), `pre_norm`, `post_norm`.
      rope: Rotation of queries and keys by row and column; None for none.
      packs_qkv: True if one product computes queries, keys and values.
      qkv_bias, out_bias, mlp_bias: True if the products have biases; `mlp_bias` is that of gated blocks.
      qk_norm_epsilon: Epsilon of norms of queries and keys; None for no norms.
      norms_all_heads: True if such a norm is over all heads together.
      attention_scale: Factor of the scores; None means 1 / sqrt(D).
      window_side: Patches of a side of the windows within which layers see; None for no windows.
      whole_layers: Layers that see all of an image nevertheless.
      outputs: Numbers of layers after which the states are handed on; empty means after all.
      make_linear: Factory of the products of attention.
      make_mixer, make_mlp: Factories of a layer's two blocks, called with a scope and the options; None:
        `VisionAttention` and a feed-forward block.
      make_after: Factory of a module between each block and its residual; None for none.
      merges_after: Index of the layer after which neighbours are merged, in towers that do so midway; None for none.
      expected: Supported values of keys of `vision_config` that are not options.
      expected_outside: The same of config.json.
      ignored: Keys of `vision_config` without an effect, and why.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_size: int
    activation: str
    _: KW_ONLY
    num_kv_heads: int | None = None
    head_size: int | None = None
    merge_size: int = 1
    num_frames: int = 1
    is_gated: bool = False
    make_norm: MakeNorm = layer_norm
    epsilon: float = 1e-6
    embed_patches: Make | None = None
    patch_bias: bool = False
    positions: Positions | None = None
    class_shape: tuple[int, ...] | None = None
    norms: Sequence[str] = ()
    rope: AxialRope | None = None
    packs_qkv: bool = False
    qkv_bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = False
    qk_norm_epsilon: float | None = None
    norms_all_heads: bool = False
    attention_scale: float | None = None
    window_side: int | None = None
    whole_layers: Sequence[int] = ()
    outputs: Sequence[int] = ()
    make_linear: Callable[..., Any] = linear
    make_mixer: Make | None = None
    make_mlp: Make | None = None
    make_after: Make | None = None
    merges_after: int | None = None
    expected: Mapping[str, Expected] = dataclasses.field(default_factory=dict[str, "Expected"])
    expected_outside: Mapping[str, Expected] = dataclasses.field(default_factory=dict[str, "Expected"])
    ignored: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])

    @property
    def head_dim(self) -> int:
        return self.head_size or self.hidden_size // self.num_heads

    @property
    def num_merged(self) -> int:
        """Number of patches that become one embedding."""
        return self.merge_size**2

    @property
    def merged_size(self) -> int:
        """Features of the patches that become one embedding."""
        return self.hidden_size * self.num_merged

    def read(self, config: HFConfig) -> Self:
        """Returns the options with the values of a config.json.

        Raises:
          ConfigError: A setting is not supported.
        """
        vision = config["vision_config"]
        vision.expect_all(num_channels=3, in_channels=3, in_chans=3, attention_dropout=0.0)
        for key, because in self.ignored.items():
            vision.ignore(key, because=because)
        stated: dict[str, Any] = {name: getattr(self, name) for name in _KEYS}
        usual = {name: of_vision(_KEYS[name], each) for name, each in stated.items() if not isinstance(each, Key)}
        options = resolved(dataclasses.replace(self, **usual), config)
        values: dict[str, Any] = {name: one_side(getattr(options, name), vision.source) for name in _SIDES}
        if (rope := options.rope) is not None:
            theta = axial_rope_theta(vision, vision.get("rope_theta", rope.theta))
            values["rope"] = dataclasses.replace(rope, theta=theta)
        if (table := options.positions) is not None:
            values["positions"] = table.of_views(vision, values["patch_size"])
        options = dataclasses.replace(options, **values)
        for part, expected in ((vision, options.expected), (config, options.expected_outside)):
            for key, supported in expected.items():
                part.expect(key, *((supported(options),) if callable(supported) else supported))
        return options


Expected = Callable[[VisionOptions], Any] | tuple[Any, ...]
"""Supported values of a key, or a function from the options to the only one."""

Make = Callable[[LayerScope, VisionOptions], Any]
"""Factory of a module."""
