"""The parameters of a run, under Oumi's names.

A field is applied, or refused with the reason. A few have no effect on answers here whatever they say: they are
accepted, so that existing configurations run, and `notes` names them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Self

import yaml

from jaxis.errors import ConfigError

_MISSING = "???"  # what Oumi's objects hold where nothing was given


class _Loader(yaml.SafeLoader):
    """YAML whose numbers may be written as 1e-5, which YAML 1.1 takes as text."""


_Loader.yaml_implicit_resolvers = {
    first: [*resolvers] for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def parse_yaml(text: str, what: str) -> Any:
    """Raises ConfigError, in one line, if it is not YAML."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{what} is not YAML: {' '.join(str(error).split())}") from None


@dataclass(frozen=True, kw_only=True)
class _Params:
    """What the groups of parameters share: reading them, and naming what is not honoured."""

    @classmethod
    def _name(cls) -> str:
        raise NotImplementedError

    @classmethod
    def of(cls, value: object) -> Self:
        """Takes an object of this class, a mapping, or an object of Oumi's with fields of the same names.

        Raises:
          ConfigError: It is something else, or has a field that jaxis does not know and that says something.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, Mapping):
            values = {str(key): item for key, item in value.items()}
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            known = {f.name for f in dataclasses.fields(cls)}
            values = {
                f.name: _plain(getattr(value, f.name))
                for f in dataclasses.fields(value)
                if f.name in known or getattr(value, f.name) != _default(f)
            }
            values = {name: item for name, item in values.items() if not (isinstance(item, str) and item == _MISSING)}
        else:
            raise ConfigError(f"{cls._name()} is {type(value).__name__}; give {cls.__name__}, or a mapping")
        unknown = [name for name in values if name not in cls.__dataclass_fields__]
        if unknown:
            known_names = ", ".join(f.name for f in dataclasses.fields(cls))
            raise ConfigError(f"{cls._name()}.{unknown[0]} is no field that jaxis knows; known: {known_names}")
        return cls(**values)

    def notes(self) -> list[str]:
        """One line for each field that is set and has no effect on answers."""
        return []

    def _refuse(self, name: str, why: str) -> None:
        raise ConfigError(f"{self._name()}.{name}={getattr(self, name)!r} cannot be honoured: {why}")

    def _check(self, name: str, kind: type, expected: str, *, optional: bool = False) -> None:
        value = getattr(self, name)
        if (value is None and optional) or (isinstance(value, kind) and not (kind is int and isinstance(value, bool))):
            return
        raise ConfigError(f"{self._name()}.{name}={value!r} must be {expected}")


@dataclass(frozen=True, kw_only=True)
class ModelParams(_Params):
    """Which model, and how it is loaded.

    Attributes:
      model_name: Folder or hub id; None is the embedded demonstration model.
      model_max_length: Most tokens of a request; None is the checkpoint's.
      model_revision: Branch, tag or commit of a hub id.
      torch_dtype_str: "auto", "float32", "bfloat16" or "float16", or one of Oumi's other names for these.
      load_pretrained_weights: False makes random weights.
      chat_template: Jinja source, a file with it, or the name of one of the checkpoint's templates.
      chat_template_kwargs: More variables for the chat template, such as enable_thinking.
      model_kwargs: Further arguments of `jaxis.LLM`, such as quantization, kv_cache_dtype, tensor_parallel_size,
        max_num_seqs; also load_in_8bit and load_in_4bit.
      trust_remote_code: No code of a checkpoint is ever run; jaxis has the families itself.
      adapter_model, adapter_trainable: Refused: there are no adapters yet.
      tokenizer_name: Only `model_name` again: the tokenizer is the checkpoint's.
      tokenizer_kwargs, processor_kwargs: Refused unless empty.
      tokenizer_pad_token, attn_implementation, compile, device_map, enable_liger_kernel, freeze_layers, text_only:
        No effect.
      tool_call_parser: How the model writes its tool calls, or "auto", which looks into its chat template: calls and
        reasoning then come apart from the message's text. None leaves them in it.
      shard_for_eval: Refused: model_kwargs.tensor_parallel_size spreads a model over devices.
    """

    model_name: str | None = None
    model_max_length: int | None = None
    model_revision: str | None = None
    torch_dtype_str: str = "auto"
    load_pretrained_weights: bool = True
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    model_kwargs: dict[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False
    adapter_model: str | None = None
    adapter_trainable: bool = False
    tokenizer_name: str | None = None
    tokenizer_pad_token: str | None = None
    tokenizer_kwargs: dict[str, Any] = field(default_factory=dict)
    processor_kwargs: dict[str, Any] = field(default_factory=dict)
    attn_implementation: str | None = None
    compile: bool = False
    device_map: str | None = "auto"
    enable_liger_kernel: bool = False
    shard_for_eval: bool = False
    text_only: bool = False
    tool_call_parser: str | None = None
    freeze_layers: list[str] = field(default_factory=list)

    @classmethod
    def _name(cls) -> str:
        return "model"

    def __post_init__(self) -> None:
        from jaxis.parsing.tool_parsers import get_tool_parser

        for name in ("model_name", "model_revision", "chat_template", "tool_call_parser"):
            self._check(name, str, "a text", optional=True)
        self._check("load_pretrained_weights", bool, "true or false")
        self._check("torch_dtype_str", str, "a text such as bfloat16")
        self._check("model_kwargs", Mapping, "a mapping of arguments of jaxis.LLM")
        if self.tool_call_parser not in (None, "auto"):
            try:
                get_tool_parser(self.tool_call_parser)
            except ConfigError as error:
                raise ConfigError(f"model.{error}") from None
        if self.adapter_model is not None:
            self._refuse("adapter_model", "jaxis has no adapters yet; merge it into the model's weights first")
        if self.adapter_trainable:
            self._refuse("adapter_trainable", "nothing is trained; leave it out")
        self._check("chat_template_kwargs", Mapping, "a mapping of variables of the chat template", optional=True)
        if self.tokenizer_name not in (None, self.model_name):
            self._refuse("tokenizer_name", "the tokenizer is the one beside the weights; put the other one there")
        for name in ("tokenizer_kwargs", "processor_kwargs"):
            if getattr(self, name):
                self._refuse(name, "the tokenizer is read as the checkpoint's files describe it; change those")
        if self.shard_for_eval:
            self._refuse("shard_for_eval", "model_kwargs.tensor_parallel_size spreads a model over devices")

    def notes(self) -> list[str]:
        why = {
            "trust_remote_code": "no code of a checkpoint is run, jaxis has the model itself",
            "tokenizer_pad_token": "batches are not padded",
            "attn_implementation": "jaxis has attention kernels of its own",
            "compile": "every program is compiled",
            "enable_liger_kernel": "jaxis has kernels of its own",
            "freeze_layers": "nothing is trained",
            "text_only": "of a model that also sees or hears, the text part is all that runs",
        }
        notes = [f"model.{name} has no effect: {reason}" for name, reason in why.items() if getattr(self, name)]
        if self.device_map not in (None, "auto"):
            notes.append(
                "model.device_map has no effect: model_kwargs.tensor_parallel_size spreads a model over devices"
            )
        return notes


@dataclass(frozen=True, kw_only=True)
class GuidedDecodingParams(_Params):
    """The form that answers must have: at most one of these.

    Attributes:
      json: A JSON schema as an object or as text, or a pydantic model.
      regex: A regular expression that the whole answer matches.
      choice: The possible answers.
    """

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None

    @classmethod
    def _name(cls) -> str:
        return "generation.guided_decoding"

    def __post_init__(self) -> None:
        if sum(value is not None for value in (self.json, self.regex, self.choice)) > 1:
            raise ConfigError(f"{self._name()} must have one of json, regex and choice only")
        self._check("regex", str, "a regular expression", optional=True)
        if hasattr(self.json, "model_json_schema"):
            object.__setattr__(self, "json", self.json.model_json_schema())
        if self.json is not None and not isinstance(self.json, str | Mapping):
            raise ConfigError(f"{self._name()}.json={self.json!r} must be a JSON schema, as an object or as text")
        if self.choice is not None and not (
            isinstance(self.choice, Sequence) and self.choice and all(isinstance(c, str) for c in self.choice)
        ):
            raise ConfigError(f"{self._name()}.choice={self.choice!r} must be a list of texts")


@dataclass(frozen=True, kw_only=True)
class GenerationParams(_Params):
    """How answers are sampled, and when they end; see docs/sampling.md for ranges.

    Attributes:
      max_new_tokens: Most tokens of an answer.
      temperature: 0 always takes the most likely token.
      min_p, frequency_penalty, presence_penalty, stop_token_ids, skip_special_tokens: As in `SamplingParams`.
      top_p: None keeps all tokens, as 1 does.
      seed: For every row; None gives each row of a file a seed of its own, derived from the run, so that a run that
        was interrupted and one that was not give the same answers.
      stop_strings: Texts that end an answer.
      logit_bias: Token id -> number added to its logit.
      guided_decoding: The form that answers must have.
      tools: For conversations that bring none.
      tool_choice: "auto", or "none" to offer no tools; others are refused.
      reasoning_effort: Passed to the chat template; refused if that does not read it.
      use_sampling: Follows from temperature; True with temperature 0 is refused.
      batch_size, use_cache: No effect: requests are batched continuously, with a KV cache.
      num_beams, exclude_prompt_from_response, stream, stream_options, parallel_tool_calls, prompt_cache_ttl:
        Refused unless default.
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
    batch_size: int | None = 1
    use_cache: bool = False
    num_beams: int = 1
    exclude_prompt_from_response: bool = True
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    prompt_cache_ttl: str | None = None

    @classmethod
    def _name(cls) -> str:
        return "generation"

    def __post_init__(self) -> None:
        from jaxis.inference.sampling import to_sampling_params  # which needs this module

        if self.guided_decoding is not None:
            object.__setattr__(self, "guided_decoding", GuidedDecodingParams.of(self.guided_decoding))
        if self.tools is not None:
            self._check("tools", list, "a list of JSON objects, each the schema of a function")
            object.__setattr__(self, "tools", [_plain(tool) for tool in self.tools])
            if not all(isinstance(tool, Mapping) for tool in self.tools):
                raise ConfigError("generation.tools must be a list of JSON objects, each the schema of a function")
        self._check("skip_special_tokens", bool, "true or false")
        self._check("reasoning_effort", str, "a text such as low", optional=True)
        if self.use_sampling and self.temperature == 0:
            self._refuse("use_sampling", "temperature=0 takes the most likely token; set a higher one")
        if self.num_beams != 1:
            self._refuse("num_beams", "there is no beam search; leave it 1")
        if not self.exclude_prompt_from_response:
            self._refuse("exclude_prompt_from_response", "the output holds the prompt as messages of its own")
        if self.stream or self.stream_options:
            self._refuse("stream" if self.stream else "stream_options", "a batch has rows; `jaxis infer -i` streams")
        if self.prompt_cache_ttl is not None:
            self._refuse("prompt_cache_ttl", "cached prompts stay as long as there is room for them; leave it out")
        if not self.parallel_tool_calls:
            self._refuse("parallel_tool_calls", "how many tools a model calls is not constrained")
        if self.tool_choice not in (None, "auto", "none"):
            self._refuse("tool_choice", "use auto or none")
        to_sampling_params(self)  # raises for a value out of range now, and not after a minute of loading

    def notes(self) -> list[str]:
        why = {
            "batch_size": self.batch_size not in (None, 1) and "as many rows run at once as memory holds",
            "use_cache": self.use_cache and "there always is a KV cache",
        }
        return [f"generation.{name} has no effect: {reason}" for name, reason in why.items() if reason]


