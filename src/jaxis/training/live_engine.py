from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jaxis.engine.arguments import EngineArgs
from jaxis.engine.engine import LLMEngine
from jaxis.engine.setup import BuiltEngine, build_engine
from jaxis.host.progress import ProgressDisplay
from jaxis.layers.module import JaxModule
from jaxis.outputs import CompletionOutput
from jaxis.sampling_params import SamplingParams
from jaxis.training.base_model import BaseModel

_MAX_NUM_SEQS = 16


def answer_seed(words: Sequence[int]) -> int:
    """Returns the seed of an answer, from words such as the seed of the run, the step and the answer's number."""
    # NumPy guarantees the stream of this generator, whatever its version.
    return int(np.random.RandomState(words).randint(2**31 - 1))


class LiveEngine:
    """Answers prompts with the weights in training, without a copy. Its programs are compiled once.

    `max_model_len` limits a prompt and its answer together, in tokens.
    """

    def __init__(self, base: BaseModel, max_model_len: int, progress: ProgressDisplay) -> None:
        self._base, self._max_model_len, self._progress = base, max_model_len, progress
        self._built: BuiltEngine | None = None
        self._model: JaxModule | None = None

    def answers(
        self, model: JaxModule, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[CompletionOutput]:
        """Answers each prompt, given as token ids, by its sampling parameters.

        The model has the same structure in each call. If it is the model of the last call, its prefix cache is reused.
        Raises EngineError if there is no memory for a cache, or logits are not finite.
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
        if self._built is not None:
            self._built.engine.close()

    def _engine_of(self, model: JaxModule) -> LLMEngine:
        base = self._base
        if self._built is None:
            args = EngineArgs(
                model=str(base.path),
                dtype="bfloat16" if base.compute_dtype == jnp.bfloat16 else "float32",
                max_num_seqs=_MAX_NUM_SEQS,
                max_model_len=self._max_model_len,
            )
            self._built = build_engine(args, self._progress, weights=model, tokenizer=base.tokenizer)
        elif model is not self._model:
            self._built.weights.update(model)
        self._model = model
        return self._built.engine
