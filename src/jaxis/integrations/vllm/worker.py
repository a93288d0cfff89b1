"""vLLM's worker: holds the model and its caches, and runs the steps of vLLM's scheduler."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from jaxis.engine.execution.cache_memory import cache_memory
from jaxis.engine.execution.cache_specs import cache_specs
from jaxis.engine.execution.kv_cache import on_devices, unit_bytes
from jaxis.engine.execution.programs import Programs
from jaxis.engine.execution.runner import Runner
from jaxis.engine.execution.state_cache import num_state_slots
from jaxis.engine.extra_memory_setup import cache_bytes_beside, make_extra_memory
from jaxis.engine.loaded_model import LoadedModel
from jaxis.engine.opened_model import open_model
from jaxis.errors import ConfigError, EngineError
from jaxis.host.byte_size import human_bytes
from jaxis.host.progress import ProgressDisplay
from jaxis.integrations.vllm.adapters import AdapterTable
from jaxis.integrations.vllm.config_checks import engine_arguments
from jaxis.integrations.vllm.model_runner import ModelRunner, StepResult
from jaxis.tokenizer.template_choice import read_tokenizer

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

logger = init_logger("vllm.jaxis")  # vLLM shows what is below its own name

BYTES_OF_COUNTED_TOKEN = 2  # the smallest size that vLLM allows


class JaxisWorker(WorkerBase):
    """Runs a model of jaxis for vLLM; see `WorkerBase` for each method."""

    def init_device(self) -> None:
        """Reads the checkpoint's configuration and finds JAX's devices."""
        self.device = torch.device("cpu")
        self._args = engine_arguments(self.vllm_config)
        self._progress = ProgressDisplay(enabled=False)
        self._opened = open_model(self._args)
        self._meshes = self._opened.make_meshes(self._args)
        make_config = functools.partial(self._opened.make_config, meshes=self._meshes)
        self._extra_memory = make_extra_memory(self._args, self._opened, read_tokenizer(self._opened.path), make_config)
        left_out = self._extra_memory.left_out
        if left_out is not None and not left_out.is_chosen:
            raise ConfigError(f'{left_out.reason}; for text alone, give limit_mm_per_prompt={{"image": 0}}')

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        if load_dummy_weights:
            raise ConfigError("load_dummy_weights is not supported: give load_format='dummy'")
        self._loaded: LoadedModel = self._opened.load(self._args, self._meshes, self._progress)
        [model], config = self._loaded.models, self._loaded.vllm_config
        mesh = self._meshes[0]
        per_block, per_slot = unit_bytes(on_devices(cache_specs(model, config), mesh), config, mesh)
        # Without attention, blocks only count vLLM's tokens.
        self._block_bytes = sum(per_block.values()) or BYTES_OF_COUNTED_TOKEN * config.cache_config.block_size
        memory = cache_bytes_beside(self._extra_memory, self._args, self._loaded)
        self._cache_bytes = cache_memory(config, mesh) if memory is None else memory
        self._state_bytes = 0
        if per_slot:
            self._prepare_for_states(per_slot, attends=bool(per_block))
        device = self._meshes[0].devices.flat[0]
        logger.info(
            "jaxis has the model on %s: %s, activations %s, blocks of %d tokens and %d bytes",
            device.platform,
            device.device_kind,
            config.model_config.dtype.__name__,
            config.cache_config.block_size,
            self._block_bytes,
        )

    def _prepare_for_states(self, per_slot: int, *, attends: bool) -> None:
        config = self._loaded.vllm_config
        wanted = config.scheduler_config.max_num_seqs
        room = num_state_slots(config, per_slot, self._cache_bytes, attends=attends)
        if room < wanted:
            raise ConfigError(
                f"max_num_seqs={wanted} sequences have recurrent states of {human_bytes(wanted * per_slot)}, and the "
                f"caches have room for {room}: give max_num_seqs={room}, or a larger kv_cache_memory_bytes"
            )
        if self.vllm_config.speculative_config is not None:
            raise ConfigError(
                f"speculative_config: {self.model_config.model} has layers with a recurrent state, from which drafts "
                "that were wrong cannot be taken out inside vLLM: leave it out, or use jaxis serve"
            )
        self._state_bytes = room * per_slot
        if self.cache_config.enable_prefix_caching:
            # The scheduler, which is made later, would find cached blocks, but no states for the tokens after them.
            self.cache_config.enable_prefix_caching = False
            logger.info("jaxis switches vLLM's prefix cache off: the model has layers with a recurrent state")

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """Returns one layer that stands for all: its page has the bytes of a block in every layer, so vLLM counts
        right.
        """
        block_size = self._loaded.vllm_config.cache_config.block_size
        spec = FullAttentionSpec(
            block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.uint8, page_size_padded=self._block_bytes
        )
        return {"jaxis": spec}

    def get_supported_kv_cache_layouts(self) -> list[str]:
        """Returns some layout: the caches are jaxis' own."""
        return [KVCacheLayout.LBHNC.name]

    def determine_available_memory(self) -> int:
        """Returns the bytes for the caches: those given or free, at most as many as can be used."""
        config = self._loaded.vllm_config
        tokens = config.scheduler_config.max_num_seqs * config.model_config.max_model_len
        useful = 1 + -(-tokens // config.cache_config.block_size)  # vLLM never uses the first block
        return min(self._cache_bytes - self._state_bytes, useful * self._block_bytes)

    def update_max_model_len(self, max_model_len: int) -> None:
        """Applies vLLM's shorter context, which fits into the caches."""
        self.model_config.max_model_len = max_model_len

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Creates the caches, with as many blocks as vLLM's scheduler counts."""
        executor = self._loaded.executor(self._cache_bytes, num_blocks=kv_cache_config.num_blocks)
        features = self._extra_memory.fill(executor, logger.info)
        programs = Programs(executor, self._progress.compiling)
        runner = Runner(self._loaded.vllm_config, programs, features=features)
        self._runner = ModelRunner(runner, self.vllm_config)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Starts compiling the programs of a first decode. Other programs compile before the steps that need them."""
        started = time.monotonic()
        self._runner.runner.precompile(1, greedy=True)
        return CompilationTimes(language_model=time.monotonic() - started, encoder=0.0)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Dispatches a step. Returns None if `sample_tokens` has its result."""
        return self._runner.execute(scheduler_output)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> StepResult:
        """Samples the dispatched step. Its result waits for the tokens."""
        return self._runner.sample(grammar_output)

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Reads an adapter, or reads it again."""
        _ = self._adapters.load(lora_request, again=lora_request.load_inplace)
        return True

    def remove_lora(self, lora_id: int) -> bool:
        """Forgets an adapter. Requests that use it keep it."""
        return self._adapters.remove(lora_id)

    def pin_lora(self, lora_id: int) -> bool:
        """Keeps an adapter in memory."""
        return self._adapters.pin(lora_id)

    def list_loras(self) -> set[int]:
        """Returns the ids of the adapters in memory."""
        return self._adapters.ids

    @property
    def _adapters(self) -> AdapterTable:
        if (adapters := self._runner.adapters) is None:
            raise ConfigError("adapters need enable_lora=True (--enable-lora)")
        return adapters

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Returns drafts of the tokens after the last sampled step."""
        return self._runner.take_drafts()

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def reset_encoder_cache(self) -> None:
        """Drops the encoded images, which vLLM's scheduler has dropped."""
        if (cache := self._runner.encoder_cache) is not None:
            cache.clear()

    def reset_mm_cache(self) -> None:
        """Does nothing: this worker has no cache of vLLM's inputs."""

    def synchronize_device(self) -> None:
        """Waits for the step in flight. vLLM promises an idle device to callers who pause it."""
        self._runner.synchronize()

    def get_model(self) -> Any:
        """Raises EngineError: there is no torch module."""
        raise EngineError("the model is jaxis', not a torch module")

    def get_model_inspection(self) -> str:
        """Returns the text of the model in `repr` of vllm.LLM."""
        return f"{type(self._loaded.models[0]).__name__} of jaxis"

    def shutdown(self) -> None:
        if (runner := getattr(self, "_runner", None)) is not None:
            runner.runner.close()
            del self._runner
