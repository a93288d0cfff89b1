"""A training run as its YAML file describes it, under Oumi's names.

Each field is applied, or refused with the reason. Those that only arrange how PyTorch computes change no result: they
are accepted, and `notes` names them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from jaxis.errors import ConfigError
from jaxis.inference.model_params import ModelParams
from jaxis.inference.parameter_group import ParameterGroup

SFT, DPO = "TRL_SFT", "TRL_DPO"
DATASET_NAMES = ("text_sft", "text_sft_jsonl")
OPTIMIZERS = {"adamw": "adamw", "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "sgd": "sgd"}
SCHEDULES = ("linear", "cosine", "constant", "constant_with_warmup")
ALL_TURNS, FINAL_TURN = "all_assistant_turns", "final_assistant_turn"
_COMPUTE_DTYPES = {"none": None, "bf16": "bfloat16", "bfloat16": "bfloat16"}
_TORCH_ONLY = "it arranges how PyTorch computes"


@dataclass(frozen=True, kw_only=True)
class _Group(ParameterGroup):
    """A section of the file.

    Attributes:
      WITHOUT_EFFECT: Fields that change no result, and why.
      REFUSED: Fields that can have only their default value, and what to do instead.
    """

    WITHOUT_EFFECT: ClassVar[Mapping[str, str]] = {}
    REFUSED: ClassVar[Mapping[str, str]] = {}

    def __post_init__(self) -> None:
        for name, why in self.REFUSED.items():
            if not self._is_default(name):
                self.refuse(name, why)

    def notes(self) -> list[str]:
        return [
            f"{self.section()}.{name} has no effect: {why}"
            for name, why in self.WITHOUT_EFFECT.items()
            if not self._is_default(name)
        ]

    def check_number(self, name: str, low: float, high: float = float("inf"), *, whole: bool = False) -> None:
        """Raises ConfigError for a field that is not a number from `low` to `high`."""
        value = getattr(self, name)
        kinds = int if whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
            kind = "an integer" if whole else "a number"
            upper = f" to {high:g}" if high < float("inf") else ""
            raise ConfigError(f"{self.section()}.{name}={value!r} must be {kind} from {low:g}{upper}")

    def _is_default(self, name: str) -> bool:
        value = getattr(self, name)
        default = next(f for f in fields(self) if f.name == name)
        if default.default is not MISSING:
            return value == default.default or not value
        return not value


@dataclass(frozen=True, kw_only=True)
class TrainedModelParams(ModelParams):
    """Which model is trained. Fields as for `jaxis infer`; see `ModelParams`.

    Attributes:
      model_max_length: Most tokens of an example; what is longer is cut. None: the model's context.
      torch_dtype_str: What is computed in; what is trained is kept in float32 whatever this says. "auto" is float32 on
        CPU and the checkpoint's type elsewhere.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.adapter_model is not None:
            self.refuse("adapter_model", "adapters are trained from their start; merge it into the model first")
        if self.freeze_layers:
            self.refuse("freeze_layers", "all weights are trained, or with training.use_peft adapters alone")
        if self.tool_call_parser is not None:
            self.refuse("tool_call_parser", "it is of answers; leave it out")
        known = {"load_in_8bit", "load_in_4bit"}
        if unknown := sorted(set(self.model_kwargs) - known):
            raise ConfigError(f"model.model_kwargs.{unknown[0]} is not known; known: {', '.join(sorted(known))}")
        if self.model_max_length is not None and (
            not isinstance(self.model_max_length, int) or self.model_max_length < 2
        ):
            raise ConfigError(f"model.model_max_length={self.model_max_length!r} must be an integer from 2")


