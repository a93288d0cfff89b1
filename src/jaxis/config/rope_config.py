"""Rotary embedding settings, from any form of config.json.

Configs of transformers 4 have `rope_theta` beside `rope_scaling` (whose kind is `type` or `rope_type`); those of
transformers 5 have it all in `rope_parameters`. The places and their order are those of transformers 5
(`modeling_rope_utils.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxis.config.hf_config import HFConfig
from jaxis.errors import ConfigError

ROPE_TYPES = ("default", "linear", "dynamic", "ntk", "llama3", "yarn", "longrope", "proportional")

_LAYER_TYPES = ("full_attention", "sliding_attention")
ROPE_ALIASES = {
    "su": "longrope",  # its name in the first Phi-3 checkpoints
    "mrope": "default",  # of text; see `_Reader`
    "telechat3-yarn": "yarn",
    "deepseek_yarn": "yarn",
}


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Settings of a rotary embedding. Those that its `rope_type` does not use are None (or the default here).

    Attributes:
      theta: Base of the frequencies.
      partial_rotary_factor: Share of the head dimension that is rotated (proportional: by angles other than 0).
      max_position_embeddings: The context length that the config declares, in tokens.
      factor: Factor by which the context is stretched (linear, dynamic, ntk, llama3, yarn, longrope, proportional).
      original_max_position_embeddings: Context length of pretraining, in tokens (llama3, yarn, longrope).
      attention_factor: Multiplies cosine and sine; None where the config leaves it to the rope type's own formula
        (yarn, longrope).
      beta_fast: Rotations over the pretraining context above which a frequency is kept (yarn).
      beta_slow: Rotations below which a frequency is divided by `factor` (yarn).
      mscale: Numerator's scale in the attention factor's formula (yarn).
      mscale_all_dim: Denominator's scale in that formula (yarn).
      truncate: True if the range between the two betas is rounded to whole dimensions (yarn).
      low_freq_factor: Pretraining context over the shortest wavelength that is divided by `factor` (llama3).
      high_freq_factor: Pretraining context over the longest wavelength that is kept (llama3).
      short_factor: Divisor of each frequency up to the pretraining context, one for each rotated pair (longrope).
      long_factor: Divisors beyond that context (longrope).
      mrope_section: Numbers of rotated pairs that go by a token's time, row and column (M-RoPE); None: all by one
        position.
      mrope_interleaved: True if these pairs alternate, instead of following each other.
    """

    rope_type: str
    theta: float
    partial_rotary_factor: float = 1.0
    max_position_embeddings: int | None = None
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None
    mrope_section: tuple[int, ...] | None = None
    mrope_interleaved: bool = False


def rope_config(
    config: HFConfig,
    layer_type: str | None = None,
    *,
    theta: float | None = None,
    default_theta: float = 10_000.0,
    default_local_theta: float | None = None,
    default_partial_rotary_factor: float = 1.0,
    default_interleaved_mrope: tuple[int, ...] | None = None,
) -> RopeConfig:
    """Reads a config's rotary embedding settings.

    Only keys that the rope type uses are read: any other is left for `HFConfig.unread_keys` to report.

    Args:
      config: Config of the model.
      layer_type: "full_attention" or "sliding_attention", for families whose rope differs between them, or another name
        that `rope_parameters` has for a kind of layer. If config.json
        has one object for both (transformers 4), it is the full layers': sliding ones have the default rope with
        `rope_local_base_freq`.
      theta: Theta of a layer whose family lists them one by one, instead of config.json's for all layers.
      default_theta: The family's theta if config.json names none.
      default_local_theta: The family's theta for sliding layers; None is the theta of the full ones.
      default_partial_rotary_factor: The family's share if config.json names none.
      default_interleaved_mrope: The `mrope_section` of a family with interleaved ones, if config.json names none.

    Raises:
      ConfigError: The rope type is unknown, a key it needs is missing, or a value is not the number it should be.
    """
    reader = _Reader(config, layer_type)
    common_theta = config.get("rope_theta", default_theta)
    if layer_type == "sliding_attention":
        common_theta = config.get("rope_local_base_freq", default_local_theta or common_theta)
    common_theta = reader.get("rope_theta", common_theta)
    partial_rotary_factor = config.get("partial_rotary_factor", default_partial_rotary_factor)
    rope_type = reader.rope_type()
    section = reader.get("mrope_section", default_interleaved_mrope)
    settings: dict[str, Any] = {
        "mrope_section": tuple(section) if section else None,
        "mrope_interleaved": bool(reader.get("mrope_interleaved", default_interleaved_mrope is not None)),
        "rope_type": rope_type,
        "theta": reader.positive("rope_theta", common_theta if theta is None else theta),
        "partial_rotary_factor": reader.number("partial_rotary_factor", partial_rotary_factor),
        "max_position_embeddings": config.get("max_position_embeddings"),
        "factor": reader.optional("factor") if rope_type == "proportional" else None,
    }
    if rope_type in ("linear", "dynamic", "ntk", "llama3"):
        settings["factor"] = reader.number("factor")
    if rope_type == "dynamic":
        settings["max_position_embeddings"] = config["max_position_embeddings"]
    if rope_type in ("llama3", "yarn", "longrope"):
        outside, inside = (c.get("original_max_position_embeddings") for c in (config, reader))
        original = reader.positive(
            "original_max_position_embeddings", outside or inside or config["max_position_embeddings"]
        )
        settings["original_max_position_embeddings"] = int(original)
    else:
        config.ignore("original_max_position_embeddings", because="this rope does not stretch the context")
    if rope_type == "llama3":
        settings["low_freq_factor"] = reader.number("low_freq_factor")
        settings["high_freq_factor"] = reader.number("high_freq_factor")
    if rope_type in ("yarn", "longrope"):
        factor = reader.get("factor")
        if factor is None:
            factor = reader.positive("max_position_embeddings", config["max_position_embeddings"]) / original
        settings["factor"] = reader.number("factor", factor)
        settings["attention_factor"] = reader.optional("attention_factor")
    if rope_type == "yarn":
        settings["beta_fast"] = reader.number("beta_fast", 32.0)
        settings["beta_slow"] = reader.number("beta_slow", 1.0)
        # 0 means unset, as in transformers.
        settings["mscale"] = reader.optional("mscale") if reader.get("mscale") else None
        settings["mscale_all_dim"] = reader.optional("mscale_all_dim") if reader.get("mscale_all_dim") else None
        settings["truncate"] = bool(reader.get("truncate", True))
        # A value of the first implementation, which stretched the growing context of models not trained for it.
        reader.section.expect("finetuned", True)
    if rope_type == "longrope":
        settings |= _longrope_settings(reader, settings["attention_factor"])
    return RopeConfig(**settings)


