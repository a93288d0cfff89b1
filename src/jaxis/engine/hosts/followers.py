"""The leader's connections to its followers: messages, reports, and the end of the group if one is lost."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar
from weakref import WeakValueDictionary

from jaxis.engine.arguments import EngineArgs
from jaxis.engine.execution.program_key import ProgramKey
from jaxis.engine.hosts import messages
from jaxis.engine.hosts.expected_result import ExpectedResult
from jaxis.engine.hosts.meeting import Follower, check_agreement, refuse
from jaxis.errors import EngineError
from jaxis.host.channel import ChannelClosedError, to_frame
from jaxis.parallel import distributed

ReportOf = TypeVar("ReportOf", messages.ModelFound, messages.WeightsLoaded)
SILENT_SECONDS = 10.0  # a host without a heartbeat for so long is reported in the log
LOST_SECONDS = 60.0  # and after so long the group is ended, unless `lost_seconds` says otherwise
SLOW_SECONDS = 10.0  # a host that compiles for so much longer than this one is reported in the log
WATCH_SECONDS = 0.5
CLOSE_SECONDS = 20.0
# Arguments that each host sets for itself.
_OWN_ARGUMENTS = frozenset({"token", "cache_dir", "master_addr", "master_port", "distributed_timeout_seconds"})
_logger = logging.getLogger(__name__)


class Followers:
    """The `HostGroup` of a leader.

    A follower is lost if its connection ends, it reports a failure, or it sends no heartbeat for `lost_seconds`. The
    group is then lost, too, since JAX cannot go on with fewer processes: every method raises an error that names the
    host.

    Attributes:
      lost_seconds: Longest time without a heartbeat.
      on_lost: Callback on another thread when the group is lost; logs the error by default.
      num_parameters: Parameters of the pipeline stages that this host has no part of; set by `least_cache_bytes`.
      weight_bytes: Size of these stages' weights, on all devices together; set by `least_cache_bytes`.

    Args:
      followers: Connections to the followers.
    """

    def __init__(self, followers: Sequence[Follower]) -> None:
        self.lost_seconds = LOST_SECONDS
        self.on_lost: Callable[[EngineError], None] = lambda error: _logger.error("%s", error)
        self.num_parameters = self.weight_bytes = 0
        self._followers = followers
        self._changed = threading.Condition()
        self._error: EngineError | None = None
        self._is_closing = False
        self._ended: set[int] = set()  # ranks whose connections have ended
        self._num_sent = 0
        self._num_made = dict.fromkeys((follower.rank for follower in followers), 0)
        self._last_words = {follower.rank: time.monotonic() for follower in followers}
        self._reported: set[int] = set()  # ranks whose silence was reported
        # By the number of a program: the ranks that have compiled it -> None, or why that rank could not.
        self._compiled: dict[int, dict[int, str | None]] = {}
        self._num_programs = 0
        # By the number of a call; results without a reader are dropped.
        self._expected: WeakValueDictionary[int, ExpectedResult] = WeakValueDictionary()

    @property
    def num_hosts(self) -> int:
        """Size of the group, the leader included."""
        return len(self._followers) + 1

    @property
    def silent(self) -> list[str]:
        """Names of the hosts without a heartbeat for `SILENT_SECONDS`."""
        now = time.monotonic()
        return [str(f) for f in self._followers if now - self._last_words[f.rank] > SILENT_SECONDS]

    def give_up(self, reason: str) -> None:
        """Ends the group. The error also names the hosts that have not made all calls that were sent."""
        behind = [
            f"{follower} has made {self._num_made[follower.rank]} of {self._num_sent} calls"
            for follower in self._followers
            if self._num_made[follower.rank] < self._num_sent
        ]
        self._end_group("; ".join([reason, *behind]))

    def build(self, args: EngineArgs, facts: dict[str, str]) -> None:
        """Orders all followers to load the model, and checks first that their files equal the leader's.

        Args:
          args: Arguments of the engine.
          facts: Properties of the leader's files, by name.

        Raises:
          ConfigError: A follower's files differ.
          EngineError: A follower has ended, or failed.
        """
        arguments = {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}
        shared = {name: value for name, value in arguments.items() if name not in _OWN_ARGUMENTS}
        shared = {name: os.fspath(v) if isinstance(v, os.PathLike) else v for name, v in shared.items()}
        self.send(messages.LoadModel(shared))
        self.check_facts(facts)

    def check_facts(self, facts: dict[str, str]) -> None:
        """Waits until all followers have found their files, and checks that they equal the leader's; see `build`."""
        for follower in self._followers:
            check_agreement(facts, self._next(follower, messages.ModelFound).facts, follower)

    def refuse(self, reason: str) -> None:
        """Tells all connected followers why the group does not start."""
        self._is_closing = True
        refuse(self._followers, reason)

    def least_cache_bytes(self, ours: int) -> int:
        """Waits until all followers have loaded their weights.

        Args:
          ours: Largest size of all caches together for which this host has memory, in bytes.

        Returns:
          The smallest of these sizes over all hosts.

        Raises:
          EngineError: A follower has ended, or failed.
        """
        loaded = [self._next(follower, messages.WeightsLoaded) for follower in self._followers]
        self.num_parameters = sum(each.num_parameters for each in loaded)
        self.weight_bytes = sum(each.weight_bytes for each in loaded)
        return min([ours, *(each.cache_bytes for each in loaded)])

    def watch(self) -> None:
        """Starts the threads that read reports and watch heartbeats. Called after the start-up messages."""
        for follower in self._followers:
            self._last_words[follower.rank] = time.monotonic()
            threading.Thread(target=self._listen, args=(follower,), name="jaxis-follower", daemon=True).start()
        threading.Thread(target=self._watch_silence, name="jaxis-watchdog", daemon=True).start()

    def send(self, message: messages.Call | messages.Setup) -> None:
        """Sends a message to all followers.

        Raises:
          EngineError: The group is lost.
        """
        self.check()
        self._num_sent += isinstance(message, messages.Call)
        data = to_frame(message)
        for follower in self._followers:
            try:
                follower.channel.send_data(data)
            except ChannelClosedError as error:
                self._lose(follower, f"has ended ({error})")
                self.check()

    def when_lost(self, callback: Callable[[EngineError], None], stall_seconds: float) -> None:
        """Sets `on_lost` and `lost_seconds`."""
        self.on_lost, self.lost_seconds = callback, stall_seconds

    def wait_until_lost(self, timeout_seconds: float) -> None:
        """Waits until the group is lost, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._error, timeout_seconds)

    def check(self) -> None:
        """Raises an EngineError if the group is lost."""
        if self._error is not None:
            raise EngineError(str(self._error))

    def expect(self, wait_for_own: Callable[[], object]) -> ExpectedResult:
        """Announces that a follower will send the result of the next call.

        Args:
          wait_for_own: Function that waits for this host's part of the call and raises its error. Without that part
            no result comes.
        """

        def wait(expected: ExpectedResult) -> None:
            wait_for_own()
            self._wait_for_result(expected)

        expected = ExpectedResult(self._num_sent + 1, wait)
        with self._changed:
            self._expected[expected.call] = expected
        return expected

    def start_compiling(self, key: ProgramKey) -> int:
        """Orders all followers to compile a program; returns its number. Thread-safe."""
        with self._changed:
            self._num_programs += 1
            number = self._num_programs
            self._compiled[number] = {}
        self.send(messages.CompileProgram.of(number, key))
        return number

    def wait_until_compiled(self, number: int) -> None:
        """Waits until all followers have compiled a program.

        Raises:
          EngineError: A follower cannot compile it, or the group is lost.
        """
        with self._changed:
            while not self._changed.wait_for(
                lambda: self._error or self._is_closing or len(self._compiled[number]) == len(self._followers),
                SLOW_SECONDS,
            ):
                slow = [str(follower) for follower in self._followers if follower.rank not in self._compiled[number]]
                _logger.warning("a step waits for a program that %s is still compiling", ", ".join(slow))
            self.check()
            if self._is_closing:
                raise EngineError("the engine is closing")
            for follower in self._followers:
                if (error := self._compiled[number][follower.rank]) is not None:
                    raise EngineError(f"{follower} cannot compile a program: {error}")

    def end(self) -> None:
        """Orders all followers to end and waits for them, up to `CLOSE_SECONDS`. Does nothing if the group is lost."""
        with self._changed:
            if self._is_closing:
                return
            self._is_closing = True
            self._changed.notify_all()
        try:
            self.send(messages.Close())
        except EngineError:
            return
        distributed.leave()
        self.wait_until_ended()
        for follower in self._followers:
            follower.channel.close()

    def wait_until_ended(self) -> None:
        """Waits for the followers to end, after `watch`, up to `CLOSE_SECONDS`."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._ended) == len(self._followers), CLOSE_SECONDS)

    def _wait_for_result(self, expected: ExpectedResult) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._error or expected.arrays is not None)
        if expected.arrays is None:
            self.check()

    def _next(self, follower: Follower, kind: type[ReportOf]) -> ReportOf:
        """Receives the next report of a kind. Only for the start-up, before `watch`."""
        while True:
            try:
                report = follower.channel.receive()
            except ChannelClosedError as error:
                raise EngineError(f"{follower} has ended ({error})") from None
            if isinstance(report, messages.HostFailed):
                raise EngineError(f"{follower} cannot start: {report.message}")
            if isinstance(report, kind):
                return report

    def _listen(self, follower: Follower) -> None:
        try:
            while True:
                report = follower.channel.receive()
                self._last_words[follower.rank] = time.monotonic()
                if isinstance(report, messages.ProgramCompiled):
                    with self._changed:
                        self._compiled[report.number][follower.rank] = report.error
                        self._changed.notify_all()
                elif isinstance(report, messages.CallResult):
                    with self._changed:
                        if (expected := self._expected.get(report.call)) is not None:
                            expected.arrays = [array.array() for array in report.arrays]
                            self._changed.notify_all()
                elif isinstance(report, messages.CallsMade):
                    self._num_made[follower.rank] = report.num_calls
                elif isinstance(report, messages.HostFailed):
                    self._lose(follower, f"has failed: {report.message}")
        except ChannelClosedError as error:
            with self._changed:
                self._ended.add(follower.rank)
                self._changed.notify_all()
            self._lose(follower, f"has ended ({error})")

    def _watch_silence(self) -> None:
        while self._error is None and not self._is_closing:
            for follower in self._followers:
                silence = time.monotonic() - self._last_words[follower.rank]
                if silence > self.lost_seconds:
                    self._lose(follower, f"has given no sign of life for {silence:.0f} s")
                elif silence > SILENT_SECONDS and follower.rank not in self._reported:
                    self._reported.add(follower.rank)
                    _logger.warning("%s has given no sign of life for %.0f s", follower, silence)
                elif silence < SILENT_SECONDS:
                    self._reported.discard(follower.rank)
            time.sleep(WATCH_SECONDS)

    def _lose(self, follower: Follower, what: str) -> None:
        self._end_group(f"{follower} {what}")

    def _end_group(self, reason: str) -> None:
        with self._changed:
            if self._error is not None or self._is_closing:
                return
            self._error = EngineError(f"{reason}: the group of {self.num_hosts} hosts cannot go on")
            self._changed.notify_all()
        for follower in self._followers:
            follower.channel.close()
        self.on_lost(self._error)


def end_process(error: EngineError) -> None:
    """Ends this process at once. Devices that wait for a lost host may never answer."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    os._exit(1)
