"""The training loop, the same for every kind of training: draw, step, log, evaluate, save; and its evaluation."""

from __future__ import annotations

import functools
import math
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import jax
import numpy as np

from jaxis.host.progress import ProgressDisplay
from jaxis.parallel.distributed import largest
from jaxis.training.answers import AnswerScores
from jaxis.training.checkpoint import BestStep, Checkpoints, TrainState
from jaxis.training.config.training import TrainingParams
from jaxis.training.data import BatchSource, Split, StepContext
from jaxis.training.objectives import Objective
from jaxis.training.run_log import RunLog, StepProfiler
from jaxis.training.step import StepFunction, make_evaluation
from jaxis.training.trainable import Trainable


@dataclass(frozen=True)
class Stop:
    """An early end of a training: the signal that asked for it, and the checkpoint to resume from."""

    signal: int
    checkpoint: Path


@dataclass(frozen=True)
class TrainingLoop:
    """The parts of a training that the loop calls.

    Attributes:
      key: Random key of the run.
      num_steps: Number of steps of the whole training.
    """

    model: Trainable
    source: BatchSource
    step: StepFunction
    log: RunLog
    evaluation: HeldOutEvaluation
    checkpoints: Checkpoints
    profiler: StepProfiler
    key: jax.Array
    num_steps: int

    def run(self, state: TrainState, progress: ProgressDisplay) -> tuple[TrainState, Stop | None]:
        """Trains from a state to the last step, or until SIGTERM or Ctrl-C; then saves a checkpoint.

        Raises EngineError if the loss is not finite, and CheckpointError if a file cannot be written.
        """
        model, source, log = self.model, self.source, self.log
        with stop_signals() as stopped, progress.counting("Training") as show:
            while state.step < self.num_steps:
                self.profiler.before_step()

                # Draw a batch: from files, or from answers of the model as it is now.
                current = functools.partial(model.bind, state.trained)
                batch, drawn = source.draw(StepContext(state.step, current, log.write_answer, progress))

                # Update the weights.
                key = jax.random.fold_in(self.key, state.step)
                trained, moments, reported = self.step(state.trained, model.frozen, state.moments, batch, key)
                model.refresh_frozen(trained)
                state = TrainState(state.step + 1, trained, moments)

                # Log the step, unless its values must end the run.
                names = ("loss", *sorted(reported.keys() - {"loss"}))
                values = {**{name: float(reported[name]) for name in names}, **drawn}
                self.checkpoints.check_finite(state.step, values)
                source.check(state.step, values)
                log.write_step(state.step, values, int(np.sum(batch.learned)), int(np.sum(batch.seq_lens)))
                show(state.step, self.num_steps)

                # Evaluate held-out rows.
                is_best = self.evaluation.is_due(state.step) and self.evaluation.measure(state, log)

                # Save a checkpoint.
                if self.checkpoints.can_resume_at(state.step):
                    if (signal := stopped()) is not None and state.step < self.num_steps:
                        return state, Stop(signal, self.checkpoints.save(state))
                    if is_best or self.checkpoints.is_due(state.step):
                        self.checkpoints.save(state)
        return state, None


@contextmanager
def stop_signals() -> Iterator[Callable[[], int | None]]:
    """Holds back SIGTERM and Ctrl-C until a run can stop; a second signal has its usual effect.

    Yields a function that returns the number of the received signal, or None; one on any host counts for all.
    """
    received: list[int] = []

    def received_somewhere() -> int | None:
        return largest(received[0] if received else 0) or None

    if threading.current_thread() is not threading.main_thread():
        yield received_somewhere
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def receive(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        signal.signal(number, previous[signal.Signals(number)])

    for number in previous:
        signal.signal(number, receive)
    try:
        yield received_somewhere
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


Measured = dict[str, float]


class HeldOutEvaluation:
    """Evaluation of held-out rows at the configured steps of a training.

    Args:
      params: Arguments of the training.
      validation: Held-out examples; None: no evaluation.
      scores: Scores of generated answers; None: none.
      steps_per_epoch, num_steps: Number of steps of an epoch of training data, and of the whole training.

    Attributes:
      best: Best step so far; None: none is tracked.
    """

    def __init__(
        self,
        params: TrainingParams,
        model: Trainable,
        objective: Objective,
        validation: Split | None,
        scores: AnswerScores | None,
        steps_per_epoch: int,
        num_steps: int,
    ) -> None:
        self._model, self._validation, self._scores = model, validation, scores
        self._every = steps_per_epoch if params.eval_strategy == "epoch" else params.eval_steps
        self._num_steps = num_steps
        self.best: BestStep | None = None
        if (metric := params.best_metric) is not None:
            self.best = BestStep(metric, params.is_greater_better)
        self._evaluate = make_evaluation(model.forward(is_training=False), objective, model.combine, model.placement)

    def is_due(self, step: int) -> bool:
        """Returns whether the model is evaluated after so many steps."""
        return self._validation is not None and (step % self._every == 0 or step == self._num_steps)

    def measure(self, state: TrainState, log: RunLog) -> bool:
        """Measures and logs the held-out rows; returns whether this step is the best so far."""
        measured = self._held_out_loss(state)
        said = f"step {state.step}  held-out loss {measured['eval_loss']:.4f}"
        if self._scores is not None:
            scored = self._scores.measure(self._model.bind(state.trained), state.step, log.write_answer)
            said += "".join(f"  {name.removeprefix('eval_')} {value:.4f}" for name, value in scored.items())
            measured |= scored
        log.note(said)
        log.write({"step": state.step, **measured})
        return self.best is not None and self.best.improves(state.step, measured)

    def _held_out_loss(self, state: TrainState) -> Measured:
        """Returns the mean loss of all held-out rows and the objective's other values. Names begin with `eval_`."""
        assert self._validation is not None
        batches = self._validation.batches
        sums: dict[str, list[float]] = {}
        weights: list[float] = []
        for i in range(batches.steps_per_epoch):
            batch = self._validation.placed(batches.batch(i))
            loss, weight, reported = self._evaluate(state.trained, self._model.frozen, batch)
            weights.append(float(weight))
            for name, value in {"loss": loss, **reported}.items():
                sums.setdefault(f"eval_{name}", []).append(float(value))
        return {name: math.fsum(values) / math.fsum(weights) for name, values in sums.items()}
