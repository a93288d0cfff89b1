"""Structured output: grammars compiled for a model's tokens, and followed through a completion.

llguidance (https://github.com/guidance-ai/llguidance) does the work. This module gives it the model's vocabulary,
limits what one request may ask for, and makes the masks that the sampler applies.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, cast

import numpy as np

from jaxis.engine.grammar.token_mask import pack_token_ids
from jaxis.errors import OverloadedError, RequestError
from jaxis.host.threads import SizedExecutor
from jaxis.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    import llguidance

    from jaxis.tokenizer import Tokenizer

COMPILE_SECONDS = 5.0
MAX_CACHED_GRAMMARS = 64
MAX_CACHED_CHARACTERS = 512 * 1024  # of all cached grammars together: a large one takes 20 MB
SMALL_CHARACTERS = 4 * 1024
MAX_WAITING = 64  # grammars that are not small
# For each thread, the longest grammar that it compiles, in characters: the time grows with the square of the length. A
# compilation that takes too long cannot be interrupted: it continues in its thread.
_THREAD_CHARACTERS = (SMALL_CHARACTERS, 32 * 1024, math.inf)
_MAX_ERROR_CHARACTERS = 300
# Strips llguidance's source positions, which refer to Lark text that the user did not write.
_PREFIX = re.compile(r"error: |at \d+\(\d+\): (?:failed to compile JSON schema: |(?=invalid regex))")
# Half of llguidance's own limits or less: they bound a request's time in a step, and the memory of its lexer.
_LIMITS = {
    "step_lexer_fuel": 100_000,
    "step_max_items": 25_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}


class _Compilation:
    """A grammar that is being compiled.

    Attributes:
      future: The compiled grammar.
    """

    def __init__(self) -> None:
        self.future: Future[CompiledGrammar] = Future()
        self._begun = threading.Event()
        self._clock: int | None = None
        self._begin = 0.0

    def begin(self) -> None:
        """Starts the clock: called by the thread that compiles."""
        # Processor time where there is such a clock: a busy machine makes no grammar invalid.
        if hasattr(time, "pthread_getcpuclockid"):
            self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._begin = self._now()
        self._begun.set()

    def result(self, limit_seconds: float | None) -> CompiledGrammar:
        """Waits for the grammar.

        Args:
          limit_seconds: Time limit from the beginning; None is no limit.

        Raises:
          TimeoutError: The compilation takes longer.
          Exception: The compilation raised this error.
        """
        self._begun.wait()
        if limit_seconds is None:
            return self.future.result()
        while not self.future.done():
            if (seconds_left := self._begin + limit_seconds - self._now()) <= 0:
                raise TimeoutError
            wait([self.future], seconds_left)
        return self.future.result()

    def _now(self) -> float:
        return time.monotonic() if self._clock is None else time.clock_gettime(self._clock)

    @property
    def is_broken(self) -> bool:
        """Returns whether the grammar must be compiled again."""
        return self.future.done() and self.future.exception() is None and self.future.result().is_broken


class GrammarCompiler:
    """Compiles grammars for one model's tokens, each once. May be used from several threads.

    Args:
      tokenizer: The checkpoint's tokenizer; None compiles nothing.
      vocab_size: V, of the model; ids beyond the tokenizer's own are never allowed.
      eos_token_ids: Tokens that end a completion.

    Attributes:
      tokenizer: The checkpoint's tokenizer.
      vocab_size: V.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._lock = threading.Lock()
        self._threads = SizedExecutor(_THREAD_CHARACTERS, "jaxis-grammar")
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._vocabulary_lock = threading.Lock()
        self._compilations: OrderedDict[tuple[str, str], _Compilation] = OrderedDict()

    def prepare(self) -> None:
        """Starts to prepare the vocabulary in another thread, which takes seconds if it is large.

        Without this call, the first compilation prepares it.
        """
        if (tokenizer := self.tokenizer) is None:
            return

        def run() -> None:
            with contextlib.suppress(Exception):  # the first request that needs it will tell
                self._llguidance_tokenizer(tokenizer)

        threading.Thread(target=run, name="jaxis-grammar", daemon=True).start()

    def compile(self, spec: StructuredOutputs, *, limited: bool = True) -> CompiledGrammar:
        """Compiles a grammar. This may take seconds: do not call it on a thread that others wait for.

        Small grammars are compiled soon, however many large ones wait.

        Args:
          spec: The grammar.
          limited: True gives up after COMPILE_SECONDS, which count from when its compilation begins, and does not queue
            more than MAX_WAITING.

        Raises:
          RequestError: The grammar is invalid, uses something unsupported, or takes too long to compile.
          OverloadedError: Too many grammars that are not small are waiting.
        """
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise RequestError(
                "needs a tokenizer, and the checkpoint has none: leave it out", param="structured_outputs"
            )
        compilation = self._start(spec, tokenizer, limited=limited)
        try:
            return compilation.result(COMPILE_SECONDS if limited else None)
        except TimeoutError:
            raise RequestError(
                f"takes more than {COMPILE_SECONDS:g} s to compile: simplify it",
                param=f"structured_outputs.{spec.kind}",
            ) from None
        except RequestError as error:
            raise copy.copy(error) from None  # others wait for the same compilation, and get one of their own

    def _start(self, spec: StructuredOutputs, tokenizer: Tokenizer, *, limited: bool) -> _Compilation:
        """Returns the compilation of this grammar, queued now unless there is one."""
        key = spec.kind, spec.source
        with self._lock:
            compilation = self._compilations.get(key)
            if compilation is None or compilation.is_broken:
                if limited and len(spec.source) > SMALL_CHARACTERS and self._threads.num_waiting >= MAX_WAITING:
                    raise OverloadedError(f"{MAX_WAITING} grammars are waiting to be compiled: try again later")
                compilation = self._compilations[key] = _Compilation()
                task = functools.partial(self._run, spec, tokenizer, compilation)
                self._threads.submit(len(spec.source), task)
            self._compilations.move_to_end(key)
            while len(self._compilations) > MAX_CACHED_GRAMMARS or self._num_characters() > MAX_CACHED_CHARACTERS:
                self._compilations.popitem(last=False)
        return compilation

    def _num_characters(self) -> int:
        return sum(len(source) for _, source in self._compilations)

    def _run(self, spec: StructuredOutputs, tokenizer: Tokenizer, compilation: _Compilation) -> None:
        try:
            self._llguidance_tokenizer(tokenizer)  # outside of the limit
        except Exception as error:
            compilation.future.set_exception(error)
            compilation.begin()
            return
        compilation.begin()
        try:
            compilation.future.set_result(self._compile(spec, tokenizer))
        except BaseException as error:
            compilation.future.set_exception(error)

    def _compile(self, spec: StructuredOutputs, tokenizer: Tokenizer) -> CompiledGrammar:
        import llguidance

        from jaxis.engine.grammar.grammar_source import grammar_source

        source, ignored = grammar_source(spec)
        limits = llguidance.LLParserLimits(**_LIMITS)
        matcher = llguidance.LLMatcher(self._llguidance_tokenizer(tokenizer), source, log_level=0, limits=limits)
        special = tokenizer.special_token_ids
        grammar = CompiledGrammar(matcher, self.vocab_size, self._eos_token_ids, special, ignored)
        # Some errors show only with the first mask, and some only after it, since the lexer is shared.
        for first in (grammar.new_matcher(), grammar.new_matcher()):
            if not first.token_mask().any():
                reason = first.error or "the model has no token for its first character"
                raise RequestError(f"cannot be honoured: {reason}", param=f"structured_outputs.{spec.kind}")
        return grammar

    def _llguidance_tokenizer(self, tokenizer: Tokenizer) -> llguidance.LLTokenizer:
        import llguidance

        with self._vocabulary_lock:
            if self._vocabulary is None:
                # Provides the attributes of llguidance's wrapper, whose constructor accepts only certain tokenizers.
                vocabulary = cast(llguidance.TokenizerWrapper, _Vocabulary(tokenizer, self.vocab_size))
                self._vocabulary = llguidance.LLTokenizer(vocabulary)
            return self._vocabulary