@dataclass(frozen=True, kw_only=True)
class DatasetParams(_Group):
    """A file of rows.

    Attributes:
      dataset_path: A JSONL file.
      dataset_name: text_sft or text_sft_jsonl, which say no more than the path does.
      sample_count: Rows to take, drawn by `seed` with `shuffle`, else the first; None: all.
      shuffle: Whether rows are drawn rather than taken from the beginning.
      seed: For that; None: `data.train.seed`.
    """

    dataset_path: str | None = None
    dataset_name: str | None = None
    subset: str | None = None
    split: str = "train"
    dataset_kwargs: dict[str, Any] = field(default_factory=dict)
    sample_count: int | None = None
    mixture_proportion: float | None = None
    shuffle: bool = False
    seed: int | None = None
    shuffle_buffer_size: int = 1000
    trust_remote_code: bool = False
    transform_num_workers: Any = None

    WITHOUT_EFFECT: ClassVar[Mapping[str, str]] = {
        "split": "a file has no splits",
        "shuffle_buffer_size": "all rows are shuffled",
        "trust_remote_code": "data is read, never run",
        "transform_num_workers": "rows are tokenized in this process",
    }
    REFUSED: ClassVar[Mapping[str, str]] = {
        "subset": "a file has no subsets; give dataset_path of the rows to take",
        "mixture_proportion": "give sample_count for each data set",
    }

    @classmethod
    def section(cls) -> str:
        return "data.datasets"

    def __post_init__(self) -> None:
        super().__post_init__()
        path = self.dataset_path or self.dataset_kwargs.get("dataset_path")
        if self.dataset_name not in (None, *DATASET_NAMES):
            self.refuse("dataset_name", "data sets of the Hub are not downloaded: give dataset_path, a JSONL file")
        if unknown := sorted(set(self.dataset_kwargs) - {"dataset_path"}):
            raise ConfigError(f"{self.section()}.dataset_kwargs.{unknown[0]} is not known; known: dataset_path")
        if not isinstance(path, str):
            raise ConfigError(f"{self.section()} needs dataset_path, the path of a JSONL file")
        if path.endswith(".parquet"):
            raise ConfigError(f"{self.section()}.dataset_path={path!r} must be a JSONL file: convert it first")
        object.__setattr__(self, "dataset_path", path)
        if self.sample_count is not None:
            self.check_number("sample_count", 1, whole=True)

    @property
    def path(self) -> Path:
        """The file."""
        assert self.dataset_path is not None
        return Path(self.dataset_path)


@dataclass(frozen=True, kw_only=True)
class SplitParams(_Group):
    """The data of training, or of validation.

    Attributes:
      datasets: Files; an example of each is as likely as it has rows.
      pack: Whether several short examples share a row of the batch, none seeing another.
      train_target: Which of an assistant's turns are learned: all_assistant_turns or final_assistant_turn.
      seed: Of the order of rows; None: `training.data_seed`.
    """

    datasets: tuple[DatasetParams, ...] = ()
    pack: bool = False
    train_target: str = ALL_TURNS
    seed: int | None = None
    target_col: str | None = None
    collator_name: str | None = None
    collator_kwargs: dict[str, Any] = field(default_factory=dict)
    mixture_strategy: str = "first_exhausted"
    stream: bool = False
    use_async_dataset: bool = False
    use_torchdata: bool | None = None

    WITHOUT_EFFECT: ClassVar[Mapping[str, str]] = {
        "target_col": "what is learned is told by the row's keys",
        "collator_name": "batches are made here",
        "mixture_strategy": "each row is taken once an epoch",
        "stream": "files are read before the first step",
        "use_async_dataset": _TORCH_ONLY,
        "use_torchdata": _TORCH_ONLY,
    }
    REFUSED: ClassVar[Mapping[str, str]] = {"collator_kwargs": "give data.train.train_target"}

    @classmethod
    def section(cls) -> str:
        return "data.train"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.datasets, str | Mapping) or not all(
            isinstance(each, Mapping | DatasetParams) for each in self.datasets
        ):
            raise ConfigError(f"{self.section()}.datasets must be a list of mappings, each with dataset_path")
        object.__setattr__(self, "datasets", tuple(DatasetParams.of(each) for each in self.datasets))
        self.check("pack", bool, "true or false")
        if self.train_target not in (ALL_TURNS, FINAL_TURN):
            raise ConfigError(
                f"{self.section()}.train_target={self.train_target!r} must be {ALL_TURNS} or {FINAL_TURN}"
            )

    def notes(self) -> list[str]:
        return super().notes() + [note for each in self.datasets for note in each.notes()]