def llama_4_scaling_beta(config: HFConfig) -> float | None:
    """Returns the growth of queries with position in families with Llama 4's temperature; None for others.

    Raises ConfigError if the setting, which is among those of the rope, is not a number above 0.
    """
    reader = _Reader(config, None)
    reader.section.expect("max_position_embeddings", config.get("max_position_embeddings"))
    return reader.optional("llama_4_scaling_beta")


def rope_config_with_alpha(config: HFConfig, head_dim: int) -> RopeConfig:
    """Reads `rope_config` for Hunyuan, whose "dynamic" rope with an `alpha` has a larger base from the start on.

    Raises ConfigError as `rope_config` does, or if `alpha` is not a number above 0.
    """
    reader = _Reader(config, None)
    if reader.rope_type() != "dynamic" or not reader.get("alpha"):
        return rope_config(config)
    for key in ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
        reader.section.ignore(key, because="alpha alone says how far the context is stretched")
    theta = reader.number("rope_theta", config.get("rope_theta", 10_000.0))
    return RopeConfig(
        rope_type="default",
        theta=theta * reader.number("alpha") ** (head_dim / (head_dim - 2)),
        max_position_embeddings=config.get("max_position_embeddings"),
    )


def _longrope_settings(reader: _Reader, attention_factor: float | None) -> dict[str, Any]:
    mscale = reader.optional("short_mscale")  # Phi-3.5-MoE has the attention factor under two other names
    reader.section.expect("long_mscale", mscale)
    return {
        "short_factor": reader.numbers("short_factor"),
        "long_factor": reader.numbers("long_factor"),
        "attention_factor": attention_factor if mscale is None else mscale,
    }


class _Reader:
    """Reader of the object that holds a layer type's rope settings, with errors that name it."""

    def __init__(self, config: HFConfig, layer_type: str | None) -> None:
        self.config = config
        self.name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
        self.section = self._object(config, self.name)
        if layer_type is not None:
            self._choose(layer_type)
        for key in ("mrope_section", "mrope_interleaved"):
            self.section.ignore(key, because="all coordinates of a position are the same where there is only text")

    def _object(self, parent: HFConfig, key: str) -> HFConfig:
        section = parent.get(key)
        if section is not None and not isinstance(section, HFConfig):
            raise ConfigError(f"{self.config.source} has the {self.name} {section!r}, expected an object")
        return HFConfig({}) if section is None else section

    def _choose(self, layer_type: str) -> None:
        if any(key in self.section for key in (*_LAYER_TYPES, layer_type)):
            self.section.ignore("original_max_position_embeddings", because="each kind of layer has its own")
            self.section = self._object(self.section, layer_type)
            self.name = f"{self.name}.{layer_type}"
        elif layer_type == "sliding_attention":
            self.section = HFConfig({})

    def rope_type(self) -> str:
        old_name = self.get("type", "default")
        rope_type = self.get("rope_type", old_name)
        if any(isinstance(self.section.to_dict()[key], dict) for key in self.section):
            raise self._fault("", "differs from layer to layer", "one object for all layers")
        rope_type = ROPE_ALIASES.get(rope_type, rope_type) if isinstance(rope_type, str) else rope_type
        if rope_type not in ROPE_TYPES:
            raise self._fault("rope_type", f"has the rope_type {rope_type!r}", f"one of {', '.join(ROPE_TYPES)}")
        if rope_type == "ntk":
            self.section.expect("mixed_b", None)  # another divisor for each pair
        return rope_type

    def get(self, key: str, default: object = None) -> Any:
        return self.section.get(key, default)

    def number(self, key: str, default: object = None) -> float:
        return self.positive(key, self.get(key, default))

    def positive(self, key: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self._fault(key, f"has the {key} {value!r}", "a number above 0")
        return float(value)

    def optional(self, key: str) -> float | None:
        return None if self.get(key) is None else self.number(key)

    def numbers(self, key: str) -> tuple[float, ...]:
        value = self.get(key)
        if not isinstance(value, list) or any(type(number) not in (int, float) for number in value):
            raise self._fault(key, f"has the {key} {value!r}", "a list of numbers")
        return tuple(float(number) for number in value)

    def _fault(self, key: str, found: str, expected: str) -> ConfigError:
        return ConfigError(
            f"{self.name} in {self.config.source} {found}, expected {expected}: "
            f"correct the file, or give hf_overrides={{{self.name!r}: ...}}",
            keys=[f"{self.name}.{key}".removesuffix(".")],
        )
