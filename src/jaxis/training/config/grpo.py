"""The section `training.grpo`: sampling of answers, under TRL's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxis.config.parameter_group import ParameterGroup
from jaxis.errors import ConfigError, RequestError
from jaxis.sampling_params import SamplingParams
from jaxis.training.config.unused import TORCH_ONLY

ERROR, CORRECT, IGNORE = "error", "correct", "ignore"


@dataclass(frozen=True, kw_only=True)
class GrpoParams(ParameterGroup):
    """Settings for sampling and comparing answers.

    Attributes:
      num_generations: Number of answers to a prompt, which form a group.
      max_prompt_length: Limit of a prompt's tokens; a longer prompt is an error. None: as the context allows.
      max_completion_length: Limit of an answer's tokens.
      scale_rewards: True to divide advantages by the standard deviation of their group's rewards.
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

    num_generations: int = 8
    max_prompt_length: int | None = None
    max_completion_length: int = 256
    scale_rewards: bool = True
    log_completions: bool = False
    on_mismatch: str | None = None
    vocab_mismatch_positions: int = 2
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    environment_factory: str | None = None
    max_tool_calling_iterations: int | None = None
    epsilon: float = 0.2
    num_iterations: int = 1
    beta: float = 0.0
    loss_type: str = "dapo"
    repetition_penalty: float = 1.0
    model_init_kwargs: Any = None
    remove_unused_columns: bool = False
    use_vllm: bool = False
    vllm_mode: str | None = None
    vllm_gpu_memory_utilization: float = 0.9

    WITHOUT_EFFECT: ClassVar[Mapping[str, str]] = {
        "epsilon": "a batch has one update, in which no ratio is clipped",
        "remove_unused_columns": "reward functions get all columns",
        "use_vllm": "the engine of this process samples",
        "vllm_mode": "the engine of this process samples",
        "vllm_gpu_memory_utilization": "the engine of this process samples",
        "model_init_kwargs": TORCH_ONLY,
    }
    REFUSED: ClassVar[Mapping[str, str]] = {
        "repetition_penalty": "answers are sampled from the distribution that is trained; leave it out",
        "num_iterations": "a batch has one update; leave it out",
        "beta": "there is no reference model; leave it out",
        "loss_type": "the loss is dapo, a mean over all tokens of a batch; leave it out",
    }

    @classmethod
    def section(cls) -> str:
        return "training.grpo"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_number("num_generations", 2, whole=True)
        self.check_number("max_completion_length", 1, whole=True)
        self.check_number("vocab_mismatch_positions", 0, whole=True)
        if self.max_prompt_length is not None:
            self.check_number("max_prompt_length", 1, whole=True)
        if self.max_tool_calling_iterations is not None:
            self.check_number("max_tool_calling_iterations", 0, whole=True)
        self.check("environment_factory", str, "module:Class", optional=True)
        self._check_sampling()
        for name in ("scale_rewards", "log_completions"):
            self.check(name, bool, "true or false")
        if self.on_mismatch not in (None, ERROR, CORRECT, IGNORE):
            raise ConfigError(
                f"training.grpo.on_mismatch={self.on_mismatch!r} must be one of {ERROR}, {CORRECT}, {IGNORE}"
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