class CompiledGrammar:
    """A grammar that any number of completions can follow.

    Attributes:
      is_broken: A completion exceeded a limit in the shared state: the grammar must be compiled again.
      ignored: Names of schemas' keywords that it does not ensure, such as "uniqueItems".
    """

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        vocab_size: int,
        eos_token_ids: Collection[int],
        special_token_ids: Collection[int],
        ignored: frozenset[str] = frozenset(),
    ) -> None:
        self.is_broken = False
        self.ignored = ignored
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._special_token_ids = frozenset(special_token_ids)

    def new_matcher(self, stop_token_ids: Collection[int] = ()) -> GrammarMatcher:
        """Returns a matcher that follows one completion from its start.

        Args:
          stop_token_ids: The request's stop tokens. Special ones end it as end-of-sequence does, where the grammar may
            end. Others are allowed where they are part of the text.
        """
        ends = self._eos_token_ids | (self._special_token_ids & frozenset(stop_token_ids))
        return GrammarMatcher(self, self._matcher.deep_copy(), self._vocab_size, ends)


class GrammarMatcher:
    """Position of one completion in its grammar.

    Attributes:
      param: The request's parameter at fault if no token can come next.
      error: Reason why the grammar cannot be followed any further; None while it can.
    """

    param = "structured_outputs"
    may_favor = False

    def __init__(
        self, grammar: CompiledGrammar, matcher: llguidance.LLMatcher, vocab_size: int, end_token_ids: Collection[int]
    ) -> None:
        self.error: str | None = None
        self._grammar = grammar
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._end_token_ids = frozenset(end_token_ids)
        self._ends = pack_token_ids(self._end_token_ids, vocab_size)
        self._num_followed = 0
        self._has_ended = False
        self._mask: np.ndarray | None = None
        self._take_error()

    def fork(self) -> GrammarMatcher:
        fork = copy.copy(self)
        fork._matcher = self._matcher.deep_copy()
        return fork

    def follow(self, output_token_ids: Sequence[int]) -> None:
        """Advances by the tokens generated since the last call."""
        for token_id in output_token_ids[self._num_followed :]:
            self._num_followed += 1
            self._mask = None
            if token_id in self._end_token_ids:
                self._has_ended = True
            elif self.error is None:
                self._matcher.consume_token(token_id)
                self._take_error()

    @property
    def is_complete(self) -> bool:
        """True if the completion has ended, or only a token that ends it can follow."""
        return self._has_ended or (self.error is None and self._matcher.is_stopped())

    def token_mask(self) -> np.ndarray:
        if self._mask is None:
            self._mask = self._compute_mask()
        return self._mask

    def favored_token(self) -> int | None:
        return None

    @property
    def vocabulary_mask(self) -> np.ndarray:
        """Returns a mask of every token, as in `token_mask`."""
        return pack_token_ids(range(self._vocab_size), self._vocab_size)

    @property
    def end_mask(self) -> np.ndarray:
        """Returns a mask of the tokens that end a completion, as in `token_mask`."""
        return self._ends

    def _compute_mask(self) -> np.ndarray:
        num_words = -(-self._vocab_size // 32)
        if self.error is not None or self._has_ended:
            return np.zeros(num_words, np.int32)
        if self._matcher.is_stopped():
            return self._ends
        # The id after the model's last one stands for the end, whichever tokens the request may end with.
        words = np.zeros(self._vocab_size // 32 + 1, np.int32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._take_error()
        if self.error is not None:
            return np.zeros(num_words, np.int32)
        may_end = words[-1] >> (self._vocab_size % 32) & 1
        words[-1] &= (1 << self._vocab_size % 32) - 1
        mask = words[:num_words]
        return mask | self._ends if may_end else mask & ~self._ends

    def _take_error(self) -> None:
        if self.error is None and self._matcher.is_error():
            self.error = _one_line(self._matcher.get_error())
            self._grammar.is_broken = True


class _Vocabulary:
    """A model's tokens as llguidance reads them, plus one that stands for the end."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.eos_token_id = vocab_size
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)] + [b"<end>"]
        special = (token_id for token_id in tokenizer.special_token_ids if token_id < vocab_size)
        self.special_token_ids = [*sorted(special), vocab_size]
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        text = text.decode("utf-8", errors="replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(text, add_special_tokens=False)


def _one_line(message: str) -> str:
    """Returns the message and position of an error, without the quoted source."""
    lines = [" ".join(line.split()) for line in message.splitlines()]
    line = next((line for line in lines if line.startswith("error: ")), lines[0] if lines else "")
    line = _PREFIX.sub("", line)
    if line.startswith("NoExtension"):
        line = "no text matches it"
    elif "increase limits" in line:
        line = "it is too complex"
    return line if len(line) <= _MAX_ERROR_CHARACTERS else line[:_MAX_ERROR_CHARACTERS] + "..."
