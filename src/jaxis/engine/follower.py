"""A host that makes the program calls of another one, the leader: it has weights and caches, and knows no requests."""

from __future__ import annotations

import gc
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

from jaxis.engine.arguments import EngineArgs
from jaxis.engine.execution.executor import Executor
from jaxis.engine.execution.pipeline_executor import PipelineExecutor
from jaxis.engine.hosts import messages
from jaxis.engine.hosts.channel import Channel, ChannelClosedError
from jaxis.engine.hosts.followers import end_process
from jaxis.engine.hosts.meeting import HostPlace, join
from jaxis.engine.hosts.vectors import ReceivedVectors
from jaxis.engine.opened_model import facts_of_model, open_model
from jaxis.errors import EngineError
from jaxis.host.progress import ProgressDisplay
from jaxis.parallel import distributed
from jaxis.parallel.stages import first_host

ALIVE_SECONDS = 0.5
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
        signs_of_life = _SignsOfLife(channel)
        executor, results = _build(place, own_arguments, channel, orders, signs_of_life, progress)
        gc.collect()
        gc.freeze()
        with progress.silent():
            _Calls(executor, channel, signs_of_life, results).run(orders)
        executor.close()
        distributed.leave()
    except Exception as error:
        _fail(channel, error)
    channel.close()


def _fail(channel: Channel[Order], error: Exception) -> None:
    """Tells the leader of a fault, and ends this process."""
    _logger.debug("the follower has failed", exc_info=error)
    message = str(error).partition("\n")[0] or type(error).__name__
    try:
        channel.send(messages.Failed(type(error).__name__, message))
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
                if isinstance(order, messages.Refused):
                    end_process(EngineError(order.reason))
                self._orders.put(order)
                if isinstance(order, messages.Close):
                    return
        except ChannelClosedError as error:
            end_process(EngineError(f"the leader has ended ({error})"))


class _SignsOfLife:
    """Tells the leader twice a second that this host is there, and how far it is.

    Attributes:
      num_calls: How many calls it has made.
    """

    def __init__(self, channel: Channel[Order]) -> None:
        self.num_calls = 0
        self._channel = channel

    def start(self) -> None:
        """Begins, on a thread of its own."""
        threading.Thread(target=self._send, name="jaxis-alive", daemon=True).start()

    def _send(self) -> None:
        while True:
            try:
                self._channel.send(messages.Alive(self.num_calls))
            except ChannelClosedError:
                return
            time.sleep(ALIVE_SECONDS)


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
            self._channel.send(messages.Computed(call, arrays))


def _build(
    place: HostPlace,
    own_arguments: dict[str, Any],
    channel: Channel[Order],
    orders: _Orders,
    signs_of_life: _SignsOfLife,
    progress: ProgressDisplay,
) -> tuple[Executor, _Results]:
    """Loads this host's part of the model that the leader names."""
    build = orders.next()
    assert isinstance(build, messages.Build)
    args = EngineArgs(**build.arguments | own_arguments)
    opened = open_model(args)
    channel.send(messages.Found(facts_of_model(opened.path, args)))
    meshes = opened.make_meshes(args)
    loaded = opened.load(args, meshes, progress)
    signs_of_life.start()
    channel.send(messages.Loaded(loaded.most_cache_bytes, *loaded.first_share(place.rank)))
    allocate = orders.next()
    assert isinstance(allocate, messages.Allocate)
    parts = loaded.parts(allocate.cache_bytes)
    progress.note(f"host {place.rank} of {place.num_hosts} is ready")
    # Of the hosts that have the last stage, the first tells the leader what it computes, unless that is the leader.
    is_reporting = first_host(meshes[-1]) == place.rank
    executor = PipelineExecutor(loaded.vllm_config, parts, meshes, on_compile=loaded.on_compile)
    return executor, _Results(channel, is_reporting)


class _Calls:
    """Makes the leader's calls, in order.

    Args:
      executor: This host's.
      channel: To the leader.
      signs_of_life: Counts the calls.
      results: Looks after what they compute.
    """

    def __init__(
        self, executor: Executor, channel: Channel[Order], signs_of_life: _SignsOfLife, results: _Results
    ) -> None:
        self._executor, self._channel, self._signs_of_life = executor, channel, signs_of_life
        self._results = results
        self._keys: dict[int, Hashable] = {}
        self._vectors = ReceivedVectors()

    def run(self, orders: _Orders) -> None:
        """Until the leader closes the group."""
        while not isinstance(order := orders.next(), messages.Close):
            self._carry_out(order)
            if isinstance(order, messages.Call):
                self._signs_of_life.num_calls += 1

    def _carry_out(self, order: Order) -> None:
        executor, vector = self._executor, messages.vector
        match order:
            case messages.Prepare():
                self._prepare(order)
            case messages.Forward():
                executor.forward(self._key(order.number), self._vectors.decode(order.number, order.packed))
                self._results.put(executor.newest)
            case messages.Sample() | messages.Logits():
                if executor.stage.is_last:
                    self._results.put(self._in_last_stage(order), self._signs_of_life.num_calls + 1)
            case messages.GreedyStep():
                packed = self._vectors.decode(order.number, order.packed)
                self._results.put(executor.greedy_step(self._key(order.number), packed))
            case messages.Whole():
                executor.whole(self._key(order.number), vector(order.input_ids), order.num_tokens)
            case messages.Recover():
                executor.recover()
            case _:
                raise EngineError(f"the leader sent {type(order).__name__} to a host that is built")

    def _in_last_stage(self, order: messages.Sample | messages.Logits) -> Any:
        """Makes a call of the last pipeline stage; returns what it computes."""
        if isinstance(order, messages.Sample):
            sent = order.parameters
            parameters = None if sent is None else self._vectors.decode(order.number, sent)
            return self._executor.sample(self._key(order.number), parameters)
        targets = None if order.targets is None else messages.vector(order.targets)
        return self._executor.logits(self._key(order.number), messages.vector(order.rows), targets)

    def _key(self, number: int) -> Any:
        return self._keys[number]

    def _prepare(self, order: messages.Prepare) -> None:
        key = self._keys[order.number] = order.program_key()

        def report(future: Future[Callable[..., Any]]) -> None:
            error = future.exception()
            message = None if error is None else str(error).partition("\n")[0] or type(error).__name__
            try:
                self._channel.send(messages.Prepared(order.number, message))
            except ChannelClosedError:
                _logger.debug("the leader has ended")

        self._executor.programs.precompile(key).add_done_callback(report)


def _end_with_the_leader() -> None:
    """The first signal to end waits for the leader, which may be finishing its requests; a second one does not."""

    def wait(number: int, frame: object) -> None:
        del frame
        _logger.warning("this host ends when its leader does; once more ends it, and the group, at once")
        signal.signal(number, lambda *_: os._exit(1))

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, wait)
