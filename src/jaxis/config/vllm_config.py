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
      model: Folder of the checkpoint.
      hf_config: The checkpoint's config.json.
      dtype: Data type of weights and activations.
      max_model_len: Most tokens of a request, prompt and output together.
      seed: Seed of random weights (`load_format="dummy"`) and of requests that bring none.
      logprobs_mode: What a log-probability is, to requests that do not say: one of `sampling_params.LOGPROBS_MODES`.
      enable_return_routed_experts: Whether requests that do not say return the experts of their tokens.
    """

    model: str
    hf_config: HFConfig
    dtype: Any = np.float32
    max_model_len: int = 2048
    seed: int = 0
    logprobs_mode: Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"] = "raw_logprobs"
    enable_return_routed_experts: bool = False


@dataclass(frozen=True)
class CacheConfig:
    """The paged KV cache.

    Attributes:
      block_size: Tokens a block.
      cache_dtype: Data type of keys and values; None is the model's.
      enable_prefix_caching: Share the blocks of equal prompt prefixes.
      kv_cache_memory_bytes: Memory for all blocks; None sizes it from what is free.
    """

    block_size: int = 16
    cache_dtype: Any = None
    enable_prefix_caching: bool = True
    kv_cache_memory_bytes: int | None = None


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of one step.

    Attributes:
      max_num_seqs: Most requests that run at once.
      max_num_batched_tokens: Most tokens of a step, prefill chunks and decodes together.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 1024


@dataclass(frozen=True)
class ParallelConfig:
    """How the model is spread over devices.

    Attributes:
      tensor_parallel_size: Devices that share each layer's heads and features.
      data_parallel_size: Data ranks, which have sequences of their own and share experts.
      enable_expert_parallel: Whether experts lie whole on devices, instead of each one's features being shared too.
      decode_context_parallel_size: Devices that share the tokens of a cache of latents; with one, each has all of them.
    """

    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    decode_context_parallel_size: int = 1


class TensorChanger(Protocol):
    """What changes the tensors of one checkpoint; see `TensorChanges`."""

    def changed(self, name: str, tensor: np.ndarray) -> np.ndarray:
        """What the model gets in place of a tensor.

        Raises:
          ConfigError, CheckpointError: The tensor cannot be changed as asked for.
        """
        ...

    def check_all_used(self) -> None:
        """Called once the whole checkpoint was read. Raises ConfigError if a change was for no tensor of it."""
        ...


class TensorChanges(Protocol):
    """Changes a checkpoint's tensors as they are read, before they are cast, quantized or packed."""

    def begin(self, name_here: Callable[[str], str]) -> TensorChanger:
        """Called before a checkpoint is read.

        Args:
          name_here: From a name in checkpoints to the model's own, for modules and tensors.
        """
        ...


@dataclass(frozen=True)
class LoadConfig:
    """Where the weights come from.

    Attributes:
      load_format: "auto" reads safetensors; "dummy" makes random weights.
      prediction_layer: Whether the layer that predicts the token after the next one is loaded, too, to draft tokens.
      tensor_changes: What becomes of the checkpoint's tensors before a model gets them; None: nothing.
    """

    load_format: str = "auto"
    prediction_layer: bool = False
    tensor_changes: TensorChanges | None = None


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
