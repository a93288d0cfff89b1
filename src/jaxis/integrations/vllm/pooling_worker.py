"""vLLM's worker for embedding models and classifiers: each text is computed whole, in one step, without a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from jaxis.engine.opened_model import open_model
from jaxis.errors import ConfigError, EngineError
from jaxis.host.progress import ProgressDisplay
from jaxis.integrations.vllm.config_checks import engine_arguments
from jaxis.integrations.vllm.contract import SECOND_START, check_step
from jaxis.pooling.embedder import open_embedder

if TYPE_CHECKING:
    from vllm.pooling_params import PoolingParams
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

logger = init_logger("vllm.jaxis")  # vLLM shows what is below its own name


class JaxisPoolingWorker(WorkerBase):
    """Computes vectors or scores for vLLM with a model of jaxis; see `WorkerBase` for each method."""

    def init_device(self) -> None:
        """Reads the checkpoint's configuration and finds JAX's devices."""
        self.device = torch.device("cpu")
        self._args = engine_arguments(self.vllm_config)
        self._opened = open_model(self._args)

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        if load_dummy_weights:
            raise ConfigError("load_dummy_weights is not supported")
        self._embedder = open_embedder(self._args, self._opened, ProgressDisplay(enabled=False))
        if self.model_config.convert_type == "classify" and self._embedder.classifier is None:
            raise ConfigError(
                f"convert='classify' needs a checkpoint with a classifier's head, and {self.model_config.model} has "
                "none: leave it out"
            )
        # Nothing of a prompt is kept.
        self.cache_config.enable_prefix_caching = False
        made = "vectors" if self._embedder.classifier is None else "scores"
        logger.info("jaxis makes %s with the model, of %d elements", made, self._embedder.dimensions.size)

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """Returns no spec, so that vLLM schedules each text in one step."""
        return {}

    def get_supported_kv_cache_layouts(self) -> list[str]:
        """Returns some layout: none is used."""
        return [KVCacheLayout.LBHNC.name]

    def determine_available_memory(self) -> int:
        """Returns 0: there is no cache."""
        return 0

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Does nothing: vLLM has no caches here."""

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Does nothing: programs compile before the steps that need them."""
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Computes the vectors or scores of a step's prompts."""
        check_step(scheduler_output, is_pooling=True)
        requests = scheduler_output.scheduled_new_reqs
        if scheduler_output.total_num_scheduled_tokens == 0:
            return EMPTY_MODEL_RUNNER_OUTPUT
        texts = [list(request.prompt_token_ids or ()) for request in requests]
        if scheduler_output.total_num_scheduled_tokens != sum(map(len, texts)):
            raise EngineError("vLLM's scheduler divides a prompt into several steps, which jaxis' worker does not do")
        second_starts = [
            _second_start(request.pooling_params, len(text)) for request, text in zip(requests, texts, strict=True)
        ]
        vectors = self._embedder.model.embed(texts, second_starts)
        ids = [request.req_id for request in requests]
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=[],
            pooler_output=[
                self._output(vector, request.pooling_params) for vector, request in zip(vectors, requests, strict=True)
            ],
        )

    def _output(self, vector: np.ndarray, params: PoolingParams | None) -> torch.Tensor:
        assert params is not None
        if (classifier := self._embedder.classifier) is not None:
            [scores] = classifier.scores(vector[None], use_activation=params.use_activation is not False)
            return torch.from_numpy(np.array(scores, np.float32))
        dimensions = params.dimensions or len(vector)
        is_normalized = self._embedder.dimensions.normalize and dimensions == len(vector)
        vector = vector[:dimensions]
        if params.use_activation and not is_normalized:
            vector = vector / np.maximum(np.linalg.norm(vector), 1e-12)
        return torch.from_numpy(np.array(vector, np.float32))

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("embed",) if self._embedder.classifier is None else ("classify",)

    def reset_encoder_cache(self) -> None:
        """Does nothing: there is no cache."""

    def synchronize_device(self) -> None:
        """Does nothing: every step is waited for."""

    def get_model(self) -> Any:
        """Raises EngineError: there is no torch module."""
        raise EngineError("the model is jaxis', not a torch module")

    def get_model_inspection(self) -> str:
        """Returns the text of the model in `repr` of vllm.LLM."""
        return f"{type(self._embedder.model.model).__name__} of jaxis"

    def shutdown(self) -> None:
        if (embedder := getattr(self, "_embedder", None)) is not None:
            embedder.close()
            del self._embedder


def _second_start(params: PoolingParams | None, num_tokens: int) -> int:
    """Returns the start of the second text of a pair; the number of tokens if vLLM does not say."""
    extra = None if params is None else params.extra_kwargs
    place = num_tokens if extra is None else extra.get(SECOND_START, num_tokens)
    return place if isinstance(place, int) else place[0]
