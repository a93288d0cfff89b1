from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding

from jaxis.engine.execution.programs import enable_disk_cache
from jaxis.errors import ConfigError, EngineError
from jaxis.host.progress import ProgressDisplay
from jaxis.models.written_template import write_template
from jaxis.parallel.mesh import put
from jaxis.training.base_model import BaseModel, open_base_model
from jaxis.training.batch_source import StepContext
from jaxis.training.best_step import BestStep
from jaxis.training.checkpoint import RunState, checkpoint_folder, find_checkpoints, load_checkpoint, save_checkpoint
from jaxis.training.config import TrainConfig, TrainingParams
from jaxis.training.data import Split, load_split, num_steps
from jaxis.training.evaluation import AnswerScores, held_out_loss
from jaxis.training.export import placed_into
from jaxis.training.meter import Meter
from jaxis.training.methods import TrainingData, load_data, make_objective
from jaxis.training.optimizer import make_optimizer, make_schedule
from jaxis.training.run_log import RunLog
from jaxis.training.step import Evaluate, Trained, begin, make_evaluation, make_step
from jaxis.training.stop_signals import stop_signals
from jaxis.training.trainable import Trainable, make_trainable, router_coefficient

# Settings that do not change the results of a step.
_FREE_TO_CHANGE = frozenset(
    {
        *("output_dir", "save_steps", "save_final_model", "logging_steps", "eval_strategy", "eval_steps"),
        *("per_device_eval_batch_size", "resume_from_checkpoint", "try_resume_from_last_checkpoint"),
        *("enable_gradient_checkpointing", "enable_tensorboard", "logging_dir", "metrics_function"),
        # grpo is here because its fields are a section of their own.
        *("grpo", "log_completions", "vocab_mismatch_positions", "peft_save_mode"),
        *TrainingParams.WITHOUT_EFFECT,
    }
)


@dataclass(frozen=True)
class TrainingResult:
    """Outcome of a run.

    Attributes:
      step, num_steps: Number of steps done, and of the whole training.
      output: Folder of the run.
      stopped_by: Signal that stopped the run early; None: it finished.
      checkpoint: Checkpoint to resume from, if the run was stopped.
    """

    step: int
    num_steps: int
    output: Path
    stopped_by: int | None = None
    checkpoint: Path | None = None


class Trainer:
    """A run whose data has been read and checked, and whose model has been found, but not loaded.

    Attributes:
      base: The model before training.
      data: Training data.
      validation: Data for the held-out loss; None: no evaluation.

    Raises:
      ConfigError, CheckpointError: The configuration cannot be honoured, or a data row cannot be learned.
    """

    def __init__(self, config: TrainConfig, note: Callable[[str], None]) -> None:
        self._config, self._note = config, note
        for line in config.notes():
            note(line)
        self.base: BaseModel = open_base_model(config)
        self.data: TrainingData = load_data(config, self.base)
        self.validation: Split | None = None
        if config.training.eval_strategy != "no":
            self.validation = load_split(config, config.data.validation, self.base, is_validation=True)
        for line in self.data.notes:
            note(line)
        self._num_steps = num_steps(config, self.data.source.steps_per_epoch)
        self._output = Path(config.training.output_dir)
        self._resumed = self._find_checkpoint()

    def run(self, progress: ProgressDisplay) -> TrainingResult:
        """Trains to the end, or until SIGTERM or Ctrl-C; a stopped run saves a checkpoint.

        Raises EngineError if the loss is not finite, and CheckpointError if a file cannot be written.
        """
        enable_disk_cache()
        scores = None
        if self.validation is not None and self._config.training.metrics_function is not None:
            scores = AnswerScores(self._config, self.base, self.validation, progress)
        run = TrainingRun(self._config, self.base, self.data, self.validation, scores, self._num_steps, self._note)
        return run.run(self._resumed, progress)

    def _find_checkpoint(self) -> Path | None:
        training = self._config.training
        if training.resume_from_checkpoint is not None:
            return Path(training.resume_from_checkpoint)
        found = find_checkpoints(self._output)
        if not found:
            return None
        if not training.try_resume_from_last_checkpoint:
            raise ConfigError(
                f"{self._output} has {found[-1][1].name} of an earlier run: set "
                "training.try_resume_from_last_checkpoint=true to go on from it, or another training.output_dir"
            )
        return found[-1][1]


