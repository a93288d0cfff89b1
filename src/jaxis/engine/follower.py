"""A host that makes the same program calls as the leader: it has weights and caches, and knows no requests."""

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
from jaxis.engine.hosts.messages import ReceivedOperands
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
    """Joins the group of a leader, and does what it says until it ends.

    Once the group has met, a fault ends the process at once, with exit code 1: JAX's own end would wait for the others.

    Args:
      place: Which host this is.
      own_arguments: Arguments of the engine that are this host's own: its folder or name of the model, if it was given,
        its token and folder of downloads.
      progress: Shows what is going on.

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
    """Tells the leader of a fault, and ends this process."""
    _logger.debug("the follower has failed", exc_info=error)
    message = str(error).partition("\n")[0] or type(error).__name__
    try:
        channel.send(messages.HostFailed(type(error).__name__, message))
    finally:
        end_process(EngineError(message))


class _Orders:
    """The leader's messages, received on a thread of their own, which ends this process when the leader has ended."""

    def __init__(self, channel: Channel[Order]) -> None:
        self._channel = channel
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        threading.Thread(target=self._receive, name="jaxis-orders", daemon=True).start()

    def next(self) -> Order:
        """Waits for the next one."""
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
    """Tells the leader twice a second that this host is there, and how far it is.

    Attributes:
      num_calls: How many calls it has made.
    """

    def __init__(self, channel: Channel[Order]) -> None:
        self.num_calls = 0
        self._channel = channel

    def start(self) -> None:
        """Begins, on a thread of its own."""
        threading.Thread(target=self._send, name="jaxis-heartbeat", daemon=True).start()

    def _send(self) -> None:
        while True:
            try:
                self._channel.send(messages.CallsMade(self.num_calls))
            except ChannelClosedError:
                return
            time.sleep(HEARTBEAT_SECONDS)


class _Results:
    """Waits for what calls compute, on a thread of its own: a fault of the devices ends this process.

    Args:
      channel: To the leader.
      is_reporting: Whether the leader is to be told of results.
    """

    def __init__(self, channel: Channel[Order], is_reporting: bool) -> None:
        self._channel, self._is_reporting = channel, is_reporting
        self._results: queue.SimpleQueue[tuple[Any, int | None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="jaxis-results", daemon=True).start()

    def put(self, result: Any, call: int | None = None) -> None:
        """Takes a call's result, a tree of arrays.

        Args:
          result: It may still be computed.
          call: The call's number, if the leader may want to know the result.
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
    """Makes the leader's calls, in order.

    Args:
      programs: Those of this host's part of the model.
      channel: To the leader.
      heartbeats: Counts the calls.
      results: Looks after what they compute.
    """

    def __init__(self, programs: Programs, channel: Channel[Order], heartbeats: _Heartbeats, results: _Results) -> None:
        self._programs, self._channel, self._heartbeats = programs, channel, heartbeats
        self._results = results
        self._has_last_stage = programs.executor.stages[-1].stage.is_last
        self._keys: dict[int, ProgramKey] = {}
        self._operands = ReceivedOperands()

    def run(self, orders: _Orders) -> None:
        """Until the leader closes the group."""
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
    """The first signal to end waits for the leader, which may be finishing its requests; a second one does not."""

    def wait(number: int, frame: object) -> None:
        del frame
        _logger.warning("this host ends when its leader does; once more ends it, and the group, at once")
        signal.signal(number, lambda *_: os._exit(1))

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, wait)
