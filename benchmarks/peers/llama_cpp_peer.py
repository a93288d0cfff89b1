"""llama.cpp through llama-cpp-python's low-level API, on a GGUF file, with its defaults."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np

from jaxis.bench.run import BatchRun, Load, random_prompts

if TYPE_CHECKING:
    from jaxis.bench.cost import DecodeCost

WARM_UP_TOKENS = 128
_ROWS = 64
_QUIET = llama_cpp.llama_log_callback(lambda *_: None)


class LlamaCppPeer:
    """See the package. `model` is a GGUF file.

    `arguments`: "threads"; "repack", whether it may lay weights out anew for this processor, as it does by default.
    """

    def __init__(self, model: Path, arguments: dict[str, Any], _loads: Sequence[Load]) -> None:
        llama_cpp.llama_log_set(_QUIET, None)
        llama_cpp.llama_backend_init()
        self._path = model
        self._threads = arguments["threads"]
        params = llama_cpp.llama_model_default_params()
        params.use_extra_bufts = arguments.get("repack", True)
        self._model = llama_cpp.llama_model_load_from_file(str(model).encode(), params)
        if not self._model:
            raise OSError(f"llama.cpp cannot load {model}")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._load: Load | None = None
        self._context: Any = None

    @property
    def decode_cost(self) -> DecodeCost:
        from peers.gguf_cost import gguf_decode_cost

        return gguf_decode_cost(self._path)

    def warm_up(self, load: Load, rng: np.random.Generator) -> None:
        self._make_context(load)
        self._run(Load(1, min(WARM_UP_TOKENS, load.input_len), 4), rng)

    def run(self, load: Load, rng: np.random.Generator) -> BatchRun:
        if load != self._load:
            self._make_context(load)
        return self._run(load, rng)

    def _make_context(self, load: Load) -> None:
        """A context of the load's size in place of that of another load."""
        self._load = load
        # In whole 256s, as it would round up anyway; each sequence has a part of its own.
        length = -(-(load.input_len + load.output_len + 1) // 256) * 256
        default = llama_cpp.llama_context_default_params().n_batch
        num_batch = max(default, load.batch_size * load.input_len)
        self._open(n_ctx=load.batch_size * length, n_seq_max=load.batch_size, n_batch=num_batch)

    def _open(self, **settings: int) -> None:
        self.close()
        params = llama_cpp.llama_context_default_params()
        for name, value in settings.items():
            setattr(params, name, value)
        params.n_threads = params.n_threads_batch = self._threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise MemoryError(f"llama.cpp cannot make a context of {params.n_ctx} tokens")
        self._batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)

    def close(self) -> None:
        """Frees the context."""
        if self._context is not None:
            llama_cpp.llama_batch_free(self._batch)
            llama_cpp.llama_free(self._context)
            self._context = None

    def _run(self, load: Load, rng: np.random.Generator) -> BatchRun:
        prompts = random_prompts(rng, self._vocab_size, [load.input_len] * load.batch_size)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        start = time.perf_counter()
        tokens = self._decode(prompts, 0)
        first = previous = time.perf_counter()
        step_seconds = []
        for step in range(load.output_len - 1):
            tokens = self._decode([[token] for token in tokens], load.input_len + step)
            now = time.perf_counter()
            step_seconds.append(now - previous)
            previous = now
        num_tokens = len(step_seconds) * load.batch_size
        return BatchRun(
            [first - start] * load.batch_size, step_seconds, load.input_len + load.output_len / 2, num_tokens
        )

    def _decode(self, sequences: list[list[int]], position: int) -> list[int]:
        """Computes more tokens of each sequence, from `position` on; returns the likeliest next one of each."""
        return self._logits(sequences, position).argmax(axis=-1).tolist()

    def _logits(self, sequences: list[list[int]], position: int, *, of_all: bool = False) -> np.ndarray:
        """Logits float32 [n, V] after each sequence, or after each of its tokens."""
        batch = self._batch
        batch.n_tokens = sum(map(len, sequences))
        row = 0
        for number, sequence in enumerate(sequences):
            for i, token in enumerate(sequence):
                batch.token[row] = token
                batch.pos[row] = position + i
                batch.n_seq_id[row] = 1
                batch.seq_id[row][0] = number
                batch.logits[row] = of_all or i + 1 == len(sequence)
                row += 1
        status = llama_cpp.llama_decode(self._context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode failed with status {status}")
        logits = llama_cpp.llama_get_logits(self._context)
        return np.ctypeslib.as_array(logits, shape=(row if of_all else len(sequences), self._vocab_size))


class LlamaCppLogits(LlamaCppPeer):
    """What llama.cpp predicts, with a float32 cache, for sequences of `max_tokens` at most."""

    def __init__(self, model: Path, arguments: dict[str, Any], max_tokens: int) -> None:
        super().__init__(model, arguments, ())
        length = -(-max_tokens // 256) * 256
        types = dict.fromkeys(("type_k", "type_v"), llama_cpp.GGML_TYPE_F32)
        self._open(**dict.fromkeys(("n_ctx", "n_batch", "n_ubatch"), length), **types)

    def __call__(self, token_ids: list[int]) -> Iterator[np.ndarray]:
        """Logits float32 [n, V] of consecutive tokens of a sequence, a few rows at a time."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        rows = self._logits([token_ids], 0, of_all=True)
        for start in range(0, len(rows), _ROWS):
            yield rows[start : start + _ROWS]
