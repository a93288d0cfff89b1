"""Difference between a quantized model's predictions and its source's, on text.

Both models run in the engine with the arithmetic of serving, including quantized activations, one after the other. The
source's log-probabilities are kept in a temporary file: 4 bytes for each token of the text times each token of the
vocabulary.
"""

from __future__ import annotations

import functools
import math
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxis.calibration.text import WINDOW_TOKENS, read_windows
from jaxis.config.checkpoint_values import trained_context_length
from jaxis.engine.logits import iterate_logits
from jaxis.errors import EngineError, RequestError
from jaxis.host.closing import Closing
from jaxis.llm import LLM
from jaxis.loading.hub import resolve_model
from jaxis.loading.open_checkpoint import read_hf_config
from jaxis.tokenizer import Tokenizer

OnProgress = Callable[[int, int], None]
"""Receives (tokens done, tokens in all)."""
ComputeLogits = Callable[[list[int]], Iterable[np.ndarray]]
"""Function from a window's T tokens to their logits, in parts float32 [n, V] of consecutive tokens, T in all."""


@dataclass(frozen=True)
class Evaluation:
    """Comparison of a quantized model with its source.

    Attributes:
      num_tokens: Number of compared predictions: every token of a window except the first is predicted.
      source_perplexity, perplexity: exp of the mean negative log-probability of the text's tokens.
      kl_mean, kl_p99: Mean and 99th percentile, over predictions, of KL(source || quantized) in nats.
      top1: Share of predictions with the same most likely token as the source's.
    """

    num_tokens: int
    source_bytes: int
    quantized_bytes: int
    source_perplexity: float
    perplexity: float
    kl_mean: float
    kl_p99: float
    top1: float


@dataclass(frozen=True)
class TokenDivergences:
    """Terms of an Evaluation, float64, from each of N predictions: KL(source || quantized) in nats, equality of the
    most likely token, and log-probabilities of the text's next token.
    """

    kl: np.ndarray
    same_top1: np.ndarray
    source_logprobs: np.ndarray
    logprobs: np.ndarray


