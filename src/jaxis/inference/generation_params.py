"""Parameters for sampling a run's answers, under Oumi's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from jaxis.config.parameter_group import ParameterGroup, Unused, no_effect, plain_value, refused
from jaxis.errors import ConfigError, RequestError
from jaxis.sampling_params import SamplingParams
from jaxis.structured_outputs import StructuredOutputs

# Parameters whose fields have other names here.
_FIELDS = {
    "max_tokens": "max_new_tokens",
    "stop": "stop_strings",
    "structured_outputs.json_schema": "guided_decoding.json",
    "structured_outputs.regex": "guided_decoding.regex",
    "structured_outputs.choice": "guided_decoding.choice",
}


@dataclass(frozen=True, kw_only=True)
class GuidedDecodingParams(ParameterGroup):
    """Constraints on answers; at most one is set.

    Attributes:
      json: A JSON schema as an object or as text, or a pydantic model.
      regex: A regular expression that the whole answer matches.
      choice: The possible answers.
    """

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None

    @classmethod
    def section(cls) -> str:
        return "generation.guided_decoding"

    def __post_init__(self) -> None:
        if sum(value is not None for value in (self.json, self.regex, self.choice)) > 1:
            raise ConfigError(f"{self.section()} must have one of json, regex and choice only")
        self.check("regex", str, "a regular expression", optional=True)
        if hasattr(self.json, "model_json_schema"):
            object.__setattr__(self, "json", self.json.model_json_schema())
        if self.json is not None and not isinstance(self.json, str | Mapping):
            raise ConfigError(f"{self.section()}.json={self.json!r} must be a JSON schema, as an object or as text")
        if self.choice is not None and not (
            isinstance(self.choice, Sequence) and self.choice and all(isinstance(c, str) for c in self.choice)
        ):
            raise ConfigError(f"{self.section()}.choice={self.choice!r} must be a list of strings")


@dataclass(frozen=True, kw_only=True)
class GenerationParams(ParameterGroup):
    """Sampling and end of answers; see docs/sampling.md for ranges.

    Attributes:
      max_new_tokens: Limit of an answer's tokens.
      temperature: Sampling temperature; 0 always takes the most likely token.
      min_p, frequency_penalty, presence_penalty, stop_token_ids, skip_special_tokens: Fields of `SamplingParams`.
      top_p: Limit of the probability mass; None keeps all tokens, like 1.
      seed: Seed of every row; None gives each row of a file its own seed, derived from the run, so that an interrupted
        run gives the same answers as any other.
      stop_strings: Strings that end an answer.
      logit_bias: Number to add to each token's logit, by token id.
      guided_decoding: Constraint on answers.
      tools: Tools for conversations without their own.
      tool_choice: "auto", or "none" to offer no tools; other values are refused.
      reasoning_effort: Variable for the chat template; refused if the template does not read it.
      use_sampling: Redundant: temperature decides. True with temperature 0 is refused.
    """

    max_new_tokens: int = 1024
    temperature: float = 0.0
    top_p: float | None = None
    min_p: float = 0.0
    seed: int | None = None
    stop_strings: list[str] | None = None
    stop_token_ids: list[int] | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[Any, float] = field(default_factory=dict)
    guided_decoding: GuidedDecodingParams | None = None
    skip_special_tokens: bool = True
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    reasoning_effort: str | None = None
    use_sampling: bool = False

    UNUSED: ClassVar[Mapping[str, Unused]] = {
        "batch_size": no_effect("as many rows run at once as memory holds", 1),
        "use_cache": no_effect("there always is a KV cache"),
        "num_beams": refused("beam search is not supported; leave it 1", 1),
        "exclude_prompt_from_response": refused("the output holds the prompt as messages of its own", True),
        "stream": refused("a batch has rows; `jaxis infer -i` streams"),
        "stream_options": refused("a batch has rows; `jaxis infer -i` streams"),
        "prompt_cache_ttl": refused("cached prompts stay as long as there is room for them; leave it out"),
        "parallel_tool_calls": refused("how many tools a model calls is not constrained", True),
    }

    @classmethod
    def section(cls) -> str:
        return "generation"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.guided_decoding is not None:
            object.__setattr__(self, "guided_decoding", GuidedDecodingParams.of(self.guided_decoding))
        self._read_tools()
        self.check("reasoning_effort", str, "a string such as low", optional=True)
        if self.use_sampling and self.temperature == 0:
            self.refuse("use_sampling", "temperature=0 takes the most likely token; set a higher one")
        if self.tool_choice not in (None, "auto", "none"):
            self.refuse("tool_choice", "use auto or none")
        to_sampling_params(self)  # raises for a value out of range now rather than after a minute of loading

    def _read_tools(self) -> None:
        if self.tools is None:
            return
        self.check("tools", list, "a list of JSON objects, each the schema of a function")
        object.__setattr__(self, "tools", [plain_value(tool) for tool in self.tools])
        if not all(isinstance(tool, Mapping) for tool in self.tools):
            raise ConfigError("generation.tools must be a list of JSON objects, each the schema of a function")


def to_sampling_params(params: GenerationParams) -> SamplingParams:
    """Converts the parameters to sampling parameters of each row. Raises ConfigError if a value is out of range."""
    guided = params.guided_decoding
    try:
        return SamplingParams(
            max_tokens=_integer("max_new_tokens", params.max_new_tokens),
            temperature=params.temperature,
            top_p=1.0 if params.top_p is None else params.top_p,
            min_p=params.min_p,
            seed=params.seed,
            stop=list(params.stop_strings or []),
            stop_token_ids=list(params.stop_token_ids or []),
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
            logit_bias=to_logit_bias(params.logit_bias) if params.logit_bias else None,
            skip_special_tokens=params.skip_special_tokens,
            structured_outputs=None if guided is None else _structured_outputs(guided),
        )
    except RequestError as error:
        param = error.param or ""
        raise ConfigError(str(error.about(f"generation.{_FIELDS.get(param, param)}"))) from None


def to_logit_bias(bias: dict[Any, float]) -> dict[int, float]:
    """Returns the bias by token id. In JSON and YAML, the ids may be strings.

    Raises RequestError if a key is not a token id.
    """
    try:
        return {int(token_id): value for token_id, value in bias.items()}
    except (TypeError, ValueError, AttributeError):
        raise RequestError(f"={bias!r} must map token ids to numbers", param="logit_bias") from None


def _structured_outputs(guided: GuidedDecodingParams) -> StructuredOutputs | None:
    given = {"json_schema": guided.json, "regex": guided.regex, "choice": guided.choice}
    given = {name: value for name, value in given.items() if value is not None}
    return StructuredOutputs(**given) if given else None


def _integer(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"generation.{name}={value!r} must be an integer")
    return value
