"""The section `training`: settings of the training itself, and of the traces that it records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from jaxis.config.parameter_group import ParameterGroup, Unused, choice, number, text, whole
from jaxis.errors import ConfigError
from jaxis.training.config.methods import (
    CORRECT,
    ERROR,
    DistillationParams,
    GrpoParams,
    PreferenceKwargs,
    TrainerKwargs,
)
from jaxis.training.config.unused import PROFILER, TRAINING


@dataclass(frozen=True, kw_only=True)
class ScheduleParams(ParameterGroup):
    """Recorded steps: after `skip_first` steps, the last `active` of each cycle of `wait`, `warmup` and `active` steps.

    Attributes:
      enable_schedule: True to record the `active` steps of each cycle; False for all steps.
      repeat: Number of cycles; 0: to the end.
    """

    enable_schedule: bool = False
    wait: int = whole(0, 0)
    warmup: int = whole(1, 0)
    active: int = whole(3, 1)
    repeat: int = whole(1, 0)
    skip_first: int = whole(1, 0)

    @classmethod
    def section(cls) -> str:
        return "training.profiler.schedule"

    def records(self, number: int) -> bool:
        """Returns whether a step is recorded, by its number in this run, from 0."""
        if not self.enable_schedule:
            return True
        cycle, place = divmod(number - self.skip_first, self.wait + self.warmup + self.active)
        return cycle >= 0 and place >= self.wait + self.warmup and (not self.repeat or cycle < self.repeat)


@dataclass(frozen=True, kw_only=True)
class ProfilerParams(ParameterGroup):
    """Recording of traces by `jax.profiler`.

    Attributes:
      enable_cpu_profiling, enable_cuda_profiling: True, either of them, to record; a trace has hosts and devices.
      save_dir: Folder of the traces; None: `profiler` in `training.output_dir`.
      schedule: Steps that are recorded.
    """

    save_dir: str | None = text(None, "the path of a folder")
    enable_cpu_profiling: bool = False
    enable_cuda_profiling: bool = False
    schedule: ScheduleParams = field(default_factory=ScheduleParams)

    UNUSED: ClassVar[Mapping[str, Unused]] = PROFILER

    @classmethod
    def section(cls) -> str:
        return "training.profiler"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "schedule", ScheduleParams.of(self.schedule or {}))

    @property
    def is_on(self) -> bool:
        return self.enable_cpu_profiling or self.enable_cuda_profiling


SFT, DPO, GRPO, DISTILLATION = "TRL_SFT", "TRL_DPO", "TRL_GRPO", "TRL_DISTILLATION"
PLAIN, ENGINE = "plain", "engine"
OPTIMIZERS = {"adamw": "adamw", "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "sgd": "sgd", "muon": "muon"}
SCHEDULES = ("linear", "cosine", "constant", "constant_with_warmup")
_LARGEST = 2**31 - 1
_COMPUTE_DTYPES = {"none": None, "bf16": "bfloat16", "bfloat16": "bfloat16"}


@dataclass(frozen=True, kw_only=True)
class TrainingParams(ParameterGroup):
    """Settings of the training itself.

    Attributes:
      trainer_type: TRL_SFT learns the texts of data rows; TRL_DPO learns preferences; TRL_GRPO learns from rewards of
        sampled answers; TRL_DISTILLATION learns a teacher's distributions of next tokens.
      reward_functions: Reward functions for TRL_GRPO, such as rewards:exact, with TRL's arguments.
      grpo: Sampling of answers for TRL_GRPO.
      distillation: Teacher and divergence for TRL_DISTILLATION.
      use_peft: True to train adapters instead of all weights.
      output_dir: Folder of the finished model, checkpoints and metrics.jsonl.
      per_device_train_batch_size: Batch rows that are computed together; for TRL_DPO, pairs of batch rows.
      per_device_eval_batch_size: Batch rows or pairs that are computed together in validation.
      gradient_accumulation_steps: Number of micro-batches in a step's batch.
      max_steps: Number of steps; -1: as many as `num_train_epochs` needs.
      num_train_epochs: Number of times that each data row is used.
      save_steps: Steps between checkpoints; 0: only a stopped run saves one.
      save_final_model: True to write the model to `output_dir`.
      seed: Seed of random values in training.
      data_seed: Seed of the order of data rows.
      learning_rate: Peak of the learning rate.
      lr_scheduler_type: linear, cosine, constant or constant_with_warmup.
      warmup_ratio: Share of the steps in which the rate rises from 0; `warmup_steps` gives their number instead.
      optimizer: adamw, adamw_torch, adamw_torch_fused, sgd or muon. muon uses Muon, with updates as large as AdamW's,
        for hidden matrices and AdamW for vectors, embeddings and heads.
      weight_decay: Weight decay of matrices. Vectors have none.
      max_grad_norm: Norm to which larger gradients are scaled down; 0: no limit.
      mixed_precision_dtype: NONE, or BF16 for a forward pass in bfloat16.
      enable_gradient_checkpointing: True to recompute layers for their derivatives instead of keeping activations.
      forward_pass: engine, with the kernels that answer requests and bit for bit the same results; or plain (JAX).
        None: engine for TRL_GRPO and TRL_DISTILLATION where it is supported, else plain.
      logging_steps: Steps between printed lines; metrics.jsonl has every step.
      eval_strategy: "no", "steps" or "epoch": interval of the held-out loss of `data.validation`.
      eval_steps: Steps between evaluations.
      resume_from_checkpoint: Folder of a checkpoint to resume from.
      try_resume_from_last_checkpoint: True to resume from the last checkpoint in `output_dir`, if there is one.
      enable_tensorboard: True to also write TensorBoard's events.
      logging_dir: Folder of TensorBoard's events; None: `runs` in `output_dir`.
      enable_wandb: True to also send the values of each step to Weights & Biases, as project WANDB_PROJECT (jaxis).
      run_name: Name of the run there; None: one that wandb makes.
      profiler: Recording of traces.
      metrics_function: `module:function` that scores answers to the prompts of `data.validation` at each evaluation,
        with the arguments of TRL's reward functions. None: no answers are generated.
      trainer_kwargs: Arguments of TRL's trainers: save_total_limit, metric_for_best_model, greater_is_better,
        load_best_model_at_end, max_completion_length (tokens of an answer for `metrics_function`); for TRL_DPO, beta,
        label_smoothing and loss_type (sigmoid, hinge or ipo).
    """

    trainer_type: str = SFT
    use_peft: bool = False
    output_dir: str = text("output", "the path of a folder")
    per_device_train_batch_size: int = whole(8, 1)
    per_device_eval_batch_size: int = whole(8, 1)
    gradient_accumulation_steps: int = whole(1, 1)
    max_steps: int = whole(-1, -1)
    num_train_epochs: int = whole(3, 1)
    save_steps: int = whole(500, 0, _LARGEST)
    save_final_model: bool = True
    seed: int = whole(42, 0, _LARGEST)
    data_seed: int = whole(42, 0, _LARGEST)
    learning_rate: float = number(5e-5, 0)
    lr_scheduler_type: str = choice("linear", SCHEDULES)
    warmup_ratio: float | None = number(None, 0, 1)
    warmup_steps: int | None = whole(None, 0)
    optimizer: str = choice("adamw_torch", OPTIMIZERS)
    weight_decay: float = number(0.0, 0)
    adam_beta1: float = number(0.9, 0, 1)
    adam_beta2: float = number(0.999, 0, 1)
    adam_epsilon: float = number(1e-8, 0)
    sgd_momentum: float = number(0.0, 0, 1)
    max_grad_norm: float = number(1.0, 0)
    mixed_precision_dtype: str = "NONE"
    enable_gradient_checkpointing: bool = False
    forward_pass: str | None = choice(None, (PLAIN, ENGINE))
    logging_steps: int = whole(10, 1)
    logging_dir: str | None = text(None, "the path of a folder")
    eval_strategy: str = choice("no", ("no", "steps", "epoch"))
    eval_steps: int = whole(500, 1)
    resume_from_checkpoint: str | None = text(None, "the folder of a checkpoint")
    try_resume_from_last_checkpoint: bool = False
    trainer_kwargs: dict[str, Any] = field(default_factory=dict)
    enable_tensorboard: bool = False
    enable_wandb: bool = False
    run_name: str | None = text(None, "a string")
    profiler: ProfilerParams = field(default_factory=ProfilerParams)
    reward_functions: list[str] = field(default_factory=list)
    metrics_function: str | None = None
    grpo: GrpoParams = field(default_factory=GrpoParams)
    distillation: DistillationParams = field(default_factory=DistillationParams)

    UNUSED: ClassVar[Mapping[str, Unused]] = TRAINING

    @classmethod
    def section(cls) -> str:
        return "training"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.trainer_type not in (SFT, DPO, GRPO, DISTILLATION):
            self.refuse("trainer_type", f"supported are {SFT}, {DPO}, {GRPO} and {DISTILLATION}")
        object.__setattr__(self, "grpo", GrpoParams.of(self.grpo or {}))
        object.__setattr__(self, "distillation", DistillationParams.of(self.distillation or {}))
        object.__setattr__(self, "profiler", ProfilerParams.of(self.profiler or {}))
        self._check_rewards()
        if str(self.mixed_precision_dtype).lower() not in _COMPUTE_DTYPES:
            self.refuse("mixed_precision_dtype", "NONE or BF16")
        self._check_evaluation()

    def _check_rewards(self) -> None:
        names = self.reward_functions
        if not isinstance(names, list) or not all(isinstance(name, str) and ":" in name for name in names):
            raise ConfigError(
                f"training.reward_functions={names!r} must be a list of names such as rewards:exact, a function of "
                "rewards.py"
            )
        is_grpo = self.trainer_type == GRPO
        # An environment may reward by itself.
        if bool(names) != is_grpo and not (is_grpo and self.grpo.environment_factory):
            what = "needs" if is_grpo else "has no"
            raise ConfigError(f"training.trainer_type={self.trainer_type} {what} training.reward_functions")
        if self.trainer_type == GRPO and self.eval_strategy != "no":
            raise ConfigError("training.eval_strategy cannot be honoured with TRL_GRPO: give no")

    def _check_evaluation(self) -> None:
        function, best = self.metrics_function, self.best_metric
        if function is not None and (not isinstance(function, str) or not all(function.partition(":"))):
            raise ConfigError(f"training.metrics_function={function!r} must be module:function, such as scores:exact")
        if self.eval_strategy == "no":
            for name, value in {"metrics_function": function, "trainer_kwargs.metric_for_best_model": best}.items():
                if value is not None:
                    raise ConfigError(f"training.{name} needs training.eval_strategy: set it to steps or epoch")

    def notes(self) -> list[str]:
        return super().notes() + self.profiler.notes()

    @property
    def has_reference(self) -> bool:
        """True if the objective compares the model with itself before training."""
        is_own_teacher = self.distillation.teacher_model_name_or_path is None
        is_tied = self.trainer_type == GRPO and self.grpo.beta > 0
        return self.trainer_type == DPO or is_tied or (self.trainer_type == DISTILLATION and is_own_teacher)

    @property
    def steps_per_batch(self) -> int:
        """Number of steps that learn from the same batch."""
        return self.grpo.num_iterations if self.trainer_type == GRPO else 1

    @property
    def recomputes_layers(self) -> bool:
        """True to recompute layers for their derivatives: as asked for, or where a model is its own teacher.

        XLA rounds otherwise where it keeps activations, and the divergence of equal models would not be 0.
        """
        is_own_teacher = self.trainer_type == DISTILLATION and self.has_reference
        is_own_teacher &= self.distillation.teacher_prompt_template is None
        return self.enable_gradient_checkpointing or (is_own_teacher and self.forward_pass == PLAIN)

    @property
    def kwargs(self) -> TrainerKwargs:
        """Checked `trainer_kwargs`, with their defaults."""
        return (PreferenceKwargs if self.trainer_type == DPO else TrainerKwargs).of(self.trainer_kwargs)

    @property
    def best_metric(self) -> str | None:
        """Name of the metric that decides the best step; None: no best step is tracked."""
        metric = self.kwargs.metric_for_best_model
        if metric is None:
            return "eval_loss" if self.kwargs.load_best_model_at_end else None
        return metric if metric.startswith("eval_") else f"eval_{metric}"

    @property
    def is_greater_better(self) -> bool:
        """True if larger values of `best_metric` are better; by default, of every metric except losses."""
        given = self.kwargs.greater_is_better
        return not (self.best_metric or "").endswith("loss") if given is None else given

    @property
    def on_mismatch(self) -> str:
        """Value of `grpo.on_mismatch`, with its default applied."""
        return self.grpo.on_mismatch or (ERROR if self.forward_pass == ENGINE else CORRECT)

    @property
    def compute_dtype(self) -> str | None:
        return _COMPUTE_DTYPES[str(self.mixed_precision_dtype).lower()]
