"""Sections of methods, under TRL's names: `training.trainer_kwargs`, `training.grpo`, `training.distillation`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from jaxis.config.parameter_group import ParameterGroup, Unused, choice, number, text, whole
from jaxis.errors import ConfigError, RequestError
from jaxis.sampling_params import SamplingParams
from jaxis.training.config.unused import GRPO

ERROR, CORRECT, IGNORE = "error", "correct", "ignore"


@dataclass(frozen=True, kw_only=True)
class TrainerKwargs(ParameterGroup):
    """Arguments of TRL's trainers.

    Attributes:
      save_total_limit: Number of checkpoints that are kept, beside that of the best step; None: all.
      metric_for_best_model, greater_is_better: Metric that decides the best step, and whether larger values are better.
      load_best_model_at_end: True if the finished model is that of the best step.
      max_completion_length: Limit of the tokens of an answer for `metrics_function`.
    """

    save_total_limit: int | None = whole(None, 1)
    metric_for_best_model: str | None = text(None, "the name of a metric")
    greater_is_better: bool | None = None
    load_best_model_at_end: bool = False
    max_completion_length: int = whole(128, 1)

    @classmethod
    def section(cls) -> str:
        return "training.trainer_kwargs"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("greater_is_better", bool, "true or false", optional=True)


@dataclass(frozen=True, kw_only=True)
class PreferenceKwargs(TrainerKwargs):
    """Arguments of TRL's trainer of preferences; see `DPO`."""

    beta: float = number(0.1, 0)
    label_smoothing: float = number(0.0, 0, 0.499)
    loss_type: str = choice("sigmoid", ("sigmoid", "hinge", "ipo"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss_type != "sigmoid" and self.label_smoothing:
            self.refuse("label_smoothing", f"it is of loss_type=sigmoid, not {self.loss_type}")
        if self.loss_type == "ipo" and self.beta == 0:
            self.refuse("beta", "give one above 0 for loss_type=ipo, which divides by it")


@dataclass(frozen=True, kw_only=True)
class GrpoParams(ParameterGroup):
    """Settings for sampling and comparing answers.

    Attributes:
      num_generations: Number of answers to a prompt, which form a group.
      max_prompt_length: Limit of a prompt's tokens; a longer prompt is an error. None: as the context allows.
      max_completion_length: Limit of an answer's tokens.
      scale_rewards: Rewards whose standard deviation divides advantages: those of a group ("group", or True), of all
        answers of a step ("batch"), or none ("none", or False).
      loss_type: Mean that the loss is: of all tokens of a step (dapo); of the tokens of a micro-batch (bnpo); of
        answers, each the mean of its tokens (grpo); or of answers, each the sum of its tokens over
        `max_completion_length` (dr_grpo).
      num_iterations: Number of steps that learn from the same answers.
      epsilon: Distance below 1 at which the ratio of a token's probabilities, now and when it was sampled, is clipped.
      epsilon_high: The same above 1; None: `epsilon`.
      importance_sampling_level: token, with a ratio for each token; or sequence, with the geometric mean of an answer's
        ratios (GSPO, arXiv:2507.18071).
      beta: Factor of the KL divergence from the model before training; 0: none.
      log_completions: True to write every answer to answers.jsonl.
      on_mismatch: Action if a token's log-probability differs between training and the engine that sampled it: error;
        correct, which weighs each token by the ratio, up to 2; or ignore. None: error with `forward_pass: engine`, else
        correct.
      vocab_mismatch_positions: Number of positions in each micro-batch's answers where the log-probabilities of the
        whole vocabulary are compared, too.
      temperature: Sampling temperature.
      top_p: Limits sampling to the most likely tokens whose probabilities add up to this value.
      top_k: Limits sampling to this number of the most likely tokens; 0: all.
      min_p: Limits sampling to tokens with at least this share of the most likely token's probability; None: all.
      environment_factory: `module:Class` of an environment whose tools answers may call; see `Environments`. None: each
        answer is one turn.
      max_tool_calling_iterations: Limit of an answer's turns that call tools; None: as many as fit into its tokens.
    """

    num_generations: int = whole(8, 2)
    max_prompt_length: int | None = whole(None, 1)
    max_completion_length: int = whole(256, 1)
    scale_rewards: bool | str = "group"
    loss_type: str = choice("dapo", ("dapo", "bnpo", "grpo", "dr_grpo"))
    num_iterations: int = whole(1, 1)
    epsilon: float = number(0.2, 0, 1)
    epsilon_high: float | None = number(None, 0)
    importance_sampling_level: str = choice("token", ("token", "sequence"))
    beta: float = number(0.0, 0)
    log_completions: bool = False
    on_mismatch: str | None = choice(None, (ERROR, CORRECT, IGNORE))
    vocab_mismatch_positions: int = whole(2, 0)
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    environment_factory: str | None = text(None, "module:Class")
    max_tool_calling_iterations: int | None = whole(None, 0)

    UNUSED: ClassVar[Mapping[str, Unused]] = GRPO

    @classmethod
    def section(cls) -> str:
        return "training.grpo"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.scale_rewards, bool):
            object.__setattr__(self, "scale_rewards", "group" if self.scale_rewards else "none")
        self.check_choice("scale_rewards", ("group", "batch", "none"))
        self._check_sampling()
        if self.beta and self.has_filters:
            raise ConfigError(
                "training.grpo.beta cannot be honoured with top_p, top_k or min_p: tokens that are left out have no "
                "divergence; leave them out"
            )

    def _check_sampling(self) -> None:
        try:
            params = self.distribution
        except RequestError as error:
            raise ConfigError(f"training.grpo.{error}") from None
        if params.greedy:
            name = "temperature" if self.top_p else "top_p"
            raise ConfigError(
                f"training.grpo.{name}={getattr(self, name)} makes all answers of a group alike: give one above 0"
            )

    @property
    def distribution(self) -> SamplingParams:
        """Distribution that tokens are sampled from, with log-probabilities of the same distribution.

        Raises RequestError if a value is out of its range.
        """
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p or 0.0,
            logprobs_mode="processed_logprobs",
        )

    @property
    def has_filters(self) -> bool:
        """True if some tokens cannot be sampled."""
        return self.top_p < 1 or self.top_k > 0 or bool(self.min_p)


