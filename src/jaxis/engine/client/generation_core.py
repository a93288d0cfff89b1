"""The core of an engine that generates: its requests, and how they are prepared, stepped, paused and ended."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from jaxis.engine.client.engine_client import EngineInfo, EngineStats, RankStats, RequestState, TokenDelta
from jaxis.engine.client.engine_core import EngineCore
from jaxis.engine.client.wire import AbortRequest, AddRequest, EngineOutputs, Failure
from jaxis.engine.delta_tracker import DeltaTracker
from jaxis.engine.engine import PAUSED
from jaxis.engine.execution.calls import EngineCall
from jaxis.engine.execution.programs import CompileWait
from jaxis.engine.kv_connector import FETCH_SECONDS
from jaxis.engine.scheduling.sequence import SequenceStatus
from jaxis.engine.setup import BuiltEngine, build_engine
from jaxis.errors import EngineError, JaxisError
from jaxis.host.threads import Deadline, run_in_daemon

if TYPE_CHECKING:
    from jaxis.engine.arguments import EngineArgs
    from jaxis.engine.grammar.matcher import Grammar
    from jaxis.engine.memory_budget import MemoryBudget
    from jaxis.engine.output_processor import Request
    from jaxis.host.progress import ProgressDisplay

MAX_FAILED_STEPS = 3  # consecutive; from then on the engine is at fault, not a request
_logger = logging.getLogger(__name__)


@dataclass
class _RunningRequest:
    """A request in the engine. `first_token_time` is in seconds of `time.monotonic`; None before its first token."""

    tracker: DeltaTracker
    final_only: bool
    first_token_time: float | None = None


class GenerationCore(EngineCore):
    """Requests of a `BuiltEngine`; see `EngineCore`."""

    def __init__(self, built: BuiltEngine) -> None:
        self._engine, self.hosts = built.engine, built.hosts
        self._num_failed_steps = 0  # since the last success
        self._running: dict[str, _RunningRequest] = {}
        # Requests whose grammars are compiled or whose blocks are fetched, and their deadlines; aborting a request
        # cancels its deadline.
        self._preparing: dict[str, Deadline] = {}
        self._preparing_lock = threading.Lock()
        # Calls of `pause` that wait until running requests end, and requests that arrive meanwhile.
        self._pauses: list[Future[None]] = []
        self._held: dict[str, tuple[AddRequest, Grammar | None]] = {}
        self.calls = {
            **built.calls,
            "describe": EngineCall(lambda: [*map(_state, self._running.values())]),
            "pause": EngineCall(self._pause, settles=True),
            "reset_prefix_cache": EngineCall(self._engine.reset_prefix_cache),
            "resume": EngineCall(self._resume, settles=True),
        }

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    @property
    def is_failing(self) -> bool:
        return self._num_failed_steps >= MAX_FAILED_STEPS

    @property
    def compile_wait(self) -> CompileWait | None:
        return self._engine.runner.last_compile_wait

    def take(self, command: AddRequest | AbortRequest) -> None:
        if isinstance(command, AbortRequest):
            self._take_abort(command.request_id)
        elif command.grammar is not None or self._engine.connector.fetches(command.params):
            with self._preparing_lock:
                self._preparing[command.request_id] = Deadline(FETCH_SECONDS)
            run_in_daemon(functools.partial(self._prepare, command), "jaxis-prepare")
        else:
            self._do(functools.partial(self._add, command, None))

    def step(self) -> None:
        if self._engine.has_work:
            self._post(self._outputs_of(self._engine.step))
        if self._pauses and not self._engine.has_unfinished:
            self._engine.holds.add(PAUSED)
            self._let_go(None)

    def settle(self) -> None:
        self._post(self._outputs_of(self._engine.settle))

    def idle(self) -> None:
        try:
            self._engine.connector.idle()
        except Exception:
            _logger.warning("the last blocks of the KV cache were not saved", exc_info=True)

    def end(self) -> None:
        for request_id in self._running:
            self._engine.abort_request(request_id)
        self._running.clear()

    def close(self) -> None:
        self._engine.connector.close()

    def renewed(self, stats: EngineStats) -> EngineStats:
        # The counters of a step do not include blocks that other engines fetch between steps.
        return replace(stats, kv_tiers=self._engine.connector.stats)

    @property
    def stats(self) -> EngineStats:
        scheduler = self._engine.scheduler
        ranks = scheduler.ranks
        return EngineStats(
            num_requests_running=scheduler.num_running,
            num_requests_waiting=scheduler.num_waiting,
            kv_cache_usage=scheduler.block_manager.usage,
            prefix_cache_queries=scheduler.block_manager.prefix_cache_queries,
            prefix_cache_hits=scheduler.block_manager.prefix_cache_hits,
            num_preemptions=self._engine.num_preemptions,
            kv_tiers=self._engine.connector.stats,
            drafts=None if (drafts := self._engine.speculation.counts) is None else drafts.copy(),
            ranks=tuple(RankStats(rank.num_running, rank.block_manager.usage) for rank in ranks if len(ranks) > 1),
            places=self._engine.runner.features.places.use,
        )

    def _take_abort(self, request_id: str) -> None:
        with self._preparing_lock:
            if (deadline := self._preparing.get(request_id)) is not None:
                deadline.cancel()
                return
        self._do(functools.partial(self._abort, request_id))

    def _grammar_of(self, request: AddRequest) -> Grammar | None:
        return request.grammar and request.grammar.make(request.params, self._engine.grammar_compiler)

    def _prepare(self, request: AddRequest) -> None:
        """Compiles a request's grammar and fetches its blocks, then queues it."""
        request_id, prompt = request.request_id, request.prompt
        deadline = self._preparing[request_id]
        try:
            add = functools.partial(
                self._add,
                request,
                self._grammar_of(request),
            )
        except Exception as error:
            add = functools.partial(self._refuse, request_id, error)
        try:
            if self._engine.connector.fetches(request.params):
                deadline.put_off(FETCH_SECONDS)
                self._engine.connector.fetch(prompt.token_ids, prompt.cache_salt, request.params, deadline)
        finally:
            with self._preparing_lock:
                del self._preparing[request_id]
                self._do(add)
                if deadline.is_cancelled:
                    self._do(functools.partial(self._abort, request_id))

    def _add(self, new: AddRequest, grammar: Grammar | None) -> None:
        if self._pauses:
            self._held[new.request_id] = new, grammar
            return
        try:
            request = self._engine.add_request(
                new.request_id,
                new.prompt.token_ids,
                new.params,
                priority=new.priority,
                client=new.client,
                cache_salt=new.prompt.cache_salt,
                grammar=grammar,
                **new.prompt.asked,
            )
        except JaxisError as error:
            self._refuse(new.request_id, error)
        except Exception as error:
            _logger.exception("a request could not be queued")
            self._refuse(new.request_id, EngineError(f"the request could not be queued: {error}"))
        else:
            self._running[new.request_id] = _RunningRequest(DeltaTracker(request), new.final_only)

    def _refuse(self, request_id: str, error: Exception) -> None:
        self._post(EngineOutputs(errors=[(request_id, Failure.of(error))]))

    def _pause(self, mode: str) -> Future[None] | None:
        if mode == "wait":
            self._pauses.append(Future())
            return self._pauses[-1]
        if mode == "abort":
            for request_id in list(self._running):
                self._abort(request_id)
        self._engine.holds.add(PAUSED)
        return None

    def _resume(self) -> None:
        self._engine.holds.discard(PAUSED)
        self._let_go(EngineError("the engine was resumed before it was paused"))

    def _let_go(self, error: Exception | None) -> None:
        pauses, held = self._pauses, list(self._held.values())
        self._pauses, self._held = [], {}
        for pause in pauses:
            if not pause.cancelled():
                pause.set_exception(error) if error else pause.set_result(None)
        for request, grammar in held:
            self._add(request, grammar)

    def _abort(self, request_id: str) -> None:
        if self._held.pop(request_id, None) is not None:
            self._refuse(request_id, EngineError("the request was aborted"))
        running = self._running.pop(request_id, None)
        if running is not None:
            self._engine.abort_request(request_id)
            self._post(EngineOutputs([running.tracker.take(running.first_token_time)]))

    def _outputs_of(self, run: Callable[[], list[Request]]) -> EngineOutputs:
        try:
            requests = run()
            self._num_failed_steps = 0
        except EngineError:
            self._num_failed_steps += 1
            _logger.exception("a step failed")
            requests = [running.tracker.request for running in self._running.values()]
            requests = [request for request in requests if request.error is not None]
        new = EngineOutputs()
        now = time.monotonic()
        for request in requests:
            running = self._running.get(request.request_id)
            if running is None:
                continue
            if running.first_token_time is None:
                running.first_token_time = now
            if request.finished:
                del self._running[request.request_id]
            elif running.final_only:
                continue
            if request.error is not None:
                new.errors.append((request.request_id, Failure.of(request.error)))
            elif (tokens := running.tracker.take_tokens()) is not None:
                new.deltas.append(TokenDelta(request.request_id, *tokens))
            else:
                new.outputs.append(running.tracker.take(running.first_token_time))
        return new


