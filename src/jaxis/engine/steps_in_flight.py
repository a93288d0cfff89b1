"""The steps that the devices compute: which of them are scheduled and dispatched before an earlier one is read.

The next step is dispatched before this one's tokens are read, so that the devices never wait for the host. If a
sequence needs its newest token to sample the next one (penalties, structured output), only the model of the next step
runs ahead: its sampler is dispatched once the tokens are read. No step runs ahead of a step with drafts. With pipeline
stages, a step of other sequences is in flight for each stage.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator

from jaxis.engine.execution.dispatched_step import DispatchedStep, ForwardedStep
from jaxis.engine.execution.runner import Runner
from jaxis.engine.scheduling.data_ranks import DataRanksScheduler
from jaxis.engine.scheduling.scheduler import Scheduler
from jaxis.engine.scheduling.scheduler_output import SchedulerOutput
from jaxis.engine.speculation import NoSpeculation
from jaxis.engine.unfinished_requests import UnfinishedRequests


class StepsInFlight:
    """The steps that were dispatched and not read, the oldest first.

    Attributes:
      speculation: Maker of drafts.
      num_preemptions: Times that a sequence lost its blocks to another.

    Args:
      runner: Runner of the steps.
      speculation: Maker of drafts.
    """

    def __init__(self, runner: Runner, speculation: NoSpeculation) -> None:
        self._runner, self.speculation = runner, speculation
        self.num_preemptions = 0

    def start_over(self, scheduler: Scheduler | DataRanksScheduler, requests: UnfinishedRequests) -> None:
        """Forgets all steps; later ones are of this scheduler and these requests."""
        self._scheduler, self._requests = scheduler, requests
        self._steps: deque[DispatchedStep] = deque()
        self._forwarded: ForwardedStep | None = None
        self._began = self._ended = 0.0
        self.speculation.reset()

    def __iter__(self) -> Iterator[DispatchedStep]:
        return iter(self._steps)

    def next(self) -> DispatchedStep | None:
        """Dispatches as many steps as can run ahead, and removes the oldest, to be read; None if there is none."""
        # A step that was dispatched ahead began when the tokens of the previous one were read.
        self._began = self._ended if self._steps else time.monotonic()
        # With several stages, one more step could only wait, and no other step could have its sequences.
        num_ahead = 1 if self._scheduler.takes_tokens_in_flight else 0
        self._forwarded = self._run_ahead(self._runner.num_stages + num_ahead)
        return self.oldest()

    def oldest(self) -> DispatchedStep | None:
        """Removes the oldest step, to be read; None if there is none."""
        return self._steps.popleft() if self._steps else None

    def go_on(self, read: DispatchedStep) -> None:
        """Dispatches what had to wait for the tokens of the step of `next`, which were applied to the requests."""
        if self._forwarded is not None:
            self._steps.append(self._forwarded.sample(self._requests.sampling))
        self._note_time(read)
        if not self._scheduler.has_unfinished:
            self.discard()
        elif self._steps:
            self._run_ahead(self._runner.num_stages)  # with one stage, its next step is in flight already

    def discard(self) -> None:
        """Removes steps whose sequences have all ended, without waiting for them."""
        while self._steps:
            output = self._steps.popleft().output
            for _ in self._scheduler.update(output, [()] * len(output.scheduled)):
                pass

    def _run_ahead(self, num_steps: int) -> ForwardedStep | None:
        """Dispatches steps until `num_steps` are in flight, or the next one depends on tokens that are not known yet.

        Returns:
          A step whose model was dispatched, and whose sampler waits for tokens in flight; None if there is none.
        """
        while len(self._steps) < num_steps:
            if self._steps and self._scheduler.takes_tokens_in_flight:
                newest = self._steps[-1].output
                if newest.has_drafts or self.speculation.wants_newest_tokens(newest, self._scheduler.num_running):
                    return None
                if any(self._requests.needs_newest_token(entry.sequence) for entry in newest.scheduled):
                    output = self._schedule()
                    return None if output is None else self._runner.forward(output)
            output = self._schedule()
            if output is None:
                return None
            self._steps.append(self._runner.dispatch(output, self._requests.sampling))
        return None

    def _schedule(self) -> SchedulerOutput | None:
        num_running = -(-self._scheduler.num_running // self._runner.num_stages)  # sequences of one stage's step
        drafts = self.speculation.propose(self._requests.sampling, num_running)
        output = self._scheduler.schedule(drafts)
        awaited, waits = self._scheduler.awaited_spans, output is None and not self._steps
        for feature in self._runner.features:
            feature.prepare(awaited, waits=waits)
        if output is not None:
            self.num_preemptions += len(output.preempted)
        return output

    def _note_time(self, step: DispatchedStep) -> None:
        """Records the end of a step, and its time unless it waited for a program to compile."""
        self._ended = time.monotonic()
        wait = self._runner.last_compile_wait
        if wait is None or wait.started < self._began:
            self.speculation.observe_time(step.output, self._ended - self._began)
