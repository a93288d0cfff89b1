"""The thread that steps an engine. Nothing else touches the engine while it runs."""

from __future__ import annotations

import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from jaxis.engine.client.engine_client import EngineStats
from jaxis.engine.client.engine_core import EngineCore
from jaxis.engine.client.wire import Call, CallDone, CancelCall, Command, EngineOutputs, Failure
from jaxis.engine.execution.calls import EngineCall
from jaxis.errors import JaxisError, RequestError
from jaxis.host.threads import run_in_daemon

COMPILE_STALL_SECONDS = 1800.0  # compiling a large model's program may take this long without being a stall
_logger = logging.getLogger(__name__)


class EngineThread:
    """Steps an engine while there is work, and carries out other threads' commands in between.

    Attributes:
      stats: State of the engine after its last step.

    Args:
      core: The engine's requests and steps.
      deliver: Callback in the thread, with the outputs of a step.
      fail: Callback in the thread, with the error that ended it; no step follows.
    """

    def __init__(
        self, core: EngineCore, deliver: Callable[[EngineOutputs], None], fail: Callable[[BaseException], None]
    ) -> None:
        self._core, self._deliver, self._fail = core, deliver, fail
        self.stats = EngineStats()
        self._busy_since: float | None = None  # when the current command or step began
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._unfinished: dict[int, Future[Any]] = {}  # calls whose results come later
        self._ended: list[CallDone] = []  # calls whose results are sent next, together
        core.connect(self._post, self._commands.put)
        self._thread = threading.Thread(target=self._run, name="jaxis-engine", daemon=True)

    # Methods for other threads.

    def start(self) -> None:
        self._thread.start()

    def take(self, command: Command) -> None:
        """Carries out a command between two steps. What needs time before that is done in another thread."""
        if isinstance(command, Call):
            self._call(command)
        elif isinstance(command, CancelCall):
            self._commands.put(functools.partial(self._cancel, command.call_id))
        else:
            self._core.take(command)

    def stop(self, timeout_seconds: float) -> bool:
        """Ends the thread; returns whether it has ended in time."""
        self._commands.put(None)
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def is_making_progress(self, stall_seconds: float) -> bool:
        """Returns whether thread and other hosts are alive, some of the last steps succeeded, and none takes too long.

        Args:
          stall_seconds: Longest time of a step, not counting the wait for a program to compile.
        """
        if not self._thread.is_alive() or self._core.is_failing:
            return False
        return not self._core.hosts.silent and not self.is_stalled(stall_seconds)

    def is_stalled(self, stall_seconds: float) -> bool:
        """Returns whether a step takes longer than `stall_seconds`, as defined in `is_making_progress`."""
        since, limit = self._busy_since, stall_seconds
        if since is None:
            return False
        if (wait := self._core.compile_wait) is not None:
            if wait.ended is None:
                since, limit = wait.started, max(limit, COMPILE_STALL_SECONDS)
            else:
                since = max(since, wait.ended)
        return time.monotonic() - since >= limit

    def _call(self, call: Call) -> None:
        function = self._core.calls.get(call.name)
        prepare = functools.partial(self._prepare, call, function)
        if function is None or function.read is None or call.waits:
            prepare()
        else:
            run_in_daemon(prepare, "jaxis-read")

    def _prepare(self, call: Call, function: EngineCall | None) -> None:
        try:
            if function is None:
                raise RequestError(f"this engine has no function {call.name!r}")
            arguments = call.arguments if function.read is None else function.read(*call.arguments)
        except Exception as error:
            self._commands.put(functools.partial(self._end_call, call.call_id, error=error))
        else:
            self._commands.put(functools.partial(self._carry_out, call.call_id, function, arguments))

    # Methods that the thread itself calls.

    def _run(self) -> None:
        try:
            while self._take_commands():
                self._post_calls()
                self._core.step()
                self._post_calls()
                self.stats = self._core.stats
        except BaseException as error:
            _logger.critical("the engine has failed for good", exc_info=True)
            self._fail(error)
            return
        self._core.end()
        self.stats = self._core.stats

    def _take_commands(self) -> bool:
        """Carries out the queued commands, and waits for one if there is no step to run. False ends the thread."""
        wait = not self._core.has_work
        if wait:
            if self._commands.empty():
                self._core.idle()
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

    def _carry_out(self, call_id: int, function: EngineCall, arguments: Sequence[Any]) -> None:
        if function.settles:
            self._core.settle()
        try:
            value = function.run(*arguments)
        except Exception as error:
            if not isinstance(error, JaxisError):
                _logger.exception("a call failed")
            self._end_call(call_id, error=error)
            return
        if isinstance(value, Future):
            self._unfinished[call_id] = value
            value.add_done_callback(functools.partial(self._end_later, call_id))
        else:
            self._end_call(call_id, value)

    def _end_call(self, call_id: int, value: Any = None, error: BaseException | None = None) -> None:
        self._ended.append(CallDone(call_id, value, error and Failure.of(error)))

    def _end_later(self, call_id: int, done: Future[Any]) -> None:
        del self._unfinished[call_id]
        if done.cancelled():
            return
        if (error := done.exception()) is not None:
            self._end_call(call_id, error=error)
        else:
            self._end_call(call_id, done.result())

    def _cancel(self, call_id: int) -> None:
        if (unfinished := self._unfinished.get(call_id)) is not None:
            unfinished.cancel()

    def _post_calls(self) -> None:
        ended, self._ended = self._ended, []
        self._post(EngineOutputs(calls=ended))

    def _post(self, new: EngineOutputs) -> None:
        if new.outputs or new.deltas or new.errors or new.calls:
            self._deliver(new)