def _state(running: _RunningRequest) -> RequestState:
    request = running.tracker.request
    sequences = [completion.sequence for completion in request.completions]
    found = {sequence.status for sequence in sequences}
    status: Literal["waiting", "running", "preempted"] = "waiting"
    if SequenceStatus.RUNNING in found:
        status = "running"
    elif SequenceStatus.PREEMPTED in found:
        status = "preempted"
    return RequestState(
        request_id=request.request_id,
        status=status,
        num_prompt_tokens=len(request.prompt_token_ids),
        num_cached_tokens=request.num_cached_tokens,
        num_computed_tokens=sum(sequence.num_computed_tokens for sequence in sequences),
        num_generated_tokens=sum(len(sequence.output_token_ids) for sequence in sequences),
        first_scheduled_time=sequences[0].first_scheduled_time,
    )


def build(
    args: EngineArgs,
    progress: ProgressDisplay,
    *,
    shared: MemoryBudget | None,
    admit: Callable[[int], None] | None,
) -> tuple[EngineInfo, EngineCore]:
    """Builds an engine that generates, as `EngineKind` says."""
    built = build_engine(args, progress, shared=shared, admit=admit)
    # Beside the start of the server. Elsewhere a prompt comes at once, and its own program would wait for these.
    built.engine.runner.precompile(1, greedy=built.default_sampling_params.greedy)
    built.engine.grammar_compiler.prepare()
    return EngineInfo.of(built), GenerationCore(built)