class SourcePredictions(Closing):
    """A source model's predictions on text, for comparisons with any number of quantized models.

    Use it as a context manager, or call `close`, which deletes the temporary file of the predictions. `on_progress`
    gets (tokens done, tokens in all).

    Raises:
      RequestError: A text file cannot be used, as in `read_documents`.
      CheckpointError, ConfigError: The source cannot be loaded.
      EngineError: The disk has no space for the predictions.
    """

    def __init__(
        self,
        source: str | Path,
        texts: Sequence[Path],
        *,
        revision: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        path = resolve_model(str(source), revision=revision)
        tokenizer, length = Tokenizer.from_path(path), window_tokens(path)
        self.windows = [window for text in texts for window in read_windows(text, tokenizer, length)]
        self._revision = revision
        self._file: BinaryIO = tempfile.TemporaryFile(prefix="jaxis-predictions-")  # noqa: SIM115 - `close` does
        try:
            with self._open(path) as llm:
                self.weight_bytes = llm.weight_bytes
                self._num_logits = 0
                for _, log_probs in self._predictions(functools.partial(iterate_logits, llm.engine), on_progress):
                    self._write(log_probs)
        except BaseException:
            self.close()
            raise

    @property
    def num_tokens(self) -> int:
        return sum(len(window) - 1 for window in self.windows)

    def evaluate(
        self, model: str | Path, *, quantization: Any = None, on_progress: OnProgress | None = None
    ) -> Evaluation:
        """Compares a quantized model, or the source itself with `quantization`, with the source.

        Raises:
          RequestError: The vocabulary of the model differs from the source's.
          CheckpointError, ConfigError, EngineError: The model cannot be loaded.
        """
        with self._open(model, quantization=quantization) as llm:
            return self.compare(
                functools.partial(iterate_logits, llm.engine), llm.weight_bytes, str(model), on_progress
            )

    def compare(
        self, compute_logits: ComputeLogits, weight_bytes: int, name: str, on_progress: OnProgress | None = None
    ) -> Evaluation:
        """Compares any function that computes logits with the source.

        Raises RequestError, with the model's `name`, if its vocabulary differs from the source's.
        """
        parts = []
        self._file.seek(0)
        for targets, log_probs in self._predictions(compute_logits, on_progress):
            if log_probs.shape[-1] != self._num_logits:
                raise RequestError(
                    f"{name} predicts {log_probs.shape[-1]} tokens, and the source {self._num_logits}: "
                    "they can be compared only if one was quantized from the other"
                )
            parts.append(diverge(self._read(len(targets)), log_probs, targets))
        kl, same, source_logprobs, logprobs = (
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("kl", "same_top1", "source_logprobs", "logprobs")
        )
        return Evaluation(
            num_tokens=len(kl),
            source_bytes=self.weight_bytes,
            quantized_bytes=weight_bytes,
            source_perplexity=math.exp(-source_logprobs.mean()),
            perplexity=math.exp(-logprobs.mean()),
            kl_mean=float(kl.mean()),
            kl_p99=float(np.quantile(kl, 0.99)),
            top1=float(same.mean()),
        )

    def close(self) -> None:
        self._file.close()

    def _open(self, model: str | Path, **arguments: Any) -> AbstractContextManager[LLM]:
        longest = max(map(len, self.windows))
        return LLM(
            model, revision=self._revision, max_model_len=longest, max_num_seqs=1, show_progress=False, **arguments
        )

    def _predictions(
        self, compute_logits: ComputeLogits, on_progress: OnProgress | None
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields next tokens, i32 [n], and log-probabilities, float32 [n, V], a few rows at a time."""
        done = 0
        for window in self.windows:
            row = 0
            for logits in compute_logits(window):
                targets = np.asarray(window[row + 1 : row + 1 + len(logits)], np.int32)
                row += len(logits)
                if len(targets):
                    yield targets, log_softmax(logits[: len(targets)])
                done += len(targets)
                if on_progress is not None:
                    on_progress(done, self.num_tokens)

    def _write(self, log_probs: np.ndarray) -> None:
        if not self._num_logits:
            self._num_logits = log_probs.shape[-1]
            needed, folder = 4 * self._num_logits * self.num_tokens, tempfile.gettempdir()
            if (free := shutil.disk_usage(folder).free) < needed:
                raise EngineError(
                    f"the predictions of {self.num_tokens} tokens take {needed / 1e9:.1f} GB, and {folder} has "
                    f"{free / 1e9:.1f} GB free: give a shorter text, or set TMPDIR"
                )
        log_probs.tofile(self._file)

    def _read(self, num_rows: int) -> np.ndarray:
        count = num_rows * self._num_logits
        return np.fromfile(self._file, np.float32, count).reshape(num_rows, self._num_logits)


def window_tokens(path: Path) -> int:
    return min(WINDOW_TOKENS, trained_context_length(read_hf_config(path)) or WINDOW_TOKENS)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Computes log-probabilities float32 [n, V] of logits float32 [n, V]; sums are in float64."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True, dtype=np.float64)).astype(np.float32)
    return shifted


def diverge(source: np.ndarray, quantized: np.ndarray, targets: Sequence[int] | np.ndarray) -> TokenDivergences:
    """Compares log-probabilities float32 [n, V] of a source and a quantized model for the next tokens `targets` [n]."""
    # A probability of zero contributes nothing.
    difference = np.where(np.isneginf(source), 0, source - quantized)
    kl = (np.exp(source) * difference).sum(axis=-1, dtype=np.float64)
    rows = np.arange(len(source))
    return TokenDivergences(
        kl,
        source.argmax(axis=-1) == quantized.argmax(axis=-1),
        source[rows, targets].astype(np.float64),
        quantized[rows, targets].astype(np.float64),
    )