TEACHER_PROMPT = "{prompt}\n\n{privileged_context}"


@dataclass(frozen=True, kw_only=True)
class DistillationParams(ParameterGroup):
    """Settings of distillation.

    Attributes:
      teacher_model_name_or_path: Folder or Hub id of the teacher; None: the model itself, as it was before training.
      teacher_model_revision: Branch, tag or commit of a Hub id.
      lmbda: Share of rows whose answers the student samples; the others are learned as they are given.
      beta: Divergence of the student from the teacher: 0 for the forward Kullback-Leibler divergence, 1 for the reverse
        one, and between them the generalized Jensen-Shannon divergence.
      temperature: Temperature of sampling, and of both distributions that are compared.
      max_completion_length: Limit of a sampled answer's tokens.
      teacher_prompt_template: The teacher's last message of the user, with {prompt} for the student's and
        {privileged_context} for the column of that name, which the student does not read. None:
        "{prompt}\n\n{privileged_context}" if rows have that column, else the student's prompt.
      log_completions: True to write every sampled answer to answers.jsonl.
    """

    teacher_model_name_or_path: str | None = text(None, "a folder or a Hub id")
    teacher_model_revision: str | None = text(None, "a branch, tag or commit")
    lmbda: float = number(1.0, 0, 1)
    beta: float = number(1.0, 0, 1)
    temperature: float = number(1.0, 1e-3)
    max_completion_length: int = whole(512, 1)
    teacher_prompt_template: str | None = text(None, "a string")
    log_completions: bool = False

    @classmethod
    def section(cls) -> str:
        return "training.distillation"

    def __post_init__(self) -> None:
        super().__post_init__()
        if "{prompt}" not in (self.teacher_prompt_template or TEACHER_PROMPT):
            self.refuse("teacher_prompt_template", "it must have {prompt}, where the student's prompt stands")
        self.check("log_completions", bool, "true or false")