@dataclass(frozen=True, kw_only=True)
class ValidationParams(SplitParams):
    """The data that the loss is measured on during training; fields as in `SplitParams`."""

    @classmethod
    def section(cls) -> str:
        return "data.validation"


@dataclass(frozen=True, kw_only=True)
class DataParams(_Group):
    """The data.

    Attributes:
      train: What is learned.
      validation: What the loss is measured on during training.
      test: Refused.
    """

    train: SplitParams = field(default_factory=SplitParams)
    validation: ValidationParams = field(default_factory=ValidationParams)
    test: Any = None

    @classmethod
    def section(cls) -> str:
        return "data"

    def __post_init__(self) -> None:
        object.__setattr__(self, "train", SplitParams.of(self.train))
        object.__setattr__(self, "validation", ValidationParams.of(self.validation))
        if self.test and self.test.get("datasets"):
            self.refuse("test", "give data.validation")
        if not self.train.datasets:
            raise ConfigError("data.train.datasets is empty: name a file, such as [{dataset_path: rows.jsonl}]")

    def notes(self) -> list[str]:
        return self.train.notes() + self.validation.notes()


@dataclass(frozen=True, kw_only=True)
class TrainingParams(_Group):
    """How it is trained.

    Attributes:
      trainer_type: TRL_SFT learns what the rows say; TRL_DPO what they prefer.
      use_peft: Whether adapters are trained instead of all weights.
      output_dir: The folder of the finished model, of its checkpoints and of metrics.jsonl.
      per_device_train_batch_size: Rows that are computed together; for TRL_DPO, pairs of rows.
      per_device_eval_batch_size: The same, for validation.
      gradient_accumulation_steps: How many of those make the batch of a step.
      max_steps: Steps; -1: those of `num_train_epochs`.
      num_train_epochs: Times that each row is seen.
      save_steps: Steps between checkpoints; 0: none but the one of a run that is stopped.
      save_final_model: Whether `output_dir` gets the model.
      seed: Of what is drawn in training.
      data_seed: Of the order of rows.
      learning_rate: Its peak.
      lr_scheduler_type: linear, cosine, constant or constant_with_warmup.
      warmup_ratio: Share of the steps in which the rate rises from 0; `warmup_steps` says how many instead.
      optimizer: adamw, adamw_torch, adamw_torch_fused or sgd.
      weight_decay: Of matrices only.
      max_grad_norm: Gradients whose norm is larger are scaled down to it; 0: none are.
      mixed_precision_dtype: NONE or BF16, which computes in bfloat16.
      enable_gradient_checkpointing: Whether layers are computed again for their derivatives, rather than kept.
      logging_steps: Steps between the lines that are printed; metrics.jsonl has them all.
      eval_strategy: "no", "steps" or "epoch": when the loss of `data.validation` is measured.
      eval_steps: Steps between those.
      resume_from_checkpoint: The folder of a checkpoint to go on from.
      try_resume_from_last_checkpoint: Whether to go on from the last checkpoint in `output_dir`, if there is one.
      trainer_kwargs: Of TRL's trainers: save_total_limit; for TRL_DPO, beta and label_smoothing.
    """

    trainer_type: str = SFT
    use_peft: bool = False
    output_dir: str = "output"
    per_device_train_batch_size: int = 8
    per_device_eval_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    max_steps: int = -1
    num_train_epochs: int = 3
    save_epoch: bool = False
    save_steps: int = 500
    save_final_model: bool = True
    seed: int = 42
    data_seed: int = 42
    learning_rate: float = 5e-5
    lr_scheduler_type: str = "linear"
    lr_scheduler_kwargs: dict[str, Any] = field(default_factory=dict)
    warmup_ratio: float | None = None
    warmup_steps: int | None = None
    optimizer: str = "adamw_torch"
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    sgd_momentum: float = 0.0
    max_grad_norm: float = 1.0
    mixed_precision_dtype: str = "NONE"
    enable_gradient_checkpointing: bool = False
    gradient_checkpointing_kwargs: dict[str, Any] = field(default_factory=dict)
    logging_strategy: str = "steps"
    logging_steps: int = 10
    logging_first_step: bool = False
    logging_dir: str | None = None
    eval_strategy: str = "no"
    eval_steps: int = 500
    resume_from_checkpoint: str | None = None
    try_resume_from_last_checkpoint: bool = False
    trainer_kwargs: dict[str, Any] = field(default_factory=dict)
    run_name: str | None = None
    log_level: str = "info"
    dep_log_level: str = "warning"
    log_model_summary: bool = False
    log_examples: bool = False
    use_deterministic: bool = False
    full_determinism: bool = False
    compile: bool = False
    enable_wandb: bool = False
    enable_mlflow: bool = False
    enable_tensorboard: bool = False
    include_performance_metrics: bool = False
    include_alternative_mfu_metrics: bool = False
    reward_functions: Any = None
    reward_function_kwargs: Any = None
    metrics_function: str | None = None
    grpo: Any = None
    gkd: Any = None
    profiler: Any = None
    telemetry: Any = None
    ddp_find_unused_parameters: bool | None = None
    dataloader_num_workers: int | str = 0
    dataloader_persistent_workers: bool = False
    dataloader_prefetch_factor: int | None = None
    dataloader_main_process_only: bool | None = None
    empty_device_cache_steps: int | None = None
    nccl_default_timeout_minutes: float | None = None

    WITHOUT_EFFECT: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            (
                *("compile", "ddp_find_unused_parameters", "dataloader_num_workers", "dataloader_persistent_workers"),
                *("dataloader_prefetch_factor", "dataloader_main_process_only", "empty_device_cache_steps"),
                *("nccl_default_timeout_minutes", "gradient_checkpointing_kwargs"),
            ),
            _TORCH_ONLY,
        ),
        "use_deterministic": "the same run is always the same",
        "full_determinism": "the same run is always the same",
        "include_performance_metrics": "metrics.jsonl always has tokens a second",
        "logging_first_step": "metrics.jsonl has every step",
        "logging_dir": "metrics.jsonl is in output_dir",
        "logging_strategy": "metrics.jsonl has every step",
        "run_name": "output_dir names the run",
        "log_level": "--debug shows more",
        "dep_log_level": "--debug shows more",
        "log_model_summary": "jaxis analyze shows the model",
        "log_examples": "--show-examples shows them",
        "telemetry": "metrics.jsonl has what was measured",
    }
    REFUSED: ClassVar[Mapping[str, str]] = {
        "lr_scheduler_kwargs": "the schedules have no arguments; leave it out",
        "enable_wandb": "nothing is sent anywhere; metrics.jsonl has every step",
        "enable_mlflow": "nothing is sent anywhere; metrics.jsonl has every step",
        "enable_tensorboard": "metrics.jsonl has every step",
        "include_alternative_mfu_metrics": "metrics.jsonl has tokens a second",
        "reward_functions": "only TRL_SFT and TRL_DPO are supported",
        "reward_function_kwargs": "only TRL_SFT and TRL_DPO are supported",
        "grpo": "only TRL_SFT and TRL_DPO are supported",
        "gkd": "only TRL_SFT and TRL_DPO are supported",
        "metrics_function": "the loss of data.validation is measured",
        "profiler": "use JAX's profiler",
        "save_epoch": "give save_steps",
    }

    @classmethod
    def section(cls) -> str:
        return "training"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.trainer_type not in (SFT, DPO):
            self.refuse("trainer_type", f"supported are {SFT} and {DPO}")
        for name in ("use_peft", "save_final_model", "enable_gradient_checkpointing"):
            self.check(name, bool, "true or false")
        self.check("try_resume_from_last_checkpoint", bool, "true or false")
        self.check("resume_from_checkpoint", str, "the folder of a checkpoint", optional=True)
        self.check("output_dir", str, "the path of a folder")
        for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
            self.check_number(name, 1, whole=True)
        for name in ("num_train_epochs", "logging_steps", "eval_steps"):
            self.check_number(name, 1, whole=True)
        self.check_number("max_steps", -1, whole=True)
        for name in ("save_steps", "seed", "data_seed"):
            self.check_number(name, 0, 2**31 - 1, whole=True)
        for name in ("learning_rate", "weight_decay", "max_grad_norm", "adam_epsilon"):
            self.check_number(name, 0)
        for name in ("adam_beta1", "adam_beta2", "sgd_momentum"):
            self.check_number(name, 0, 1)
        if self.warmup_ratio is not None:
            self.check_number("warmup_ratio", 0, 1)
        if self.warmup_steps is not None:
            self.check_number("warmup_steps", 0, whole=True)
        self._check_choices()
        self._check_trainer_kwargs()

    def _check_choices(self) -> None:
        for name, choices in {
            "optimizer": tuple(OPTIMIZERS),
            "lr_scheduler_type": SCHEDULES,
            "eval_strategy": ("no", "steps", "epoch"),
        }.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"training.{name}={getattr(self, name)!r} must be one of {', '.join(choices)}")
        if str(self.mixed_precision_dtype).lower() not in _COMPUTE_DTYPES:
            self.refuse("mixed_precision_dtype", "NONE or BF16")

    def _check_trainer_kwargs(self) -> None:
        known = {"save_total_limit"} | ({"beta", "label_smoothing"} if self.trainer_type == DPO else set())
        if unknown := sorted(set(self.trainer_kwargs) - known):
            raise ConfigError(f"training.trainer_kwargs.{unknown[0]} is not known; known: {', '.join(sorted(known))}")
        limit = self.trainer_kwargs.get("save_total_limit")
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
            raise ConfigError(f"training.trainer_kwargs.save_total_limit={limit!r} must be an integer from 1")
        for name, high in (("beta", float("inf")), ("label_smoothing", 0.5)):
            value = self.trainer_kwargs.get(name, 0.1)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < high:
                raise ConfigError(f"training.trainer_kwargs.{name}={value!r} must be a number from 0")

    @property
    def compute_dtype(self) -> str | None:
        """What `mixed_precision_dtype` computes in; None if it does not say."""
        return _COMPUTE_DTYPES[str(self.mixed_precision_dtype).lower()]

    @property
    def save_total_limit(self) -> int | None:
        """Checkpoints that are kept; None: all."""
        return self.trainer_kwargs.get("save_total_limit")


