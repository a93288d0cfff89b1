"""The thread that steps the engine. Nothing else touches the engine while it runs."""

from __future__ import annotations

import copy
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from jaxis.engine.client.engine_change import PAUSED, EngineChange, Pause, Resume, Sleep, UpdateWeights, WakeUp
from jaxis.engine.client.engine_client import (
    AdapterLoad,
    ChangeDone,
    EngineOutputs,
    EngineStats,
    RankStats,
    RequestState,
    Submission,
    TokenDelta,
)
from jaxis.engine.delta_tracker import DeltaTracker
from jaxis.engine.kv_store.fetcher import FETCH_SECONDS
from jaxis.engine.scheduling.sequence import SequenceStatus
from jaxis.errors import EngineError, JaxisError, RequestError
from jaxis.host.threads import Deadline, run_in_daemon

if TYPE_CHECKING:
    from jaxis.engine.output_processor import Request
    from jaxis.engine.setup import BuiltEngine

COMPILE_STALL_SECONDS = 1800.0  # compiling a large model's program may take this long without being a stall
MAX_FAILED_STEPS = 3  # consecutive; from then on the engine is at fault, not a request
_logger = logging.getLogger(__name__)


@dataclass
class _RunningRequest:
    """A request in the engine. `first_token_time` is in seconds of `time.monotonic`; None before its first token."""

    tracker: DeltaTracker
    final_only: bool
    first_token_time: float | None = None


