"""A follower: a host that makes the same program calls as the leader. It has weights and caches, but no requests."""

from __future__ import annotations

import gc
import logging
import os
import queue
import signal
import threading
import time
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

from jaxis.engine.arguments import EngineArgs
from jaxis.engine.execution.program_key import Compiled, ProgramKey, RunsOn
from jaxis.engine.execution.programs import Programs
from jaxis.engine.hosts import messages
from jaxis.engine.hosts.followers import end_process
from jaxis.engine.hosts.meeting import HostPlace, join
from jaxis.engine.hosts.operands import ReceivedOperands
from jaxis.engine.opened_model import facts_of_model, open_model
from jaxis.errors import EngineError
from jaxis.host.channel import Channel, ChannelClosedError
from jaxis.host.progress import ProgressDisplay
from jaxis.parallel import distributed
from jaxis.parallel.stages import first_host

HEARTBEAT_SECONDS = 0.5
Order = messages.Call | messages.Setup
_logger = logging.getLogger(__name__)


def follow(place: HostPlace, own_arguments: dict[str, Any], progress: ProgressDisplay) -> None:
    """Joins the group of a leader and carries out its orders until the leader ends.

    Once the group has met, an error ends the process at once, with exit code 1. JAX's own shutdown would wait for the
    other hosts.

    Args:
      place: Configuration of this host within its group.
      own_arguments: Engine arguments that this host sets for itself: model folder or name if given, Hub token, download
        folder.
      progress: Display of progress.

    Raises:
      ConfigError: The leader refuses the group.
      EngineError: There is no leader.
    """
    channel = join(place)
    _end_with_the_leader()
    orders = _Orders(channel)
    try:
        heartbeats = _Heartbeats(channel)
        programs, results = _build(place, own_arguments, channel, orders, heartbeats, progress)
        gc.collect()
        gc.freeze()
        with progress.silent():
            _Calls(programs, channel, heartbeats, results).run(orders)
        programs.close()
        distributed.leave()
    except Exception as error:
        _fail(channel, error)
    channel.close()


def _fail(channel: Channel[Order], error: Exception) -> None:
    """Reports an error to the leader and ends this process."""
    _logger.debug("the follower has failed", exc_info=error)
    message = str(error).partition("\n")[0] or type(error).__name__
    try:
        channel.send(messages.HostFailed(type(error).__name__, message))
    finally:
        end_process(EngineError(message))


class _Orders:
    """Queue of the leader's messages. Its thread ends this process when the leader has ended."""

    def __init__(self, channel: Channel[Order]) -> None:
        self._channel = channel
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        threading.Thread(target=self._receive, name="jaxis-orders", daemon=True).start()

    def next(self) -> Order:
        """Waits for the next message."""
        return self._orders.get()

    def _receive(self) -> None:
        try:
            while True:
                order = self._channel.receive()
                if isinstance(order, messages.GroupRefused):
                    end_process(EngineError(order.reason))
                self._orders.put(order)
                if isinstance(order, messages.Close):
                    return
        except ChannelClosedError as error:
            end_process(EngineError(f"the leader has ended ({error})"))


class _Heartbeats:
    """Sender of this host's heartbeats.

    Attributes:
      num_calls: Number of the leader's calls that this host has made.
    """

    def __init__(self, channel: Channel[Order]) -> None:
        self.num_calls = 0
        self._channel = channel

    def start(self) -> None:
        """Starts the thread."""
        threading.Thread(target=self._send, name="jaxis-heartbeat", daemon=True).start()

    def _send(self) -> None:
        while True:
            try:
                self._channel.send(messages.CallsMade(self.num_calls))
            except ChannelClosedError:
                return
            time.sleep(HEARTBEAT_SECONDS)