@dataclass(frozen=True, kw_only=True)
class PeftParams(_Group):
    """The adapters that are trained, with `training.use_peft`.

    Attributes:
      lora_r, lora_alpha, lora_dropout: As PEFT's r, lora_alpha and lora_dropout.
      lora_target_modules: Ends of the names of linear layers; None, or all-linear: all of them but the head.
      lora_exclude_modules: Ends of names that are left out.
      use_rslora: Whether the scale is alpha / sqrt(r) rather than alpha / r.
      q_lora: Whether the frozen weights are quantized, to `q_lora_bits`: 4 or 8.
      peft_save_mode: adapter_only writes PEFT's files; merged the whole model.
    """

    lora_r: int = 8
    lora_alpha: float = 8
    lora_dropout: float = 0.0
    lora_target_modules: Any = None
    lora_exclude_modules: Any = None
    use_rslora: bool = False
    q_lora: bool = False
    q_lora_bits: int = 4
    peft_save_mode: str = "adapter_only"
    lora_target_parameters: Any = None
    lora_modules_to_save: Any = None
    lora_bias: str = "none"
    lora_init_weights: Any = "default"
    lora_task_type: Any = "CAUSAL_LM"
    use_dora: bool = False
    peft_method: str = "lora"
    bnb_4bit_quant_type: str = "fp4"
    llm_int8_skip_modules: Any = None
    use_bnb_nested_quant: bool = False
    bnb_4bit_quant_storage: str = "uint8"
    bnb_4bit_compute_dtype: str = "float32"

    WITHOUT_EFFECT: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage", "bnb_4bit_compute_dtype"),
        "weights are quantized as jaxis quantize does",
    )
    REFUSED: ClassVar[Mapping[str, str]] = {
        "lora_target_parameters": "only linear layers get adapters",
        "lora_modules_to_save": "only adapters are trained; without use_peft all weights are",
        "use_dora": "leave it out",
        "llm_int8_skip_modules": "leave it out",
    }

    @classmethod
    def section(cls) -> str:
        return "peft"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_number("lora_r", 1, 4096, whole=True)
        self.check_number("lora_alpha", 0)
        self.check_number("lora_dropout", 0, 0.999)
        self.check("use_rslora", bool, "true or false")
        self.check("q_lora", bool, "true or false")
        for name in ("lora_target_modules", "lora_exclude_modules"):
            value = getattr(self, name)
            names = [value] if isinstance(value, str) else [] if value is None else value
            if not isinstance(names, list | tuple) or not all(isinstance(each, str) for each in names):
                raise ConfigError(f"peft.{name}={value!r} must be a list of names such as q_proj")
            object.__setattr__(self, name, tuple(names))
        if self.lora_bias != "none":
            self.refuse("lora_bias", "biases are not trained; leave it out")
        if self.peft_method != "lora":
            self.refuse("peft_method", "leave it out")
        if str(self.lora_init_weights).lower() not in ("default", "true"):
            self.refuse("lora_init_weights", "adapters begin as PEFT's default has it; leave it out")
        if self.q_lora_bits not in (4, 8):
            self.refuse("q_lora_bits", "4 or 8")
        if self.peft_save_mode not in ("adapter_only", "merged"):
            self.refuse("peft_save_mode", "adapter_only or merged")
        if self.q_lora and self.peft_save_mode == "merged":
            self.refuse("peft_save_mode", "adapters of a quantized model are saved alone: adapter_only")

    @property
    def targets(self) -> tuple[str, ...] | None:
        """Ends of names; None: all linear layers."""
        return None if self.lora_target_modules in ((), ("all-linear",)) else self.lora_target_modules


