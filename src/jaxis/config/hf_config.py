"""A checkpoint's config.json, read so that no key can be overlooked.

A model reads the keys it needs, and names those it does not need (`ignore`) and those it supports with one value only
(`expect`); `unread_keys` then lists the others that could change its logits, by the rules of `key_rules`. A config that
says something the model does not do is an error, not a wrong answer.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jaxis.config.key_rules import judge
from jaxis.config.quantization_files import config_path, read_config
from jaxis.config.reference import reference_of
from jaxis.errors import CheckpointError, ConfigError
from jaxis.host.json_object import read_json_object

# Defaults of keys that published config.json files omit because transformers' config class supplies them.


_GEMMA4_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}

# By `model_type`. Only keys that every model of the type needs: `transformers` is the reference for their values.
CONFIG_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    # The `text_config` of multimodal checkpoints.
    "gemma3_text": {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
    "olmoe": {"rms_norm_eps": 1e-5},
    "qwen3_vl_text": {"rope_theta": 500_000.0},
    "qwen3_vl_moe_text": {"rope_theta": 500_000.0, "norm_topk_prob": True},
    "gemma4_text": {"rope_parameters": _GEMMA4_ROPES},
    "gemma4_unified_text": {"rope_parameters": _GEMMA4_ROPES, "hidden_size_per_layer_input": 0},
}


_GPT2_KEYS = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "activation_function": "hidden_act",
    "layer_norm_epsilon": "layer_norm_eps",
}

# By `model_type`: what its config.json calls a key that most families have -> the usual name, which readers use.
USUAL_KEYS: Mapping[str, Mapping[str, str]] = {
    "bloom": {
        "n_embed": "hidden_size",
        "n_head": "num_attention_heads",
        "n_layer": "num_hidden_layers",
        "seq_length": "max_position_embeddings",
        "layer_norm_epsilon": "layer_norm_eps",
    },
    "codegen": _GPT2_KEYS,
    "exaone": {
        "num_layers": "num_hidden_layers",
        "layer_norm_epsilon": "rms_norm_eps",
        "activation_function": "hidden_act",
    },
    "falcon": {
        "num_kv_heads": "num_key_value_heads",
        "ffn_hidden_size": "intermediate_size",
        "layer_norm_epsilon": "layer_norm_eps",
        "activation": "hidden_act",
        "n_head": "num_attention_heads",
        "n_layer": "num_hidden_layers",
    },
    "gpt2": _GPT2_KEYS,
    "gpt_bigcode": _GPT2_KEYS,
    "gpt_neo": {
        "num_heads": "num_attention_heads",
        "num_layers": "num_hidden_layers",
        "layer_norm_epsilon": "layer_norm_eps",
        "activation_function": "hidden_act",
    },
    "gpt_neox": {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
    "gptj": _GPT2_KEYS,
    "mpt": {
        "d_model": "hidden_size",
        "n_heads": "num_attention_heads",
        "n_layers": "num_hidden_layers",
        "max_seq_len": "max_position_embeddings",
        "layer_norm_epsilon": "layer_norm_eps",
    },
    "nomic_bert": {
        **_GPT2_KEYS,
        "rotary_emb_base": "rope_theta",
    },
    "opt": {"ffn_dim": "intermediate_size", "activation_function": "hidden_act"},
    "stablelm": {"rope_pct": "partial_rotary_factor", "norm_eps": "layer_norm_eps"},
}


def with_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """A parsed config.json, or an object in one, under the usual names of keys (USUAL_KEYS).

    Missing keys are set to the defaults of its `model_type`. A key that stands there under both names keeps them.
    """
    model_type = values.get("model_type")
    if not isinstance(model_type, str):
        return dict(values)
    usual = USUAL_KEYS.get(model_type, {})
    named = {key if usual.get(key) in values else usual.get(key, key): value for key, value in values.items()}
    return {**CONFIG_DEFAULTS.get(model_type, {}), **named}


# How many experts a layer has and a token goes to, under the names that families have for it in config.json.


NUM_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = (
    *("num_experts_per_tok", "experts_per_token", "num_experts_per_token", "top_k_experts"),
    *("moe_k", "moe_topk", "moe_top_k"),
)


def num_experts(config: Mapping[str, Any]) -> int:
    """The number of a layer's routed experts; 0 without experts. Layers that differ count as the largest."""
    return _largest(config, NUM_EXPERTS)


