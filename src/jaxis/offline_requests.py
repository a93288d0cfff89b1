"""Requests of `LLM`: queued, run and streamed on the caller's thread."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Generator, Iterable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxis.engine.delta_tracker import DeltaTracker
from jaxis.engine.engine import PAUSED
from jaxis.engine.output_processor import Request
from jaxis.engine.setup import BuiltEngine
from jaxis.errors import AdaptersInUseError, EngineError, RequestError
from jaxis.host.interrupt import interrupt_deferred
from jaxis.host.progress import ProgressDisplay
from jaxis.outputs import RequestOutput, StreamOutput
from jaxis.prompts import TokenizedPrompt
from jaxis.rooms import room_module
from jaxis.sampling_params import SamplingParams
from jaxis.tokenizer import Tokenizer
from jaxis.tokenizer.template_choice import answer_end_token_ids, with_template

if TYPE_CHECKING:
    from jaxis.lora import LoRARequest


class WantedRequest(NamedTuple):
    """A request before it is queued.

    Attributes:
      prompt: Tokens of the prompt.
      params: Sampling parameters.
      adapter: LoRA adapter; None is the model itself.
      priority: Order of service; the lower value is served first.
    """

    prompt: TokenizedPrompt
    params: SamplingParams
    adapter: LoRARequest | None = None
    priority: int = 0


class OfflineRequests:
    """Requests of an engine that is stepped by the caller alone.

    Args:
      built: The engine, its tokenizer and its default sampling parameters.
      progress: Display of progress.
    """

    def __init__(self, built: BuiltEngine, progress: ProgressDisplay) -> None:
        self._engine, self._tokenizer = built.engine, built.tokenizer
        self._default_params = built.default_sampling_params
        self._progress = progress
        feature = built.engine.runner.feature("adapter")
        self._adapters = None if feature is None else feature.store
        self._num_calls = 0

    def params(self, given: object, num_prompts: int) -> Sequence[SamplingParams]:
        """Returns the sampling parameters of each prompt; None is the checkpoint's for all. Raises RequestError for
        anything but one for all, or one for each.
        """
        given = self._default_params if given is None else given
        return _one_for_each("sampling_params", given, num_prompts, SamplingParams, "SamplingParams")

    def adapters(self, given: object, num_prompts: int) -> Sequence[LoRARequest | None]:
        """Returns the adapter of each prompt, as `params` does. Raises RequestError, too, if there are no adapters."""
        if not given:
            return [None] * num_prompts
        kind = room_module("lora", "request", "lora_request").LoRARequest
        adapters = _one_for_each("lora_request", given, num_prompts, kind | None, "LoRARequest")
        if self._adapters is None and any(adapters):
            raise RequestError("lora_request needs LLM(..., enable_lora=True)")
        return adapters

    def priorities(self, given: object, num_prompts: int) -> Sequence[int]:
        """Returns the priority of each prompt, as `params` does."""
        return _one_for_each("priority", 0 if given is None else given, num_prompts, int, "integer")

    def tokenizer_of(self, adapter: LoRARequest | None) -> Tokenizer | None:
        """Returns the tokenizer, with the chat template that an adapter brings, if it brings one."""
        if adapter is None or self._tokenizer is None or self._adapters is None:
            return self._tokenizer
        source = self._adapters.chat_template_of(adapter.lora_path)
        return self._tokenizer if source is None else with_template(self._tokenizer, source)

    def run(self, wanted: Sequence[WantedRequest], *, progress: bool = False) -> list[RequestOutput]:
        """Runs requests to their ends, and returns their outputs in order. Raises the error of the first that fails."""
        show = self._progress if progress and len(wanted) > 1 else ProgressDisplay(enabled=False)
        queued: list[Request] = []
        num_finished = num_done = num_tokens = 0
        try:
            self.add(queued, wanted)
            number_of = {request.request_id: i for i, request in enumerate(queued)}
            with show.generating(len(wanted)) as update:
                while num_finished < len(wanted):
                    if len(queued) < len(wanted) and num_finished > num_done:
                        self.add(queued, wanted)
                        number_of = {request.request_id: i for i, request in enumerate(queued)}
                    num_done = num_finished
                    for request in self.step():
                        number = number_of.get(request.request_id)
                        if number is None or not request.finished:
                            continue
                        if request.error is not None:
                            raise type(request.error)(f"{prompt_name(number, len(wanted))}: {request.error}")
                        num_finished += 1
                        num_tokens += sum(len(item.sequence.output_token_ids) for item in request.completions)
                    update(num_finished, num_tokens)
        finally:
            self.abort(queued)
        return [request.output() for request in queued]

    def stream(self, wanted: WantedRequest) -> Generator[StreamOutput, None, None]:
        """Queues a request, and returns an iterator with a StreamOutput per step that adds something."""
        stream = self._stream(wanted)
        # Runs until the request is queued, so that closing the iterator aborts it even if nothing was read from it.
        next(stream)
        return stream

    def _stream(self, wanted: WantedRequest) -> Generator[Any, None, None]:
        queued: list[Request] = []
        finished = has_text = False
        try:
            self.add(queued, [wanted])
            yield None
            [request] = queued
            tracker = DeltaTracker(request)
            while not finished:
                if request.error is not None:
                    raise copy.copy(request.error)
                delta = tracker.take()
                finished = delta.finished
                for new in delta.outputs:
                    has_text = True
                    yield StreamOutput(
                        text=new.text,
                        token_ids=new.token_ids,
                        cumulative_logprob=new.cumulative_logprob,
                        logprobs=new.logprobs,
                        finish_reason=new.finish_reason,
                        stop_reason=new.stop_reason,
                        num_prompt_tokens=len(request.prompt_token_ids),
                        num_cached_tokens=delta.num_cached_tokens,
                        weight_versions=new.weight_versions,
                    )
                if not delta.outputs:
                    # A spinner would erase text already on the screen.
                    with self._progress.silent() if has_text else nullcontext():
                        self.step()
        finally:
            self.abort(queued)

    def step(self) -> list[Request]:
        """Steps the engine; returns the requests that it changed. Raises EngineError if it is paused or sleeps."""
        self.check_runs()
        with interrupt_deferred():
            return self._engine.step()

    def add(self, queued: list[Request], wanted: Sequence[WantedRequest]) -> None:
        """Queues requests one by one, those in `queued` excepted, and appends each to it; the caller aborts those on an
        error.

        Requests that follow one whose adapter has no room in memory beside those in use are left for another call.
        """
        self.check_runs()
        self._num_calls += 1
        digest_of = functools.cache(self._load_adapter)  # of each adapter once a call
        ends_of = functools.cache(self._ends_of)
        with interrupt_deferred():
            for i, (prompt, params, adapter, priority) in list(enumerate(wanted))[len(queued) :]:
                self._engine.connector.fetch(prompt.token_ids, prompt.cache_salt, params)
                try:
                    if adapter is not None and not params.ignore_eos:
                        stops = params.stop_token_ids
                        stops = [*stops, *sorted(ends_of(adapter) - set(stops))]
                        params = dataclasses.replace(params, stop_token_ids=stops)
                    request = self._engine.add_request(
                        f"{self._num_calls}-{i}",
                        prompt.token_ids,
                        params,
                        prompt=prompt.text,
                        priority=priority,
                        cache_salt=prompt.cache_salt,
                        adapter=b"" if adapter is None else digest_of(adapter),
                        inputs=prompt.inputs,
                    )
                except AdaptersInUseError:
                    if all(request.finished for request in queued):
                        raise  # others' requests use them
                    return
                except RequestError as error:
                    if len(wanted) == 1:
                        raise
                    raise RequestError(f"{prompt_name(i, len(wanted))}: {error}") from None
                queued.append(request)

    def abort(self, requests: Iterable[Request]) -> None:
        """Aborts the requests that have not ended."""
        with interrupt_deferred():
            for request in requests:
                if not request.finished:
                    self._engine.abort_request(request.request_id)

    def check_runs(self) -> None:
        """Raises EngineError if the engine is paused or sleeps."""
        if PAUSED in self._engine.holds:
            raise EngineError("this LLM is paused: call resume first")
        if self._engine.holds:
            raise EngineError("this LLM sleeps: call wake_up first")

    def _load_adapter(self, adapter: LoRARequest) -> bytes:
        """Returns the digest of an adapter's current files."""
        assert self._adapters is not None
        return self._adapters.add(self._adapters.read(adapter.lora_path))

    def _ends_of(self, adapter: LoRARequest) -> frozenset[int]:
        """Returns the tokens that end answers in the chat template that an adapter brings."""
        changed = self.tokenizer_of(adapter)
        return frozenset() if changed is self._tokenizer else answer_end_token_ids(changed)


def prompt_name(index: int, count: int) -> str:
    """Returns the name of a prompt in errors."""
    return f"prompt {index} of {count}" if count > 1 else "the prompt"


def _one_for_each(name: str, given: object, num_prompts: int, kind: Any, kind_name: str) -> Sequence[Any]:
    values = given if isinstance(given, Sequence) and not isinstance(given, str) else [given] * num_prompts
    if not all(isinstance(value, kind) and not isinstance(value, bool) for value in values):
        raise RequestError(f"{name} must be of type {kind_name}, or a list with one for each prompt")
    if len(values) != num_prompts:
        raise RequestError(f"{name} has {len(values)} values for {num_prompts} prompts")
    return values
