"""The engine on weights that are being trained: they are not copied."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp

from jaxis.engine.arguments import EngineArgs
from jaxis.engine.engine import LLMEngine
from jaxis.engine.execution.executor import DeviceExecutor
from jaxis.engine.execution.programs import Programs
from jaxis.engine.generation_defaults import eos_token_ids_of
from jaxis.engine.loaded_model import LoadedModel
from jaxis.engine.settings import make_vllm_config
from jaxis.host.progress import ProgressDisplay
from jaxis.layers.module import JaxModule
from jaxis.loading.open_checkpoint import read_generation_defaults
from jaxis.outputs import CompletionOutput
from jaxis.parallel.mesh import make_mesh
from jaxis.sampling_params import SamplingParams
from jaxis.tokenizer.template_choice import turn_end_token_id
from jaxis.training.base_model import BaseModel

_MAX_NUM_SEQS = 16


class LiveEngine:
    """Answers prompts by the weights of the moment; its programs are compiled once.

    Args:
      base: The model before it was trained.
      max_model_len: Most tokens of a prompt and its answer together.
      progress: Shows what is compiled.
    """

    def __init__(self, base: BaseModel, max_model_len: int, progress: ProgressDisplay) -> None:
        self._base, self._max_model_len, self._progress = base, max_model_len, progress
        self._engine: LLMEngine | None = None
        self._executor: DeviceExecutor | None = None

    def answers(
        self, model: JaxModule, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[CompletionOutput]:
        """An answer to each prompt.

        Args:
          model: With the weights of the moment; of the same structure each time.
          prompts: Token ids.
          params: How each is answered.

        Raises:
          EngineError: There is no memory for a cache, or logits are not finite.
        """
        engine = self._engine_of(model)
        pairs = zip(prompts, params, strict=True)
        requests = [engine.add_request(str(i), ids, each) for i, (ids, each) in enumerate(pairs)]
        while engine.has_unfinished:
            engine.step()
        for request in requests:
            if request.error is not None:
                raise request.error
        return [request.output().outputs[0] for request in requests]

    def close(self) -> None:
        """Frees the cache."""
        if self._engine is not None:
            self._engine.close()

    def _engine_of(self, model: JaxModule) -> LLMEngine:
        if self._engine is None or self._executor is None:
            self._executor, self._engine = self._build(model)
        else:
            self._executor.set_model(model)
            self._engine.reset_prefix_cache()
        return self._engine

    def _build(self, model: JaxModule) -> tuple[DeviceExecutor, LLMEngine]:
        base, mesh = self._base, make_mesh()
        args = EngineArgs(
            model=str(base.path),
            dtype="bfloat16" if base.compute_dtype == jnp.bfloat16 else "float32",
            max_num_seqs=_MAX_NUM_SEQS,
            max_model_len=self._max_model_len,
        )
        config = make_vllm_config(args, base.path, base.hf_config, mesh.devices.flat[0].platform)
        [executor] = LoadedModel(config, [mesh], [model]).executor().stages
        ends = eos_token_ids_of(read_generation_defaults(base.path), base.hf_config, base.tokenizer)
        if base.tokenizer.has_chat_template and (turn_end := turn_end_token_id(base.tokenizer)) is not None:
            ends |= {turn_end}
        programs = Programs(executor, self._progress.compiling)
        return executor, LLMEngine(config, programs, tokenizer=base.tokenizer, eos_token_ids=ends)