def experts_per_token(config: Mapping[str, Any]) -> int:
    """The number of a layer's routed experts that one token goes to; 0 without experts."""
    return _largest(config, EXPERTS_PER_TOKEN)


def _largest(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    value = next((config[name] for name in names if config.get(name)), 0)
    return max(value) if isinstance(value, list) else value


GENERATION_KEYS = (
    *("bos_token_id", "eos_token_id", "pad_token_id", "do_sample", "temperature", "top_k", "top_p", "min_p"),
    *("repetition_penalty", "max_new_tokens", "min_new_tokens", "stop_strings"),
)
"""Keys of generation_config.json that `load_generation_defaults` returns."""
_TYPES_OF_GENERATION: dict[str, tuple[type, ...]] = {"do_sample": (bool,), "stop_strings": (str,)}


@dataclass(frozen=True)
class KeyUse:
    """How one key of a config was used.

    Attributes:
      key: The key as config.json has it; one of a nested object is written with dots.
      value: As config.json has it.
      use: "used" was read; "default" was read, and has the value that the reader assumes without it, or is null;
        "neutral" cannot change logits, of any model or of this one (`HFConfig.ignore`); "ignored" is some tool's, and
        not the model's; "unread" could change logits, and no code read it.
      because: Why it is "unread"; empty otherwise.
    """

    key: str
    value: Any
    use: Literal["used", "default", "neutral", "ignored", "unread"]
    because: str = ""


class _MissingKeyError(ConfigError, KeyError, AttributeError):
    """A required key is absent. Also a KeyError and AttributeError, so that `getattr(config, key, default)` works."""

    def __str__(self) -> str:  # KeyError's would put the message in quotes
        return str(self.args[0])


class HFConfig(Mapping[str, Any]):
    """A read-only view of a config that records every key read.

    `config.hidden_size`, `config["hidden_size"]` and `config.get("hidden_size", default)` read a key. A nested object
    is an HFConfig too. A required key that is null counts as absent; `get` says what others are. `key in config` and
    iterating over keys are not reading.

    Attributes:
      source: What the config was read from, for error messages.
    """

    __slots__ = ("_ignored", "_path", "_read", "_spellings", "_values", "source")

    def __init__(
        self,
        values: Mapping[str, Any],
        overrides: Mapping[str, Any] | None = None,
        *,
        source: str = "the model's config",
        _path: str = "",
    ) -> None:
        """Wraps a parsed config.

        Args:
          values: The config.
          overrides: Key -> value to set before anything reads the config; None removes the key. A key of a nested
            object is written with dots, e.g. `text_config.hidden_size`.
          source: What the config was read from.

        Raises:
          ConfigError: If an override's path goes through a key that is not an object.
        """
        self.source = source
        self._path = _path
        # Key -> whether every reader so far assumes, without the key, the value that it has.
        self._read: dict[str, bool] = {}
        self._ignored: set[str] = set()
        given = _apply_overrides(copy.deepcopy(dict(values)), overrides or {}, source)
        # A usual key -> what the file calls it, or would.
        own_names = USUAL_KEYS.get(str(given.get("model_type")), {})
        self._spellings = {usual: own for own, usual in own_names.items() if usual not in given}
        plain = with_defaults(given)
        self._values = {
            key: HFConfig(value, source=source, _path=f"{_path}{key}.") if isinstance(value, dict) else value
            for key, value in plain.items()
        }

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str], overrides: Mapping[str, Any] | None = None) -> HFConfig:
        """Reads `folder`/config.json, and the file beside it that says how the weights are quantized, if there is one.

        Raises:
          CheckpointError: If there is no such file, or it is not a JSON object.
          ConfigError: See the constructor, or the two files contradict each other.
        """
        return cls(read_config(folder), overrides, source=str(config_path(folder)))

    def with_values(self, values: Mapping[str, Any]) -> HFConfig:
        """This config with other values; what is read of either counts as read of both.

        Args:
          values: Key -> value; a key of a nested object that is there is written with dots.
        """
        changed = copy.copy(self)
        changed._values = dict(self._values)
        for dotted, value in values.items():
            key, _, rest = dotted.partition(".")
            changed._values[key] = changed._values[key].with_values({rest: value}) if rest else value
        return changed

    def __getitem__(self, key: str) -> Any:
        if key not in self:
            name = self._as_written(key)
            raise _MissingKeyError(
                f"{self.source} has no {name!r}, which the model needs: "
                f"add it to the file, or give hf_overrides={{{name!r}: ...}}",
                keys=[name],
            )
        self._read[key] = False
        return self._values[key]

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__") or key in HFConfig.__slots__:  # copy and pickle probe for these before they are set
            raise AttributeError(key)
        return self[key]

    def get(self, key: str, default: object = None) -> Any:
        """The key's value, or `default` where it is absent. Records the key as read either way.

        Null is what the reference makes of it. Where that keeps it, it is None, of a switch False, or `default` if that
        is "off" too. Where the reference computes a value or refuses null, it is `default`. Without a reference it is
        kept, but in nested objects, such as those of RoPE, it is `default`.
        """
        value = self._values.get(key)
        self._read[key] = self._read.get(key, True) and value == default
        if value is not None:
            return value
        if not default or key not in self._values or not self._null_stays(key):
            return default
        return False if default is True else None

    def _null_stays(self, key: str) -> bool:
        """Whether null in the file is no value, instead of asking for the default."""
        reference = reference_of(self._values.get("model_type"))
        if reference is None:
            return self._path in ("", "text_config.")
        name = self._spellings.get(key, key)
        return reference.aliases.get(name, name) in reference.nulls

    def expect(self, key: str, *expected: Any) -> None:
        """Reads a key whose other values the model does not implement; it may be absent.

        Raises:
          ConfigError: It has another value.
        """
        value = self.get(key, expected[0])
        if value not in expected:
            wanted, name = " or ".join(map(repr, expected)), self._as_written(key)
            given = self._plain(key)
            raise ConfigError(f"{self.source} has {name}={given!r}, of which only {wanted} is supported", keys=[name])

    def ignore(self, key: str, *, because: str) -> None:
        """Declares that the model knows a key and that its value, or nested values, have no effect.

        Other readers may still use it: a layer ignores what only layers of another kind need.

        Args:
          key: The key; it need not be there.
          because: Why it changes nothing, for readers of the model's code.

        Raises:
          ValueError: No reason is given.
        """
        if not because:
            raise ValueError(f"{key!r} is ignored without a reason")
        self._ignored.add(key)

    def get_text_config(self) -> HFConfig:
        """The text decoder's config: the nested `text_config` of a multimodal model, else this one."""
        text_config = self._values.get("text_config")
        return self["text_config"] if isinstance(text_config, HFConfig) else self

    def read_object(self, key: str) -> dict[str, Any] | None:
        """A nested object as a plain dict, all of it recorded as read; None where it is absent.

        Raises:
          ConfigError: If the key's value is not an object.
        """
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, HFConfig):
            raise ConfigError(
                f"{self.source} has {self._path + key}={value!r}, expected an object", keys=[self._path + key]
            )
        for nested in value:
            if isinstance(value.get(nested), HFConfig):
                value.read_object(nested)
        return value.to_dict()

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self._values.get(key) is not None

    def __iter__(self) -> Iterator[str]:
        return (key for key, value in self._values.items() if value is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"HFConfig({self.to_dict()!r}, source={self.source!r})"

    def to_dict(self) -> dict[str, Any]:
        """A plain deep copy, nulls included. Does not count as reading."""
        return {
            key: value.to_dict() if isinstance(value, HFConfig) else copy.deepcopy(value)
            for key, value in self._values.items()
        }

    def unread_keys(self) -> list[str]:
        """Keys that are set, that no code read, and that could change logits, sorted.

        A nested object that was read is followed: its unread keys are given with dots, e.g. `rope_scaling.factor`.
        """
        return sorted(use.key for use in self.key_uses() if use.use == "unread")

    def ignored_keys(self) -> list[str]:
        """Keys that are set, that no code read, and that only other tools know, sorted; nested ones as above."""
        return sorted(use.key for use in self.key_uses() if use.use == "ignored")

    def key_uses(self) -> list[KeyUse]:
        """How each key was used so far, nulls included; a nested object that was read is followed."""
        uses: list[KeyUse] = []
        for key, value in self._values.items():
            if key in self._read and isinstance(value, HFConfig):
                uses += value.key_uses()
                continue
            plain, because = self._plain(key), ""
            if value is None:
                use = "default"
            elif key in self._read:
                use = "default" if self._read[key] else "used"
            elif key in self._ignored or self._repeats_what_was_read(key, plain):
                use = "neutral"
            else:
                verdict = judge(key, plain, self._values.get("model_type"), self._plain)
                use, because = verdict.use, verdict.because
            uses.append(KeyUse(self._as_written(key), plain, use, because))
        return uses

    def _as_written(self, key: str) -> str:
        """What the file calls a key, with the objects that contain it."""
        return self._path + self._spellings.get(key, key)

    def _repeats_what_was_read(self, key: str, value: Any) -> bool:
        """Whether a key says once more, under another name of the same number, what was read."""
        return any(
            other in self._read and self._plain(other) == value
            for names in (NUM_EXPERTS, EXPERTS_PER_TOKEN)
            if key in names
            for other in names
        )

    def _plain(self, key: str) -> Any:
        """A key's value, an object as a dict; None if it is absent. Does not count as reading."""
        value = self._values.get(key)
        return value.to_dict() if isinstance(value, HFConfig) else value


def load_generation_defaults(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads the sampling settings that a checkpoint's makers recommend, from `folder`/generation_config.json.

    Returns:
      Those of GENERATION_KEYS that the file sets, as it sets them (`eos_token_id` may be one id or a list, and
      `stop_strings` one string or a list); empty where there is no such file.

    Raises:
      CheckpointError: If the file is not a JSON object, or a setting has the wrong type.
    """
    path = Path(folder) / "generation_config.json"
    if not path.exists():
        return {}
    found = read_json_object(path)
    defaults = {key: found[key] for key in GENERATION_KEYS if found.get(key) is not None}
    for key, value in defaults.items():
        types = _TYPES_OF_GENERATION.get(key, (int,) if key.endswith("_token_id") else (int, float))
        settings = value if key in ("eos_token_id", "stop_strings") and isinstance(value, list) else [value]
        if not all(type(setting) in types for setting in settings):
            expected = " or ".join(kind.__name__ for kind in types)
            raise CheckpointError(f"{path} sets {key} to {value!r}, expected {expected}: correct the file")
    return defaults


def _apply_overrides(values: dict[str, Any], overrides: Mapping[str, Any], source: str) -> dict[str, Any]:
    for dotted, value in overrides.items():
        *parents, key = dotted.split(".")
        target = values
        for parent in parents:
            if target.get(parent) is None:
                target[parent] = {}
            target = target[parent]
            if not isinstance(target, dict):
                raise ConfigError(
                    f"the override {dotted!r} goes through {parent!r}, which is not an object in {source}"
                )
        target[key] = copy.deepcopy(value)
    return values
