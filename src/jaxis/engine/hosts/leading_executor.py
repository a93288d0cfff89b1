"""Executor of a group's leader. It sends each call to the followers first, so that all hosts start it together."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax

from jaxis.engine.execution.executor import DeviceExecutor, Executor
from jaxis.engine.execution.kv_cache import CachePlan
from jaxis.engine.execution.program_key import Compiled, ProgramKey, RunsOn
from jaxis.engine.hosts import messages
from jaxis.engine.hosts.followers import Followers, end_process
from jaxis.engine.hosts.operands import SentOperands
from jaxis.errors import EngineError

# Time that a step may wait for a lost host. Collectives usually fail at once when another process has ended.
STUCK_SECONDS = 5.0
# Time that a failed step waits until a closed connection says which host was lost.
LOSS_SECONDS = 1.0


class LeadingExecutor:
    """An `Executor` whose calls all hosts make.

    A program runs only once all hosts have compiled it. A host that is still compiling would keep the others waiting in
    the middle of a step, and collectives have time limits of their own.

    Attributes:
      followers: The other hosts.

    Args:
      executor: Executor of this host's part of the model. The followers already know the size of the caches.
      followers: The other hosts.
    """

    def __init__(self, executor: Executor, followers: Followers) -> None:
        self.followers = followers
        self._executor = executor
        self._operands = SentOperands()
        self._is_half_made = False  # True while a call that was sent to the followers is not made here
        followers.on_lost = self._end_if_stuck

    @property
    def plan(self) -> CachePlan:
        return self._executor.plan

    @property
    def num_stages(self) -> int:
        return self._executor.num_stages

    @property
    def stages(self) -> Sequence[DeviceExecutor]:
        return self._executor.stages

    @property
    def newest(self) -> Any:
        return self._executor.newest

    def compile(self, key: ProgramKey) -> Compiled:
        """Compiles a program on all hosts; returns when all have it."""
        number = self.followers.start_compiling(key)
        program = self._executor.compile(key)
        self.followers.wait_until_compiled(number)
        return _SharedProgram(number, program)

    def run(self, key: ProgramKey, program: Compiled, *operands: Any) -> Any:
        """Calls a program on all hosts.

        If only the last stage runs the program, and it is on another host, the returned arrays wait for that host when
        they are read.

        Raises:
          EngineError: The group is lost.
        """
        assert isinstance(program, _SharedProgram)
        self.followers.check()
        message = messages.Run(program.number, self._operands.encode(program.number, operands))
        if key.runs_on is RunsOn.LAST_STAGE and not self.stages[-1].stage.is_last:
            expected = self.followers.expect(functools.partial(jax.block_until_ready, self.newest))
            self.followers.send(message)
            leaves, treedef = jax.tree.flatten(key.result_tree)
            return jax.tree.unflatten(treedef, [expected.array(index) for index in range(len(leaves))])
        with self._sent(message):
            return self._executor.run(key, program.here, *operands)

    def recover(self) -> None:
        """Recovers all hosts from a step that failed before it was sent.

        Raises:
          EngineError: The group is lost: a host has ended, or a call that was sent has failed.
        """
        self.followers.check()
        reason = "a call was sent that this host did not make" if self._is_half_made else None
        try:
            # Once the calls that were sent have been computed here, all hosts have computed them.
            jax.block_until_ready(([stage.state.caches for stage in self.stages], self.newest))
        except Exception as error:
            reason = str(error).partition("\n")[0]
        if reason is not None:
            # Devices may notice that a host has ended before the host's connection closes.
            self.followers.wait_until_lost(LOSS_SECONDS)
            self.followers.give_up(f"a step failed: {reason}")
            self.followers.check()
        self.followers.send(messages.Recover())
        self._executor.recover()

    def close(self) -> None:
        """Ends the followers, and frees this host's caches and weights."""
        self.followers.end()
        self._executor.close()

    @contextmanager
    def _sent(self, message: messages.Run) -> Iterator[None]:
        """Sends a call to the followers. The body of the `with` makes the same call on this host."""
        self.followers.send(message)
        self._is_half_made = True
        yield
        self._is_half_made = False

    def _end_if_stuck(self, error: EngineError) -> None:
        """Ends this process if a step still waits for a lost host after `STUCK_SECONDS`."""

        def end() -> None:
            time.sleep(STUCK_SECONDS)
            if not all(array.is_ready() for array in jax.tree.leaves(self.newest)):
                end_process(error)

        threading.Thread(target=end, name="jaxis-end-if-stuck", daemon=True).start()


class _SharedProgram(NamedTuple):
    """A program that all hosts have compiled, and its number in the messages."""

    number: int
    here: Compiled

    def __call__(self, *_: object) -> None:
        raise TypeError("LeadingExecutor.run calls the program on all hosts")