class EngineThread:
    """Steps the engine while there is work, and carries out other threads' commands in between.

    Methods with the names of those of `EngineClient` do the same.

    Attributes:
      stats: State of the engine after its last step.

    Args:
      built: The engine.
      deliver: Callback in the thread, with the outputs of a step.
      fail: Callback in the thread, with the error that ended it; no step follows.
    """

    def __init__(
        self,
        built: BuiltEngine,
        deliver: Callable[[EngineOutputs], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._engine, self._hosts, self._weights = built.engine, built.hosts, built.weights
        self._deliver = deliver
        self._fail = fail
        self.stats = EngineStats()
        self._busy_since: float | None = None  # when the current command or step began
        self._num_failed_steps = 0  # since the last success
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._running: dict[str, _RunningRequest] = {}
        # Requests whose blocks are being fetched, and their deadlines; aborting a request cancels its deadline.
        self._fetching: dict[str, Deadline] = {}
        self._fetching_lock = threading.Lock()
        # Calls of `Pause` that wait until running requests end, and requests that arrive meanwhile.
        self._pauses: list[int] = []
        self._held: dict[str, Submission] = {}
        self._thread = threading.Thread(target=self._run, name="jaxis-engine", daemon=True)

    # Methods for other threads.

    def start(self) -> None:
        self._thread.start()

    def add(self, submission: Submission) -> None:
        if self._engine.connector.fetches(submission.params):
            with self._fetching_lock:
                self._fetching[submission.request_id] = Deadline(FETCH_SECONDS)
            run_in_daemon(functools.partial(self._fetch_and_add, submission), "jaxis-fetch")
        else:
            self._commands.put(functools.partial(self._add, submission))

    def abort(self, request_id: str) -> None:
        with self._fetching_lock:
            if (deadline := self._fetching.get(request_id)) is not None:
                deadline.cancel()
                return
        self._commands.put(functools.partial(self._abort, request_id))

    def reset_prefix_cache(self) -> None:
        self._commands.put(self._engine.reset_prefix_cache)

    def describe(self) -> None:
        self._commands.put(lambda: self._post(EngineOutputs(states=[*map(_state, self._running.values())])))

    @property
    def _adapters(self) -> Any:
        """The adapters of requests; None if there are none."""
        feature = self._engine.runner.feature("adapter")
        return None if feature is None else feature.store

    def load_adapter(self, call_id: int, source: str) -> None:
        """Reads an adapter in the caller's thread, and makes it known between two steps."""
        try:
            adapters = self._adapters
            if adapters is None:
                raise RequestError("this engine has no adapters")
            read, template = adapters.read(source), adapters.chat_template_of(source)
        except Exception as error:
            self._commands.put(functools.partial(self._post, EngineOutputs(loads=[AdapterLoad(call_id, b"", error)])))
        else:
            self._commands.put(functools.partial(self._add_adapter, adapters, call_id, read, template))

    def unload_adapter(self, adapter: bytes) -> None:
        if (adapters := self._adapters) is not None:
            self._commands.put(functools.partial(adapters.remove, adapter))

    def change(self, call_id: int, change: EngineChange) -> None:
        """Changes the engine between two steps. New weights are read in the caller's thread before that."""
        make: Callable[[], object]
        match change:
            case Pause(mode="wait"):
                self._commands.put(functools.partial(self._pauses.append, call_id))
                return
            case Pause():
                make = functools.partial(self._pause, abort=change.mode == "abort")
            case Resume():
                make = self._resume
            case Sleep():
                make = functools.partial(self._weights.sleep, change.level)
            case WakeUp():
                make = functools.partial(self._weights.wake_up, change.parts)
            case UpdateWeights():
                try:
                    new = self._weights.read(change.folder)
                except Exception as error:
                    self._commands.put(functools.partial(self._post_change, call_id, error))
                    return
                make = functools.partial(self._weights.put, new, change.version)
        self._commands.put(functools.partial(self._change, call_id, make))

    def stop(self, timeout_seconds: float) -> bool:
        self._commands.put(None)
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def is_making_progress(self, stall_seconds: float) -> bool:
        """Returns whether thread and other hosts are alive, some of the last steps succeeded, and none takes too long.

        Args:
          stall_seconds: Longest time of a step, not counting the wait for a program to compile.
        """
        if not self._thread.is_alive() or self._num_failed_steps >= MAX_FAILED_STEPS:
            return False
        return not self._hosts.silent and not self.is_stalled(stall_seconds)

    def is_stalled(self, stall_seconds: float) -> bool:
        """Returns whether a step takes longer than `stall_seconds`, as defined in `is_making_progress`."""
        since, limit = self._busy_since, stall_seconds
        if since is None:
            return False
        if (wait := self._engine.runner.last_compile_wait) is not None:
            if wait.ended is None:
                since, limit = wait.started, max(limit, COMPILE_STALL_SECONDS)
            else:
                since = max(since, wait.ended)
        return time.monotonic() - since >= limit

    def _fetch_and_add(self, submission: Submission) -> None:
        prompt, deadline = submission.prompt, self._fetching[submission.request_id]
        try:
            self._engine.connector.fetch(prompt.token_ids, prompt.cache_salt, submission.params, deadline)
        finally:
            with self._fetching_lock:
                del self._fetching[submission.request_id]
                self._commands.put(functools.partial(self._add, submission))
                if deadline.is_cancelled:
                    self._commands.put(functools.partial(self._abort, submission.request_id))

    # Methods that the thread itself calls.

    def _run(self) -> None:
        try:
            while self._take_commands():
                if self._engine.has_work:
                    self._post(self._outputs_of(self._engine.step))
                if self._pauses and not self._engine.has_unfinished:
                    self._end_pauses()
                self._update_stats()
        except BaseException as error:
            _logger.critical("the engine has failed for good", exc_info=True)
            self._fail(error)
            return
        for request_id in self._running:
            self._engine.abort_request(request_id)
        self._running.clear()
        self._update_stats()

    def _take_commands(self) -> bool:
        """Carries out the queued commands, and waits for one if there is no step to run. False ends the thread."""
        wait = not self._engine.has_work
        if wait:
            if self._commands.empty():
                self._finish_saves()
            self._busy_since = None
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return True
            finally:
                self._busy_since = time.monotonic()
            if command is None:
                return False
            command()
            wait = False

    def _finish_saves(self) -> None:
        try:
            self._engine.connector.idle()
        except Exception:
            _logger.warning("the last blocks of the KV cache were not saved", exc_info=True)

    def _add(self, new: Submission) -> None:
        if self._pauses:
            self._held[new.request_id] = new
            return
        try:
            request = self._engine.add_request(
                new.request_id,
                new.prompt.token_ids,
                new.params,
                priority=new.priority,
                client=new.client,
                cache_salt=new.prompt.cache_salt,
                adapter=new.prompt.adapter,
                inputs=new.prompt.inputs,
                grammar=new.grammar,
            )
        except JaxisError as error:
            self._post(EngineOutputs(errors=[(new.request_id, error)]))
        except Exception as error:
            _logger.exception("a request could not be queued")
            failure = EngineError(f"the request could not be queued: {error}")
            self._post(EngineOutputs(errors=[(new.request_id, failure)]))
        else:
            self._running[new.request_id] = _RunningRequest(DeltaTracker(request), new.final_only)

    def _add_adapter(self, adapters: Any, call_id: int, read: Any, chat_template: str | None) -> None:
        try:
            load = AdapterLoad(call_id, adapters.add(read, keep=True), chat_template=chat_template)
        except JaxisError as error:
            load = AdapterLoad(call_id, b"", error)
        self._post(EngineOutputs(loads=[load]))

    def _change(self, call_id: int, make: Callable[[], object]) -> None:
        self._post(self._outputs_of(self._engine.settle))
        try:
            make()
        except Exception as error:
            if not isinstance(error, JaxisError):
                _logger.exception("the engine could not be changed")
            self._post_change(call_id, error)
        else:
            self._post_change(call_id)

    def _post_change(self, call_id: int, error: Exception | None = None) -> None:
        done = ChangeDone(call_id, self._weights.fingerprint, self._weights.versions.current, error)
        self._post(EngineOutputs(changes=[done]))

    def _pause(self, *, abort: bool) -> None:
        if abort:
            for request_id in list(self._running):
                self._abort(request_id)
        self._engine.holds.add(PAUSED)

    def _end_pauses(self) -> None:
        self._engine.holds.add(PAUSED)
        self._let_go([None] * len(self._pauses))

    def _resume(self) -> None:
        self._engine.holds.discard(PAUSED)
        self._let_go([EngineError("the engine was resumed before it was paused")] * len(self._pauses))

    def _let_go(self, errors: list[Exception | None]) -> None:
        calls, held = self._pauses, list(self._held.values())
        self._pauses, self._held = [], {}
        for call_id, error in zip(calls, errors, strict=True):
            self._post_change(call_id, error)
        for submission in held:
            self._add(submission)

    def _abort(self, request_id: str) -> None:
        if self._held.pop(request_id, None) is not None:
            self._post(EngineOutputs(errors=[(request_id, EngineError("the request was aborted"))]))
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
                new.errors.append((request.request_id, copy.copy(request.error)))
            elif (tokens := running.tracker.take_tokens()) is not None:
                new.deltas.append(TokenDelta(request.request_id, *tokens))
            else:
                new.outputs.append(running.tracker.take(running.first_token_time))
        return new

    def _update_stats(self) -> None:
        scheduler = self._engine.scheduler
        ranks = scheduler.ranks
        self.stats = EngineStats(
            num_requests_running=scheduler.num_running,
            num_requests_waiting=scheduler.num_waiting,
            kv_cache_usage=scheduler.block_manager.usage,
            prefix_cache_queries=self._engine.prefix_cache_queries,
            prefix_cache_hits=self._engine.prefix_cache_hits,
            num_preemptions=self._engine.num_preemptions,
            kv_tiers=self._engine.connector.stats,
            drafts=None if (drafts := self._engine.speculation.counts) is None else drafts.copy(),
            ranks=tuple(RankStats(rank.num_running, rank.block_manager.usage) for rank in ranks if len(ranks) > 1),
            places=None if (adapters := self._adapters) is None else adapters.use,
        )

    def _post(self, new: EngineOutputs) -> None:
        if new.outputs or new.deltas or new.errors or new.states is not None or new.loads or new.changes:
            self._deliver(new)


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