class _Results:
    """Thread that waits for the results of calls. An error of the devices ends this process.

    Args:
      channel: Connection to the leader.
      is_reporting: True if this host sends results to the leader.
    """

    def __init__(self, channel: Channel[Order], is_reporting: bool) -> None:
        self._channel, self._is_reporting = channel, is_reporting
        self._results: queue.SimpleQueue[tuple[Any, int | None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="jaxis-results", daemon=True).start()

    def put(self, result: Any, call: int | None = None) -> None:
        """Adds the result of a call.

        Args:
          result: Tree of arrays, which may still be computing.
          call: Number of the call if the leader may need its result; None otherwise.
        """
        self._results.put((result, call))

    def _run(self) -> None:
        try:
            while True:
                self._wait_for(*self._results.get())
        except ChannelClosedError:
            _logger.debug("the leader has ended")
        except Exception as error:
            _fail(self._channel, error)

    def _wait_for(self, result: Any, call: int | None) -> None:
        jax.block_until_ready(result)
        if self._is_reporting and call is not None:
            arrays = [messages.Array.of(np.asarray(leaf)) for leaf in jax.tree.leaves(result)]
            self._channel.send(messages.CallResult(call, arrays))


def _build(
    place: HostPlace,
    own_arguments: dict[str, Any],
    channel: Channel[Order],
    orders: _Orders,
    heartbeats: _Heartbeats,
    progress: ProgressDisplay,
) -> tuple[Programs, _Results]:
    """Loads this host's part of the model that the leader names."""
    build = orders.next()
    assert isinstance(build, messages.LoadModel)
    args = EngineArgs(**build.arguments | own_arguments)
    opened = open_model(args)
    channel.send(messages.ModelFound(facts_of_model(opened.path, args)))
    meshes = opened.make_meshes(args)
    loaded = opened.load(args, meshes, progress)
    heartbeats.start()
    channel.send(messages.WeightsLoaded(loaded.most_cache_bytes, *loaded.first_share(place.rank)))
    allocate = orders.next()
    assert isinstance(allocate, messages.AllocateCaches)
    programs = Programs(loaded.executor(allocate.cache_bytes), progress.compiling)
    progress.note(f"host {place.rank} of {place.num_hosts} is ready")
    # Of the hosts that have the last stage, the first tells the leader what it computes, unless that is the leader.
    is_reporting = first_host(meshes[-1]) == place.rank
    return programs, _Results(channel, is_reporting)


class _Calls:
    """Carries out the leader's orders, in order.

    Args:
      programs: Programs of this host's part of the model.
      channel: Connection to the leader.
      heartbeats: Counter of the calls.
      results: Thread that waits for the results.
    """

    def __init__(self, programs: Programs, channel: Channel[Order], heartbeats: _Heartbeats, results: _Results) -> None:
        self._programs, self._channel, self._heartbeats = programs, channel, heartbeats
        self._results = results
        self._has_last_stage = programs.executor.stages[-1].stage.is_last
        self._keys: dict[int, ProgramKey] = {}
        self._operands = ReceivedOperands()

    def run(self, orders: _Orders) -> None:
        """Runs until the leader closes the group."""
        while not isinstance(order := orders.next(), messages.Close):
            self._carry_out(order)
            if isinstance(order, messages.Call):
                self._heartbeats.num_calls += 1

    def _carry_out(self, order: Order) -> None:
        match order:
            case messages.CompileProgram():
                self._compile(order)
            case messages.Run():
                self._run(order)
            case messages.Recover():
                self._programs.executor.recover()
            case _:
                raise EngineError(f"the leader sent {type(order).__name__} to a host that is built")

    def _run(self, order: messages.Run) -> None:
        key = self._keys[order.number]
        operands = self._operands.decode(order.number, order.operands)
        is_of_last_stage = key.runs_on is RunsOn.LAST_STAGE
        if is_of_last_stage and not self._has_last_stage:
            return
        result = self._programs.run(key, *operands)
        if is_of_last_stage:
            self._results.put(result, self._heartbeats.num_calls + 1)
        else:
            self._results.put(self._programs.executor.newest)

    def _compile(self, order: messages.CompileProgram) -> None:
        key = self._keys[order.number] = order.program_key()

        def report(future: Future[Compiled]) -> None:
            error = future.exception()
            message = None if error is None else str(error).partition("\n")[0] or type(error).__name__
            try:
                self._channel.send(messages.ProgramCompiled(order.number, message))
            except ChannelClosedError:
                _logger.debug("the leader has ended")

        self._programs.precompile(key).add_done_callback(report)


def _end_with_the_leader() -> None:
    """Makes a first signal wait for the leader, which may be finishing requests; a second one ends the process."""

    def wait(number: int, frame: object) -> None:
        del frame
        _logger.warning("this host ends when its leader does; once more ends it, and the group, at once")
        signal.signal(number, lambda *_: os._exit(1))

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, wait)
