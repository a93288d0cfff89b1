"""The engine's configuration: one frozen tree, under the field names that the model development guides use.

A model class sees it as `vllm_config`; a class written by those guides therefore runs here unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

if TYPE_CHECKING:
    from jaxis.config.hf_config import HFConfig
    from jaxis.config.quantization import QuantizationConfig
    from jaxis.config.speculative import SpeculativeConfig


@dataclass(frozen=True)
class ModelConfig:
    """The model to run.

    Attributes:
      max_model_len: Most tokens of a request, prompt and output together.
      seed: Seed of requests that bring none, and of random weights.
      logprobs_mode: Meaning of log-probabilities, unless a request says: see `SamplingParams` and docs/rl.md.
      enable_return_routed_experts: Return the experts of each token, unless a request says: see `SamplingParams` and
        docs/rl.md.
    """

    model: str
    hf_config: HFConfig
    dtype: Any = np.float32
    max_model_len: int = 2048

    @property
    def parameter_defaults(self) -> dict[str, Any]:
        """Values of sampling parameters for requests that leave them at None."""
        returns_experts = {"return_routed_experts": True} if self.enable_return_routed_experts else {}
        return returns_experts | ({"logprobs_mode": self.logprobs_mode} if self.logprobs_mode != "raw_logprobs" else {})

    seed: int = 0
    logprobs_mode: Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"] = "raw_logprobs"
    enable_return_routed_experts: bool = False


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The paged KV cache.

    Attributes:
      cache_dtype: Data type of keys and values; None is the model's.
      kv_cache_memory_bytes: Memory for all blocks; None sizes it from what is free.
      enable_prefix_caching: Compute equal prompt prefixes only once.
      block_size: Tokens of a KV cache block.
    """

    cache_dtype: Any = None
    kv_cache_memory_bytes: int | None = None
    enable_prefix_caching: bool = True
    block_size: int = 16


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of one step: requests that run at once, and tokens, prefill chunks and decodes together."""

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 1024


@dataclass(frozen=True)
class ParallelConfig:
    """Distribution of the model over devices.

    Attributes:
      tensor_parallel_size: Devices to spread the model over, those of all hosts together.
      data_parallel_size: For mixtures of experts: ranks of `tensor_parallel_size` devices, each with requests and a KV
        cache of its own, which share the experts. See docs/several-machines.md.
      enable_expert_parallel: Place the experts of each layer on these devices whole, as many on each, instead of a part
        of every expert. Their number must be a multiple of the number of devices. See docs/loading.md.
      decode_context_parallel_size: Number of the model's devices that share a cache of latents (DeepSeek and its kin)
        by tokens: 1, so that each has the whole cache, or all. See docs/loading.md.
    """

    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    decode_context_parallel_size: int = 1


class TensorChanger(Protocol):
    """Changes the tensors of one checkpoint; see `TensorChanges`."""

    def changed(self, name: str, tensor: np.ndarray) -> np.ndarray:
        """Returns the model's tensor in place of the checkpoint's.

        Raises ConfigError or CheckpointError if the tensor cannot be changed as asked for.
        """
        ...

    def check_all_used(self) -> None:
        """Called once the whole checkpoint was read. Raises ConfigError if a change applied to none of its tensors."""
        ...


class TensorChanges(Protocol):
    """Changes a checkpoint's tensors as they are read, before they are cast, quantized or packed."""

    def begin(self, name_here: Callable[[str], str], *, is_tied: bool) -> TensorChanger:
        """Called before a checkpoint is read, whose head is its embeddings if it `is_tied`.

        `name_here` converts a name in checkpoints to the model's own, for modules and tensors.
        """
        ...

    def splits_tied(self, name_here: Callable[[str], str]) -> bool:
        """Returns whether a tied model's embeddings and head become two different tables."""
        ...


@dataclass(frozen=True, kw_only=True)
class LoadConfig:
    """Source of the weights, and changes to them.

    Attributes:
      prediction_layer: True also loads the layer that predicts the token after the next one, to draft tokens.
      splits_tied: True if these changes make two tables of the checkpoint's embeddings and head, which are one.
      load_format: "auto" reads the checkpoint's weights; "dummy" makes random ones.
    """

    prediction_layer: bool = False
    tensor_changes: TensorChanges | None = None
    splits_tied: bool = False
    load_format: Literal["auto", "dummy"] = "auto"


@dataclass(frozen=True)
class VllmConfig:
    """Everything a model and the engine are built from; see each part."""

    model_config: ModelConfig
    cache_config: CacheConfig = field(default_factory=CacheConfig)
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    load_config: LoadConfig = field(default_factory=LoadConfig)
    quant_config: QuantizationConfig | None = None
    speculative_config: SpeculativeConfig | None = None
