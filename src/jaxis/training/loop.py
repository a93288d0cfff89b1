"""The training loop, the same for every kind of training: draw, step, log, evaluate, save."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from jaxis.host.progress import ProgressDisplay
from jaxis.training.batch_source import BatchSource, StepContext
from jaxis.training.checkpoint import TrainState
from jaxis.training.evaluation import HeldOutEvaluation
from jaxis.training.resume import Checkpoints
from jaxis.training.run_log import RunLog
from jaxis.training.step import StepFunction
from jaxis.training.step_profiler import StepProfiler
from jaxis.training.stop_signals import stop_signals
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
