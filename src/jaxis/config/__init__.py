"""The checkpoint's and the user's configuration, as frozen values; no JAX."""

from jaxis.config.vllm_config import (
    CacheConfig,
    LoadConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)

__all__ = ["CacheConfig", "LoadConfig", "ModelConfig", "ParallelConfig", "SchedulerConfig", "VllmConfig"]
