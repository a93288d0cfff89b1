from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxis.errors import ConfigError
from jaxis.loading.gguf.config_keys import Keys
from jaxis.loading.gguf.delta_heads import DeltaHeads, PackedDeltaHeads
from jaxis.loading.gguf.names import ROPE_FACTORS_LONG, ROPE_FACTORS_SHORT
from jaxis.loading.gguf.stored_part import Sizes

FULL, SLIDING = "full_attention", "sliding_attention"
Values = dict[str, Any]
ReadTensor = Callable[[str], np.ndarray | None]


class ConfigReader:
    """Reader of a file's config: sizes that most facts need, and what has been read so far.

    Attributes:
      kv_heads_of_layers: Key-value heads of each layer; None if the file has one number for all.
      values: Content of config.json so far.
      delta_heads, packed_delta_heads: Fields of `Sizes`; set by families that have them.
      table_layer: Field of `Sizes`; set by families with such a table.
      small_tensors: Tensors of the checkpoint that the file has as keys; see `GGUFConfig`.

    Raises:
      ConfigError: A size is missing or invalid. All methods raise it too.
    """

    def __init__(self, keys: Keys, read_tensor: ReadTensor, *, has_heads: bool, is_causal: bool) -> None:
        self.keys = keys
        self.read_tensor = read_tensor
        self.values: Values = {}
        self.hidden_size = keys.integer("embedding_length")
        self.num_heads = keys.integer("attention.head_count", *(() if has_heads else (0,)))
        self.num_prediction_layers = keys.integer("nextn_predict_layers", 0)
        self.num_layers = keys.integer("block_count") - self.num_prediction_layers
        self.kv_heads_of_layers = keys.for_layers("attention.head_count_kv", self.num_layers)
        self.num_kv_heads = self._num_kv_heads()
        if not self.hidden_size or self.num_layers < 1 or (has_heads and not (self.num_heads and self.num_kv_heads)):
            raise ConfigError(
                f"{keys.source} has an embedding length or a number of layers or heads of 0: use another file"
            )
        if has_heads and self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{keys.source} has {self.num_heads} heads, which {self.num_kv_heads} key-value heads do not divide: "
                "download it again"
            )
        self.head_dim = keys.integer("attention.key_length", self.hidden_size // max(self.num_heads, 1))
        self.delta_heads: DeltaHeads | None = None
        self.packed_delta_heads: PackedDeltaHeads | None = None
        self.table_layer = 0
        self.small_tensors: dict[str, np.ndarray] = {}
        keys.expect("attention.causal", is_causal)

    def _num_kv_heads(self) -> int:
        """Returns the largest number of key-value heads of a layer; layers without attention have 0."""
        if listed := [count for count in self.kv_heads_of_layers or () if count]:
            return max(listed)
        return self.keys.integer("attention.head_count_kv", self.num_heads)

    @property
    def sizes(self) -> Sizes:
        return Sizes(
            self.num_layers,
            self.values.get("num_attention_heads", 0),
            self.values.get("num_key_value_heads", self.num_kv_heads),
            self.head_dim,
            self.keys.get("expert_count", 0),
            self.delta_heads,
            self.packed_delta_heads,
            self.table_layer,
        )

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
        matrices = (tensor for tensor in self.keys.tensors.values() if len(tensor.shape) > 1)
        found = {tensor.block_type.name for tensor in matrices} - {"I32"}  # a table of numbers
        return {frozenset({"F16"}): "float16", frozenset({"F32"}): "float32"}.get(frozenset(found), "bfloat16")

    def rows_of(self, name: str) -> int:
        """Returns the rows of a table. Raises ConfigError if the file has no such tensor."""
        tensor = self.keys.tensors.get(name)
        if tensor is None or len(tensor.shape) != 2:
            raise ConfigError(f"{self.keys.source} has no tensor {name!r}: use another file of the model")
        return tensor.shape[0]

    def long_factors(self) -> Values | None:
        """Returns the scaling of a rope whose divisors the file has in tensors; None without them."""
        long, short = self.read_tensor(ROPE_FACTORS_LONG), self.read_tensor(ROPE_FACTORS_SHORT)
        if long is None or short is None:
            return None
        return {"rope_type": "longrope", "long_factor": long.tolist(), "short_factor": short.tolist()}

    @property
    def original_context(self) -> int:
        """Context that a model with a scaled rope was trained for."""
        return self.keys.get("rope.scaling.original_context_length", self.values["max_position_embeddings"])

    def of_layers(self, key: str) -> list[Any]:
        """Returns a key's value for each layer."""
        listed = self.keys.for_layers(key, self.num_layers)
        return [self.keys.integer(key)] * self.num_layers if listed is None else listed

    def kv_heads(self) -> list[int]:
        """Returns the key-value heads of each layer, 0 in those without attention."""
        if self.kv_heads_of_layers is None:
            raise ConfigError(f"{self.keys.source} does not say which layers have attention: use another file")
        return self.kv_heads_of_layers

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