@dataclass(frozen=True, kw_only=True)
class InferenceConfig(_Params):
    """A run: model, parameters, and files.

    Attributes:
      model: Which model, and how it is loaded.
      generation: How answers are sampled.
      input_path: JSONL file of conversations.
      output_path: JSONL file to write.
      progress_path: JSON file {total, completed, failed, updated_at}, kept up to date during the run.
      engine: None or "JAX".
      remote_params: Refused: nothing is sent anywhere.
    """

    model: ModelParams = field(default_factory=ModelParams)
    generation: GenerationParams = field(default_factory=GenerationParams)
    input_path: str | None = None
    output_path: str | None = None
    progress_path: str | None = None
    engine: str | None = None
    remote_params: Any = None

    @classmethod
    def _name(cls) -> str:
        return "config"

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", ModelParams.of(self.model))
        object.__setattr__(self, "generation", GenerationParams.of(self.generation))
        for name in ("input_path", "output_path", "progress_path"):
            if isinstance(getattr(self, name), Path):
                object.__setattr__(self, name, str(getattr(self, name)))
            self._check(name, str, "the path of a file", optional=True)
        if self.engine is not None and str(self.engine).upper() != "JAX":
            self._refuse("engine", "this is the JAX engine; leave it out, or write JAX")
        if self.remote_params is not None:
            self._refuse("remote_params", "this engine sends nothing anywhere")

    def notes(self) -> list[str]:
        return self.model.notes() + self.generation.notes()

    @classmethod
    def from_yaml(cls, path: str | Path) -> InferenceConfig:
        """Reads a YAML file.

        Raises:
          ConfigError: It cannot be read, or a field cannot be honoured.
        """
        return cls.of(read_yaml_mapping(path))


def read_yaml_mapping(path: str | Path) -> dict[str, Any]:
    """Reads a YAML file that holds a mapping.

    Raises:
      ConfigError: It cannot be read, or holds something else.
    """
    try:
        text = Path(path).read_text("utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text") from None
    value = parse_yaml(text, str(path))
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds no configuration: it needs sections such as `model:` and `generation:`")
    return value


def _plain(value: Any) -> Any:
    """An enum's value, and a pydantic object as a dict."""
    if isinstance(value, Enum):
        return value.value
    dump: Callable[..., Any] | None = getattr(value, "model_dump", None)
    return dump(mode="json", exclude_none=True) if dump is not None and not isinstance(value, type) else value


def _default(f: dataclasses.Field[Any]) -> Any:
    return f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
