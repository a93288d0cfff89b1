"""The executor of a group's leader: every call goes to the followers first, so that all hosts begin together."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, cast

import jax
import numpy as np

from jaxis.engine.execution.pipeline_executor import PipelineExecutor, StageParts
from jaxis.engine.execution.programs import Program
from jaxis.engine.execution.sampler import SamplerOutput
from jaxis.engine.execution.step_programs import ForwardKey, GreedyStepKey, LogitsKey, SampleKey, WholeKey
from jaxis.engine.execution.token_logprobs import TokenLogprobs
from jaxis.engine.hosts import messages
from jaxis.engine.hosts.expected import ExpectedResult
from jaxis.engine.hosts.followers import Followers, end_process
from jaxis.engine.hosts.vectors import SentVectors
from jaxis.errors import EngineError
from jaxis.parallel import distributed

if TYPE_CHECKING:
    from jaxis.config import VllmConfig

# Between processes, devices that wait for one that has ended say so at once. Where they do not, waiting is ended.
STUCK_SECONDS = 5.0
LOSS_SECONDS = 1.0


class LeadingExecutor(PipelineExecutor):
    """A `PipelineExecutor`, of one stage or several, whose calls several hosts make.

    A program is used once all hosts have compiled it: one that came late would keep the others waiting in the middle
    of a step, for which devices have limits of their own.

    Attributes:
      followers: The other hosts.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        stages: Sequence[StageParts],
        meshes: Sequence[jax.sharding.Mesh],
        *,
        on_compile: Callable[[Hashable], AbstractContextManager[None]],
        followers: Followers,
    ) -> None:
        """See `PipelineExecutor`; the followers have been told the size of the caches."""
        self.followers = followers
        self._numbers: dict[Hashable, int] = {}
        self._vectors = SentVectors()
        self._is_half_made = False  # whether a call was sent that failed here
        super().__init__(vllm_config, stages, meshes, on_compile=on_compile)
        followers.on_lost = self._end_if_stuck

    def on_lost(self, callback: Callable[[EngineError], None], stall_seconds: float) -> None:
        """See `Executor.on_lost`."""
        self.followers.on_lost = callback
        self.followers.lost_seconds = stall_seconds

    def give_up_other_hosts(self, reason: str) -> None:
        """See `Executor.give_up_other_hosts`."""
        self.followers.give_up("; ".join([reason, *self.followers.behind]))

    @property
    def num_parameters_elsewhere(self) -> int:
        """See `Executor.num_parameters_elsewhere`."""
        return self.followers.num_parameters

    @property
    def weight_bytes_elsewhere(self) -> int:
        """See `Executor.weight_bytes_elsewhere`."""
        return self.followers.weight_bytes

    @property
    def silent_hosts(self) -> Sequence[str]:
        """See `Executor.silent_hosts`."""
        return self.followers.silent

    def forward(self, key: ForwardKey, packed: np.ndarray) -> None:
        """See `Executor.forward`."""
        number = self._number(key)
        with self._sent(messages.Forward(number, self._vectors.encode(number, packed))):
            super().forward(key, packed)

    def sample(self, key: SampleKey, parameters: np.ndarray | None) -> SamplerOutput:
        """See `Executor.sample`."""
        number = self._number(key)
        vector = None if parameters is None else self._vectors.encode(number, parameters)
        message = messages.Sample(number, vector)
        if not self.stage.is_last:
            expected = self._expected(message)
            has_logprobs = key.features.num_logprobs is not None
            logprobs = TokenLogprobs(*map(expected.array, range(1, 5))) if has_logprobs else None
            return cast(Any, SamplerOutput)(expected.array(0), logprobs)
        with self._sent(message):
            return super().sample(key, parameters)

    def greedy_step(self, key: GreedyStepKey, packed: np.ndarray) -> SamplerOutput:
        """See `Executor.greedy_step`."""
        number = self._number(key)
        with self._sent(messages.GreedyStep(number, self._vectors.encode(number, packed))):
            return super().greedy_step(key, packed)

    def whole(self, key: WholeKey, input_ids: np.ndarray, num_tokens: int) -> None:
        """See `Executor.whole`."""
        with self._sent(messages.Whole(self._number(key), input_ids.tobytes(), num_tokens)):
            super().whole(key, input_ids, num_tokens)

    def logits(
        self, key: LogitsKey, rows: np.ndarray, targets: np.ndarray | None = None
    ) -> jax.Array | TokenLogprobs[jax.Array]:
        """See `Executor.logits`."""
        data = None if targets is None else targets.tobytes()
        message = messages.Logits(self._number(key), rows.tobytes(), data)
        if not self.stage.is_last:
            expected = self._expected(message)
            return cast(Any, TokenLogprobs(*map(expected.array, range(4))) if key.targets else expected.array(0))
        with self._sent(message):
            return super().logits(key, rows, targets)

    def recover(self) -> None:
        """See `Executor.recover`.

        Raises:
          EngineError: The group is lost: a host has ended, or what was sent to it has failed.
        """
        self.followers.check()
        reason = "a call was sent that this host did not make" if self._is_half_made else None
        try:
            # What was sent has been computed by all hosts once it has been computed here.
            jax.block_until_ready((self.caches, self.newest))
        except Exception as error:
            reason = str(error).partition("\n")[0]
        if reason is not None:
            # Devices may notice before its connection does that a host has ended.
            self.followers.wait_until_lost(LOSS_SECONDS)
            self.followers.give_up(f"a step failed: {reason}")
            self.followers.check()
        self.followers.send(messages.Recover())
        super().recover()

    def end_other_hosts(self) -> None:
        """See `Executor.end_other_hosts`."""
        self.programs.close()  # those that are compiled now, the followers have yet to tell of
        if self.followers.close():
            distributed.leave()
            self.followers.wait_until_ended()

    def close(self) -> None:
        """Ends the followers, and frees what this host has."""
        self.end_other_hosts()
        super().close()

    def _compile(self, key: Hashable) -> Program:
        number = self.followers.prepare(key)
        program = super()._compile(key)
        self.followers.wait_until_prepared(number)
        self._numbers[key] = number
        return program

    @contextmanager
    def _sent(self, message: messages.Call) -> Iterator[None]:
        """Sends a call, which this host makes inside."""
        self.followers.send(message)
        self._is_half_made = True
        yield
        self._is_half_made = False

    def _expected(self, message: messages.Sample | messages.Logits) -> ExpectedResult:
        """Sends a call of the last stage, which another host has; returns what it will compute."""
        expected = self.followers.expect(functools.partial(jax.block_until_ready, self.newest))
        self.followers.send(message)
        return expected

    def _number(self, key: Hashable) -> int:
        """What a program is called by; waits until all hosts have it."""
        self.followers.check()
        self.programs.get(key)
        return self._numbers[key]

    def _end_if_stuck(self, error: EngineError) -> None:
        """Ends this process if a step still waits for a lost host after a while."""

        def end() -> None:
            time.sleep(STUCK_SECONDS)
            if not all(array.is_ready() for array in jax.tree.leaves(self.newest)):
                end_process(error)

        threading.Thread(target=end, name="jaxis-end-if-stuck", daemon=True).start()
