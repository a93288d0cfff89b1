from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxis.errors import ConfigError
from jaxis.loading.gguf.config_keys import Keys
from jaxis.loading.gguf.delta_heads import DeltaHeads, PackedDeltaHeads
from jaxis.loading.gguf.names import ROPE_FREQS
from jaxis.loading.gguf.rope_keys import rope_values

_WITHOUT_HEADS = ("mamba", "mamba2")
ENCODERS = ("bert", "gemma-embedding", "nomic-bert")
FULL, SLIDING = "full_attention", "sliding_attention"
Values = dict[str, Any]
ReadTensor = Callable[[str], np.ndarray | None]


class ConfigReader:
    """Values that all architectures share, as the keys of config.json, from the keys of a GGUF file.

    Attributes:
      kv_heads_of_layers: Key-value heads of each layer; None if the file has one number for all.
      names: The entry of `architecture_names.NAMES`, where the family's config changes it.
      delta_heads, packed_delta_heads: Fields of `Sizes`; set by families that have them.
      small_tensors: Tensors of the checkpoint that the file has as keys; see `GGUFConfig`.

    Raises:
      ConfigError: A size is missing or invalid. All methods raise it too.
    """

    def __init__(self, keys: Keys, read_tensor: ReadTensor) -> None:
        self.keys = keys
        self.read_tensor = read_tensor
        self.hidden_size = keys.integer("embedding_length")
        has_heads = keys.architecture not in _WITHOUT_HEADS
        self.num_heads = keys.integer("attention.head_count") if has_heads else keys.integer("attention.head_count", 0)
        self.num_prediction_layers = keys.integer("nextn_predict_layers", 0)
        self.num_layers = keys.integer("block_count") - self.num_prediction_layers
        self.kv_heads_of_layers = keys.for_layers("attention.head_count_kv", self.num_layers)
        self.num_kv_heads = self._num_kv_heads()
        if not self.hidden_size or (has_heads and not (self.num_heads and self.num_kv_heads)):
            raise ConfigError(f"{keys.source} has an embedding length or a number of heads of 0: use another file")
        self.head_dim = keys.integer("attention.key_length", self.hidden_size // max(self.num_heads, 1))
        self.names = keys.architecture
        self.delta_heads: DeltaHeads | None = None
        self.packed_delta_heads: PackedDeltaHeads | None = None
        self.small_tensors: dict[str, np.ndarray] = {}
        keys.expect("attention.causal", keys.architecture not in ENCODERS)

    def _num_kv_heads(self) -> int:
        """Returns the largest number of key-value heads of a layer; layers without attention have 0."""
        if listed := [count for count in self.kv_heads_of_layers or () if count]:
            return max(listed)
        return self.keys.integer("attention.head_count_kv", self.num_heads)

    def base(self, architecture: str, model_type: str, *, kv_heads_differ: bool = False) -> Values:
        """Returns the keys of every config.json, except those of feed-forward blocks, norms and ropes.

        With `kv_heads_differ`, layers with attention may have different numbers of key-value heads.
        """
        keys = self.keys
        if not kv_heads_differ and len({count for count in self.kv_heads_of_layers or () if count}) > 1:
            keys.get("attention.head_count_kv")  # says what differs
        keys.expect("attention.value_length", self.head_dim)
        return {
            "architectures": [architecture],
            "model_type": model_type,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": keys.integer("context_length"),
            "vocab_size": self.vocab_size,
            "tie_word_embeddings": "output.weight" not in keys.tensors,
            "dtype": self.dtype,
        }

    def usual(self, architecture: str, model_type: str, *, theta: float = 10_000.0) -> Values:
        """Returns the config of a decoder with RMS norms and ropes; `theta` is for files without the base."""
        return {**self.base(architecture, model_type), **self.rms(), **self.dense(), **self.rope(theta=theta)}

    @property
    def vocab_size(self) -> int:
        """Returns the rows of the embeddings; the key of that name sometimes counts more rows."""
        embeddings = self.keys.tensors.get("token_embd.weight")
        if embeddings is None or len(embeddings.shape) != 2:
            raise ConfigError(f"{self.keys.source} has no token embeddings: use another file of the model")
        return embeddings.shape[0]

    @property
    def dtype(self) -> str:
        """Returns the type of the matrices if they all are float16 or all float32; else bfloat16."""
        found = {tensor.block_type.name for tensor in self.keys.tensors.values() if len(tensor.shape) > 1}
        return {frozenset({"F16"}): "float16", frozenset({"F32"}): "float32"}.get(frozenset(found), "bfloat16")

    def rms(self) -> Values:
        return {"rms_norm_eps": float(self.keys.require("attention.layer_norm_rms_epsilon"))}

    def dense(self) -> Values:
        return {"intermediate_size": self.keys.integer("feed_forward_length")}

    def attention_bias(self) -> Values:
        return {"attention_bias": self.keys.has_tensor("attn_q.bias")}

    def granite_multipliers(self) -> Values:
        keys = self.keys
        return {
            "embedding_multiplier": keys.get("embedding_scale", 1.0) or 1.0,
            "residual_multiplier": keys.get("residual_scale", 1.0) or 1.0,
            "attention_multiplier": keys.get("attention.scale", 0.0) or self.head_dim**-0.5,
            "logits_scaling": keys.require("logit_scale"),
        }

    def has_tensors(self, name: str) -> bool:
        return any(stored.partition(".")[2].partition(".")[2] == name for stored in self.keys.tensors)

    def rope(self, *, theta: float = 10_000.0, yarn: Values | None = None) -> Values:
        """Returns the rope's settings; the arguments are the family's values for missing keys."""
        freqs = self.read_tensor(ROPE_FREQS)
        return rope_values(self.keys, head_dim=self.head_dim, default_theta=theta, freqs=freqs, yarn=yarn)

    def with_mrope(self, values: Values, *, interleaved: bool) -> Values:
        """Adds a rope that counts the rows and columns of images (M-RoPE), if the file has one."""
        sections = self.keys.for_layers("rope.dimension_sections", 3)
        if sections is None:
            return values
        mrope = {"mrope_section": sections} | ({"mrope_interleaved": True} if interleaved else {})
        return {**values, "rope_scaling": {**(values.get("rope_scaling") or {"rope_type": "default"}), **mrope}}

    def layer_types(self, *, full_every: int) -> list[str]:
        """Returns the layers' types: by the file, or a window for all but every `full_every`-th layer."""
        keys = self.keys
        listed = keys.for_layers("attention.sliding_window_pattern", self.num_layers)
        if listed is not None:
            return [SLIDING if is_local else FULL for is_local in listed]
        period = keys.get_or_assume("attention.sliding_window_pattern", "sliding_window_pattern", full_every)
        if period == 0:
            return [FULL] * self.num_layers
        return [SLIDING if (i + 1) % period else FULL for i in range(self.num_layers)]

    def window(self, default: int | None = None) -> int | None:
        window = self.keys.get("attention.sliding_window")
        if window is None and default is not None:
            return self.keys.assume("sliding_window", default)
        return window or None
