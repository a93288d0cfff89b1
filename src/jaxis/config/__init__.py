"""What config.json says and what a user asks for, as frozen values; no JAX."""

from jaxis.config.vllm_config import (
    CacheConfig,
    LoadConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)

__all__ = ["CacheConfig", "LoadConfig", "ModelConfig", "ParallelConfig", "SchedulerConfig", "VllmConfig"]
