"""Set-up of a training run: reads its configuration, data and model, and puts the parts of the loop together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from jaxis.engine.execution.program_files import enable_disk_cache
from jaxis.engine.fingerprint import checkpoint_digest
from jaxis.errors import ConfigError
from jaxis.host.dotted_names import by_dotted_name
from jaxis.host.progress import ProgressDisplay
from jaxis.models.written_template import write_template
from jaxis.parallel.distributed import meet
from jaxis.training.answers import AnswerScores
from jaxis.training.base_model import BaseModel, open_base_model
from jaxis.training.checkpoint import (
    ARRAYS,
    BestStep,
    Checkpoints,
    TrainState,
    check_is_shared,
    checkpoint_folder,
    find_resumed,
    settings_of,
)
from jaxis.training.config import TrainConfig
from jaxis.training.config.methods import PreferenceKwargs
from jaxis.training.config.training import DISTILLATION
from jaxis.training.config.training import DPO as DPO_TYPE
from jaxis.training.config.training import GRPO as GRPO_TYPE
from jaxis.training.config.training import SFT as SFT_TYPE
from jaxis.training.data import BatchSource, GivenBatches, Split, load_split, num_steps
from jaxis.training.divergence import distillation_of
from jaxis.training.forward_pass import choose_forward_pass
from jaxis.training.functional_model import Values
from jaxis.training.loop import HeldOutEvaluation, TrainingLoop
from jaxis.training.objectives import DPO, CrossEntropy, Objective, grpo_of
from jaxis.training.optimizer import make_optimizer, make_schedule
from jaxis.training.rollouts import Rollouts
from jaxis.training.run_log import RunLog, Speedometer, StepProfiler, product_rate
from jaxis.training.step import begin, make_step
from jaxis.training.stored_arrays import read_arrays
from jaxis.training.streamed_rows import StreamedBatches
from jaxis.training.student_answers import load_distillation, load_held_out
from jaxis.training.teacher import open_teacher
from jaxis.training.trainable import Trainable, make_trainable, router_coefficient
from jaxis.training.written_folder import placed_into


class Method:
    """A method of training for one run: fine-tuning, and the base of the others."""

    def __init__(self, config: TrainConfig, base: BaseModel) -> None:
        self._config, self._base = config, base

    def data(self) -> BatchSource:
        """Reads the files of the run and checks all of their data rows; of streamed ones, those of the first step.

        Raises ConfigError, which names the file and row, if a file cannot be read, or a row cannot be learned.
        """
        if self._config.data.train.stream:
            return StreamedBatches(self._config, self._base)
        return GivenBatches(load_split(self._config, self._config.data.train, self._base))

    def validation(self) -> Split:
        """Reads the files of held-out rows; raises ConfigError as `data` does."""
        return load_split(self._config, self._config.data.validation, self._base, is_validation=True)

    def objective(self, progress: ProgressDisplay) -> tuple[Objective, Values]:
        """Returns the objective, and weights of its own that a step must find in `frozen`."""
        del progress
        return CrossEntropy(), {}


class _Preferences(Method):
    def objective(self, progress: ProgressDisplay) -> tuple[Objective, Values]:
        del progress
        kwargs = self._config.training.kwargs
        assert isinstance(kwargs, PreferenceKwargs)
        return DPO(kwargs.beta, kwargs.label_smoothing, kwargs.loss_type), {}


class _Rewards(Method):
    def data(self) -> BatchSource:
        return Rollouts(self._config, self._base)

    def objective(self, progress: ProgressDisplay) -> tuple[Objective, Values]:
        del progress
        return grpo_of(self._config.training), {}


class _Distillation(Method):
    def __init__(self, config: TrainConfig, base: BaseModel) -> None:
        super().__init__(config, base)
        self._teacher = open_teacher(config, base)

    def data(self) -> BatchSource:
        return load_distillation(self._config, self._base)

    def validation(self) -> Split:
        return load_held_out(self._config, self._base)

    def objective(self, progress: ProgressDisplay) -> tuple[Objective, Values]:
        return distillation_of(self._config, self._base, self._teacher, progress)


def method_of(config: TrainConfig, base: BaseModel) -> Method:
    """Makes the method of a run. Raises ConfigError if another model that it needs cannot be used."""
    return METHODS[config.training.trainer_type](config, base)


METHODS: Mapping[str, type[Method]] = {
    SFT_TYPE: Method,
    DPO_TYPE: _Preferences,
    GRPO_TYPE: _Rewards,
    DISTILLATION: _Distillation,
}


@dataclass(frozen=True)
class CheckedRun:
    """The facts of a run that has been checked.

    Attributes:
      num_steps: Number of steps of the whole training.
      num_rows, num_validation_rows: Number of data rows, for training and for the held-out loss.
      num_examples, num_tokens, num_learned: Number of examples, of their tokens, and of those that are learned; 0 if
        examples are generated during training.
    """

    model: str
    output_dir: str
    num_steps: int
    num_rows: int
    num_validation_rows: int
    num_examples: int
    num_tokens: int
    num_learned: int


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
        self._note = note
        for line in config.notes():
            note(line)
        _check_hosts(config)
        self.base: BaseModel = open_base_model(config)
        config, said = choose_forward_pass(config, self.base)
        if said is not None:
            note(said)
        self._config, self._method = config, method_of(config, self.base)
        self.data: BatchSource = self._method.data()
        self.validation: Split | None = None
        if config.training.eval_strategy != "no":
            self.validation = self._method.validation()
        for line in self.data.notes:
            note(line)
        self._num_steps = num_steps(config, self.data.steps_per_epoch)
        self._output = Path(config.training.output_dir)
        self._resumed = find_resumed(config.training)

    def facts(self) -> dict[str, str]:
        """Returns what must be equal on all hosts that share the training, by name."""
        facts = {name: repr(value) for name, value in by_dotted_name(dataclasses.asdict(self._config))}
        facts |= {f"the contents of {path}": digest for path, digest in self.data.digests.items()}
        facts["the digest of the model's files"] = checkpoint_digest(self.base.path)
        facts["the checkpoint to go on from"] = str(self._resumed)
        facts["the number of devices"] = str(jax.local_device_count())
        return facts

    def checked(self) -> CheckedRun:
        examples = self.data.examples
        return CheckedRun(
            model=str(self.base.path),
            output_dir=str(self._output),
            num_steps=self._num_steps,
            num_rows=self.data.num_rows,
            num_validation_rows=0 if self.validation is None else len(self.validation.rows),
            num_examples=len(examples),
            num_tokens=sum(len(example.ids) for example in examples),
            num_learned=sum(example.num_learned for example in examples),
        )

    def run(self, progress: ProgressDisplay) -> TrainingResult:
        """Trains to the end, or until SIGTERM or Ctrl-C; a stopped run saves a checkpoint.

        Raises EngineError if the loss is not finite, and CheckpointError if a file cannot be written.
        """
        enable_disk_cache()
        if jax.process_count() > 1:
            meet(self.base.devices.mesh)
            check_is_shared(self._output)
        params, source, total = self._config.training, self.data, self._num_steps
        with ExitStack() as open_parts:
            open_parts.callback(source.close)
            scores = None
            if self.validation is not None and params.metrics_function is not None:
                scores = AnswerScores(self._config, self.base, self.validation.rows, progress)
                open_parts.callback(scores.close)
            limit = product_rate(self.base.compute_dtype, self.base.devices.num_devices)  # before the weights are there
            model = make_trainable(self._config, self.base, progress)
            objective, weights = self._method.objective(progress)
            model.frozen = {**model.frozen, **weights}
            schedule = make_schedule(params, total)
            evaluation = HeldOutEvaluation(
                params, model, objective, self.validation, scores, source.steps_per_epoch, total
            )
            settings = settings_of(self._config, self.base.devices.num_ranks, total, self.data.digests)
            checkpoints = Checkpoints(params, settings, evaluation.best, source)
            optimizer = make_optimizer(params, schedule, model.logical_axes)
            state = TrainState(0, *begin(model.initial, model.frozen, optimizer))
            model.initial = {}  # a resumed run has other arrays
            if self._resumed is not None:
                state = checkpoints.restore(self._resumed, state, self._note)
                model.refresh_frozen(state.trained)
                self._note(f"going on from {self._resumed}, step {state.step} of {total}")
            step = make_step(
                model.forward(is_training=True),
                objective,
                model.combine,
                optimizer,
                params.max_grad_norm,
                model.placement,
                router_coefficient(self._config, self.base),
                (state.trained, state.moments),
            )
            speedometer = Speedometer(model.cost, limit)
            log = RunLog(params, state.step, total, schedule, source.shown, speedometer, self._note)
            open_parts.enter_context(closing(log))
            profiler = open_parts.enter_context(closing(StepProfiler(params)))
            key = jax.random.key(params.seed)
            loop = TrainingLoop(model, source, step, log, evaluation, checkpoints, profiler, key, total)
            state, stop = loop.run(state, progress)
        if stop is not None:
            return TrainingResult(state.step, total, self._output, stop.signal, stop.checkpoint)
        for line in source.summary():
            self._note(line)
        if params.save_final_model:
            self._write(model, self._finished(state.trained, evaluation.best))
        return TrainingResult(total, total, self._output)

    def _finished(
        self, trained: Mapping[str, jax.Array], best: BestStep | None
    ) -> Mapping[str, jax.Array | np.ndarray]:
        """Returns the trained arrays of the step whose model is written."""
        if best is None or best.step is None or not self._config.training.kwargs.load_best_model_at_end:
            return trained
        self._note(f"the model is that of step {best.step}, whose {best.metric} of {best.value:.4f} is the best")
        if best.step == self._num_steps:
            return trained
        folder = checkpoint_folder(self._output, best.step)
        if self._resumed is not None and not folder.exists():  # from before the run went on in another folder
            folder = checkpoint_folder(self._resumed.parent, best.step)
        return read_arrays(folder / ARRAYS, {"weights": trained})["weights"]

    def _write(self, model: Trainable, trained: Mapping[str, jax.Array | np.ndarray]) -> None:
        arrays = {name: self.base.devices.on_host(value) for name, value in trained.items()}
        if jax.process_index() > 0:
            return
        with placed_into(self._output) as folder:
            model.write(folder, arrays)
            is_given = self._config.model.chat_template is not None
            write_template(folder, self.base.tokenizer.default_chat_template if is_given else None)


def _check_hosts(config: TrainConfig) -> None:
    """Raises ConfigError if several hosts cannot share such a training."""
    if jax.process_count() == 1:
        return
    kind, scores = config.training.trainer_type, config.training.metrics_function
    if kind in (GRPO_TYPE, DISTILLATION):
        raise ConfigError(f"training.trainer_type={kind} cannot be honoured on several hosts: train on one")
    if scores is not None:
        raise ConfigError(f"training.metrics_function={scores!r} cannot be honoured on several hosts: leave it out")
    if not config.fsdp.enable_fsdp:
        raise ConfigError("fsdp.enable_fsdp=false cannot be honoured on several hosts: set it")
