"""Logits of llama.cpp, for comparing what it predicts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import llama_cpp
import numpy as np

_ROWS = 64
_QUIET = llama_cpp.llama_log_callback(lambda *_: None)


class LlamaCppLogits:
    """A GGUF file in llama.cpp, with a float32 cache. A context manager.

    Args:
      model: The file.
      max_tokens: Most tokens of a sequence.
      threads: How many it computes with.
      repack: Whether it may lay weights out anew for this processor, as it does by default.

    Raises:
      OSError: It cannot load the file.
    """

    def __init__(self, model: Path, max_tokens: int, *, threads: int, repack: bool = True) -> None:
        llama_cpp.llama_log_set(_QUIET, None)
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        model_params.use_extra_bufts = repack
        self._model = llama_cpp.llama_model_load_from_file(str(model).encode(), model_params)
        if not self._model:
            raise OSError(f"llama.cpp cannot load {model}")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = -(-max_tokens // 256) * 256
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)

    def __call__(self, token_ids: list[int]) -> Iterator[np.ndarray]:
        """Logits float32 [n, V] of consecutive tokens of a sequence, a few rows at a time.

        Raises:
          RuntimeError: llama.cpp cannot compute them.
        """
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        batch = self._batch
        batch.n_tokens = len(token_ids)
        for i, token in enumerate(token_ids):
            batch.token[i], batch.pos[i] = token, i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = True
        status = llama_cpp.llama_decode(self._context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode failed with status {status}")
        logits = llama_cpp.llama_get_logits(self._context)
        rows = np.ctypeslib.as_array(logits, shape=(len(token_ids), self._vocab_size))
        for start in range(0, len(rows), _ROWS):
            yield rows[start : start + _ROWS]

    def __enter__(self) -> LlamaCppLogits:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)