@dataclass(frozen=True, kw_only=True)
class TrainConfig(_Group):
    """A run: model, data, how it is trained.

    Attributes:
      model: Which model.
      data: Which rows.
      training: How it is trained.
      peft: Which adapters.
      fsdp, deepspeed: Refused, if they are enabled.
    """

    model: TrainedModelParams = field(default_factory=TrainedModelParams)
    data: DataParams = field(default_factory=DataParams)
    training: TrainingParams = field(default_factory=TrainingParams)
    peft: PeftParams = field(default_factory=PeftParams)
    fsdp: Any = None
    deepspeed: Any = None

    @classmethod
    def section(cls) -> str:
        return "config"

    def __post_init__(self) -> None:
        for name, group in {
            "model": TrainedModelParams,
            "data": DataParams,
            "training": TrainingParams,
            "peft": PeftParams,
        }.items():
            object.__setattr__(self, name, group.of(getattr(self, name) or {}))
        for name in ("fsdp", "deepspeed"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, Mapping) and not value.get(f"enable_{name}", False)):
                self.refuse(name, "training runs on one device; leave it out")
        if self.training.eval_strategy != "no" and not self.data.validation.datasets:
            raise ConfigError("training.eval_strategy needs data.validation.datasets: name a file there")
        if not self.training.use_peft and (self.peft.q_lora or self.model.model_kwargs):
            raise ConfigError("quantized weights cannot be trained: set training.use_peft, which trains adapters")

    def notes(self) -> list[str]:
        return [*self.model.notes(), *self.data.notes(), *self.training.notes(), *self.peft.notes()]
