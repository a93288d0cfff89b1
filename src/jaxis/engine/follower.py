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

from jaxis.engine.arguments import EngineArgs
from jaxis.engine.execution.cache_memory import available_bytes
from jaxis.engine.execution.executor import Executor
from jaxis.engine.execution.kv_cache import plan_kv_caches
from jaxis.engine.execution.sampler import SamplerOutput
from jaxis.engine.hosts import messages
from jaxis.engine.hosts.channel import Channel, ChannelClosedError
from jaxis.engine.hosts.followers import end_process
from jaxis.engine.hosts.meeting import HostPlace, join
from jaxis.engine.hosts.vectors import ReceivedVectors
from jaxis.engine.opened_model import facts_of_model, open_model
from jaxis.errors import EngineError
from jaxis.host.progress import ProgressDisplay
from jaxis.parallel import distributed

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
        executor = _build(place, own_arguments, channel, orders, signs_of_life, progress)
        gc.collect()
        gc.freeze()
        with progress.silent():
            _Calls(executor, channel, signs_of_life).run(orders)
        executor.close()
        distributed.leave()
    except Exception as error:
        _logger.debug("the follower has failed", exc_info=True)
        message = str(error).partition("\n")[0] or type(error).__name__
        try:
            channel.send(messages.Failed(type(error).__name__, message))
        finally:
            end_process(EngineError(message))
    channel.close()


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


def _build(
    place: HostPlace,
    own_arguments: dict[str, Any],
    channel: Channel[Order],
    orders: _Orders,
    signs_of_life: _SignsOfLife,
    progress: ProgressDisplay,
) -> Executor:
    """Loads this host's part of the model that the leader names."""
    build = orders.next()
    assert isinstance(build, messages.Build)
    args = EngineArgs(**build.arguments | own_arguments)
    opened = open_model(args)
    channel.send(messages.Found(facts_of_model(opened.path, args)))
    mesh = opened.make_mesh(args)
    loaded = opened.load(args, [mesh], progress)
    signs_of_life.start()
    channel.send(messages.Loaded(available_bytes(mesh)))
    allocate = orders.next()
    assert isinstance(allocate, messages.Allocate)
    plan = plan_kv_caches(loaded.model, loaded.vllm_config, mesh, allocate.cache_bytes)
    progress.note(f"host {place.rank} of {place.num_hosts} is ready")
    return Executor(loaded.vllm_config, loaded.model, mesh, plan, on_compile=loaded.on_compile)


class _Calls:
    """Makes the leader's calls, in order.

    Args:
      executor: This host's.
      channel: To the leader.
      signs_of_life: Counts the calls.
    """

    def __init__(self, executor: Executor, channel: Channel[Order], signs_of_life: _SignsOfLife) -> None:
        self._executor, self._channel, self._signs_of_life = executor, channel, signs_of_life
        self._keys: dict[int, Hashable] = {}
        self._vectors = ReceivedVectors()
        self._sampled: SamplerOutput | None = None

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
            case messages.Sample():
                sent = order.parameters
                parameters = None if sent is None else self._vectors.decode(order.number, sent)
                self._wait_for_the_step_before(executor.sample(self._key(order.number), parameters))
            case messages.GreedyStep():
                packed = self._vectors.decode(order.number, order.packed)
                self._wait_for_the_step_before(executor.greedy_step(self._key(order.number), packed))
            case messages.Whole():
                executor.whole(self._key(order.number), vector(order.input_ids), order.num_tokens)
            case messages.Logits():
                targets = None if order.targets is None else vector(order.targets)
                executor.logits(self._key(order.number), vector(order.rows), targets)
            case messages.Recover():
                self._sampled = None
                executor.recover()
            case _:
                raise EngineError(f"the leader sent {type(order).__name__} to a host that is built")

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

    def _wait_for_the_step_before(self, sampled: SamplerOutput) -> None:
        """Has a fault of the devices come out one step later, not never."""
        before, self._sampled = self._sampled, sampled
        if before is not None:
            jax.block_until_ready(before)


def _end_with_the_leader() -> None:
    """The first signal to end waits for the leader, which may be finishing its requests; a second one does not."""

    def wait(number: int, frame: object) -> None:
        del frame
        _logger.warning("this host ends when its leader does; once more ends it, and the group, at once")
        signal.signal(number, lambda *_: os._exit(1))

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, wait)