class TrainingRun:
    """Steps of a training from a checkpoint, or the start, to the last.

    Args:
      config: Arguments of the training.
      base: The model to train.
      data: Examples.
      validation: Examples to evaluate on; None: none.
      scores: Metrics of generated answers; None: none.
      total: Number of steps.
      note: Called with messages to the user.
    """

    def __init__(
        self,
        config: TrainConfig,
        base: BaseModel,
        data: TrainingData,
        validation: Split | None,
        scores: AnswerScores | None,
        total: int,
        note: Callable[[str], None],
    ) -> None:
        self._config, self._base, self._data, self._validation = config, base, data, validation
        self._total, self._note = total, note
        self._params = config.training
        self._output = Path(config.training.output_dir)
        self._scores, self._best = scores, None
        if (metric := self._params.best_metric) is not None:
            self._best = BestStep(metric, self._params.is_greater_better)
        self._schedule = make_schedule(self._params, total)

    def run(self, resumed: Path | None, progress: ProgressDisplay) -> TrainingResult:
        """Trains.

        Args:
          resumed: Checkpoint to go on from; None: from the start.
          progress: Display.
        """
        model = make_trainable(self._config, self._base, progress)
        optimizer = make_optimizer(self._params, self._schedule, model.logical_axes)
        trained, state, first = self._start(model, optimizer, resumed)
        if first:
            model.refresh_frozen(trained)
        objective = make_objective(self._params)
        step_function = make_step(
            model.forward(is_training=True),
            objective,
            model.combine,
            optimizer,
            self._params.max_grad_norm,
            model.placement,
            router_coefficient(self._config, self._base),
        )
        evaluate = make_evaluation(model.forward(is_training=False), objective, model.combine, model.placement)
        key = jax.random.key(self._params.seed)
        log = RunLog(self._params, first)
        meter = Meter(self._total)
        try:
            with stop_signals() as stopped, progress.counting("Training") as update:
                for step in range(first, self._total):
                    here = functools.partial(model.bind, trained)
                    batch, drawn = self._data.source.draw(StepContext(step, here, log.write_answer, progress))
                    trained, state, reported = step_function(
                        trained, model.frozen, state, batch, jax.random.fold_in(key, step)
                    )
                    model.refresh_frozen(trained)
                    values = {name: float(reported[name]) for name in ("loss", *sorted(reported.keys() - {"loss"}))}
                    values |= drawn
                    done = step + 1
                    self._check_finite(done, values)
                    self._data.source.check(done, values)
                    learned, num_tokens = int(np.sum(batch.learned)), int(np.sum(batch.seq_lens))
                    line = {"step": done, **values, "learned_tokens": learned, "lr": float(self._schedule(step))}
                    log.write(line | meter.add(num_tokens))
                    update(done, self._total)
                    if done % self._params.logging_steps == 0 or done == self._total:
                        shown = (f"  {name} {line[name]:.4g}" for name in self._data.source.shown)
                        self._note(meter.line(line) + "".join(shown))
                    is_best = self._is_time_to_evaluate(done) and self._evaluate(evaluate, trained, model, done, log)
                    is_last = done == self._total
                    if stopped() is not None and not is_last:
                        folder = self.save(done, trained, state)
                        return TrainingResult(done, self._total, self._output, stopped(), folder)
                    if is_best or (self._params.save_steps and done % self._params.save_steps == 0):
                        self.save(done, trained, state)
        finally:
            log.close()
            self._data.source.close()
            if self._scores is not None:
                self._scores.close()
        for line in self._data.source.summary():
            self._note(line)
        if self._params.save_final_model:
            self._write(model, self._finished(trained))
        return TrainingResult(self._total, self._total, self._output)

    def _start(
        self, model: Trainable, optimizer: optax.GradientTransformation, resumed: Path | None
    ) -> tuple[Trained, Any, int]:
        """Returns the trained arrays, the optimizer's state and the number of the first step."""
        initial, state = begin(model.initial, model.frozen, optimizer)
        if resumed is None:
            return initial, state, 0
        run_state, arrays = load_checkpoint(resumed)
        run_state.check_settings(self._settings(), resumed)
        if run_state.software != _software():
            self._note(f"{resumed} was made with other software or threads: the last bits of the loss may differ")
        if self._best is not None:
            self._best.restore(run_state.best)
        trained = {name: _placed_as(array, arrays[f"weights.{name}"]) for name, array in initial.items()}
        leaves, treedef = jax.tree.flatten(state)
        state = jax.tree.unflatten(
            treedef, [_placed_as(leaf, arrays[f"optimizer.{i}"]) for i, leaf in enumerate(leaves)]
        )
        self._note(f"going on from {resumed}, step {run_state.step} of {self._total}")
        return trained, state, run_state.step

    def save(self, step: int, trained: Trained, state: Any) -> Path:
        """Writes a checkpoint.

        Args:
          step: Number of steps done.
          trained: Weights.
          state: State of the optimizer.

        Returns:
          The checkpoint's folder.
        """
        arrays = {f"weights.{name}": np.asarray(value) for name, value in trained.items()}
        arrays |= {f"optimizer.{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(state))}
        best = {} if self._best is None else self._best.state()
        run_state = RunState(step, self._settings(), _software(), best)
        return save_checkpoint(self._output, run_state, arrays, self._params.save_total_limit)

    def _write(self, model: Trainable, trained: Mapping[str, jax.Array | np.ndarray]) -> None:
        with placed_into(self._output) as folder:
            model.write(folder, {name: np.asarray(value) for name, value in trained.items()})
            is_given = self._config.model.chat_template is not None
            write_template(folder, self._base.tokenizer.default_chat_template if is_given else None)

    def _is_time_to_evaluate(self, step: int) -> bool:
        if self._validation is None:
            return False
        every = self._data.source.steps_per_epoch if self._params.eval_strategy == "epoch" else self._params.eval_steps
        return step % every == 0 or step == self._total

    def _evaluate(self, evaluate: Evaluate, trained: Trained, model: Trainable, step: int, log: RunLog) -> bool:
        """Measures the held-out rows; returns whether this step is the best so far."""
        assert self._validation is not None
        measured = held_out_loss(evaluate, trained, model.frozen, self._validation)
        said = f"step {step}  held-out loss {measured['eval_loss']:.4f}"
        if self._scores is not None:
            scored = self._scores.measure(model.bind(trained), step, log.write_answer)
            said += "".join(f"  {name.removeprefix('eval_')} {value:.4f}" for name, value in scored.items())
            measured |= scored
        self._note(said)
        log.write({"step": step, **measured})
        return self._best is not None and self._best.improves(step, measured)

    def _finished(self, trained: Trained) -> Mapping[str, jax.Array | np.ndarray]:
        """Returns the trained arrays of the step whose model is exported."""
        best = self._best
        if best is None or best.step is None or not self._params.loads_best:
            return trained
        self._note(f"the model is that of step {best.step}, whose {best.metric} of {best.value:.4f} is the best")
        if best.step == self._total:
            return trained
        _, arrays = load_checkpoint(checkpoint_folder(self._output, best.step))
        return {name: arrays[f"weights.{name}"] for name in trained}

    def _check_finite(self, step: int, values: Mapping[str, float]) -> None:
        if math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"]):
            return
        last = find_checkpoints(self._output)
        good = f"the last good checkpoint is {last[-1][1]}" if last else "there is no checkpoint yet"
        raise EngineError(
            f"step {step}: the loss is {values['loss']}, and the norm of its gradient {values['grad_norm']}; {good}: "
            "lower training.learning_rate, or look at the rows of this step"
        )

    def _settings(self) -> dict[str, Any]:
        """Returns the settings that must not change when the run resumes, by configuration name."""
        found: dict[str, Any] = {}
        sections = {
            **{"training": self._params, "training.grpo": self._params.grpo},
            **{"peft": self._config.peft, "model": self._config.model},
        }
        for section, group in sections.items():
            for field in dataclasses.fields(group):
                if field.name not in _FREE_TO_CHANGE:
                    found[f"{section}.{field.name}"] = getattr(group, field.name)
        found["training.trainer_kwargs"] = {
            name: value for name, value in self._params.trainer_kwargs.items() if name != "save_total_limit"
        }
        rows = found.pop("training.per_device_train_batch_size") * self._base.devices.num_devices
        found["training.per_device_train_batch_size times the number of devices"] = rows
        for field in dataclasses.fields(self._config.data.train):
            if field.name != "datasets":
                found[f"data.train.{field.name}"] = getattr(self._config.data.train, field.name)
        for number, dataset in enumerate(self._config.data.train.datasets):
            for field in dataclasses.fields(dataset):
                if field.name not in dataset.WITHOUT_EFFECT:
                    found[f"data.train.datasets[{number}].{field.name}"] = getattr(dataset, field.name)
        found["the number of steps (training.max_steps, or training.num_train_epochs and the rows)"] = self._total
        for path, digest in self._data.digests.items():
            found[f"the contents of {path}"] = digest
        return {name: _plain(value) for name, value in found.items()}


def _placed_as(like: jax.Array, array: np.ndarray) -> jax.Array:
    return put(array, like.sharding) if isinstance(like.sharding, NamedSharding) else jnp.asarray(array)


def _plain(value: Any) -> Any:
    """Returns a value as it is after a round trip through JSON."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _software() -> dict[str, Any]:
    return {"jax": version("jax"), "jaxlib": version("jaxlib"), "threads": len(os.sched_getaffinity(0))}
