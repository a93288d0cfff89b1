"""vLLM's platform for jaxis: checks the configuration and each request, and names the worker. Imports no JAX."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import psutil
import torch
from vllm.exceptions import VLLMValidationError
from vllm.platforms.interface import Platform, PlatformEnum

from jaxis.errors import RequestError
from jaxis.integrations.vllm.config_checks import check_config, check_request, image_processor
from jaxis.integrations.vllm.contract import check_contract, check_version

if TYPE_CHECKING:
    from vllm.config import VllmConfig

DEFAULT_BLOCK_SIZE = 16


class JaxisPlatform(Platform):
    """A device of JAX, of any kind. To vLLM it is a CPU, because vLLM's tensors stay on the host."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    dispatch_key = "CPU"
    dist_backend = "gloo"
    simple_compile_backend = "eager"
    _vectors_are_normalized = False  # for the process' newest model

    def __init__(self) -> None:
        super().__init__()
        check_version()

    def is_cpu(self) -> bool:
        """Returns True, so that vLLM uses its CPU defaults and looks for no accelerator of torch."""
        return True

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def import_kernels(cls) -> None:
        """Does nothing: vLLM's own kernels are not loaded."""

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:  # noqa: ARG003
        return "jaxis"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:  # noqa: ARG003
        """Returns the host's memory in bytes, from which vLLM derives its default limits of a step."""
        return psutil.virtual_memory().total

    @classmethod
    def inference_mode(cls) -> Any:
        return torch.no_grad()

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """Does nothing: there is one device."""

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        """Does nothing: jaxis has a seed for each request."""

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return False

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        """Returns False: every layer has the same blocks."""
        return False

    @classmethod
    def update_block_size_for_backend(cls, vllm_config: VllmConfig) -> None:
        """Does nothing: the block size stays."""

    @classmethod
    def pre_register_and_update(cls, parser: Any = None) -> None:  # noqa: ARG003
        """Checks the installed vLLM, before any configuration is made."""
        check_contract()

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: VllmConfig) -> None:
        """Turns off vLLM's compilation."""
        from vllm.config import CompilationMode, CUDAGraphMode

        vllm_config.compilation_config.mode = CompilationMode.NONE
        vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Names the worker; raises ConfigError for an unsupported configuration."""
        check_config(vllm_config)
        parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
        model = vllm_config.model_config
        pooler = None if model is None else model.pooler_config  # of models that make vectors
        worker = "worker.JaxisWorker" if pooler is None else "pooling_worker.JaxisPoolingWorker"
        parallel.worker_cls = f"jaxis.integrations.vllm.{worker}"
        cls._vectors_are_normalized = pooler is not None and bool(pooler.use_activation)
        parallel.distributed_executor_backend = "uni"  # JAX has the devices of a host in one process
        if model is not None and (processor := image_processor(model)) is not None:
            # vLLM's cache in front of the worker also knows images by the names in requests.
            model.multimodal_config.mm_processor_cache_gb = 0
            if processor.is_bidirectional:
                # A step has all tokens of an image, because they attend to each other.
                vllm_config.scheduler_config.enable_chunked_prefill = False
        if not cache.user_specified_block_size:
            cache.block_size = DEFAULT_BLOCK_SIZE
        if "jax" in sys.modules:
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # a fork of JAX's threads would wait forever

    @classmethod
    def validate_request(cls, processed_inputs: Any, params: Any) -> None:
        """Raises vLLM's own error (HTTP 400 for clients) for a request that the worker could not honour."""
        try:
            check_request(processed_inputs, params, vectors_are_normalized=cls._vectors_are_normalized)
        except RequestError as error:
            raise VLLMValidationError(str(error), parameter=error.param) from error
