"""From the parameters of a run to the arguments of `LLM` and to `SamplingParams`."""

from __future__ import annotations

import inspect
import os
from typing import TYPE_CHECKING, Any

from jaxis.errors import ConfigError, RequestError
from jaxis.sampling_params import SamplingParams
from jaxis.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from jaxis.inference.params import GenerationParams, GuidedDecodingParams, ModelParams
    from jaxis.tokenizer import Tokenizer

_DTYPES = {
    "auto": "auto",
    **dict.fromkeys(("float32", "f32", "float"), "float32"),
    **dict.fromkeys(("float16", "f16", "half"), "float16"),
    **dict.fromkeys(("bfloat16", "bf16"), "bfloat16"),
}
_SHORT_QUANTIZATION = {"load_in_8bit": "int8", "load_in_4bit": "int4"}
# Fields of ModelParams with names of their own say these.
_NOT_IN_MODEL_KWARGS = {"self", "model", "dtype", "max_model_len", "load_format", "revision", "show_progress"}
# How fast, but not what is answered: a run may be resumed with others.
SPEED_ARGUMENTS = {
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_cache_memory",
    "enable_prefix_caching",
    "block_size",
    "tensor_parallel_size",
    "token",
    "cache_dir",
}
# What rendering takes besides a template's own variables.
RESERVED_TEMPLATE_ARGUMENTS = {"messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message"}


def to_llm_arguments(params: ModelParams) -> dict[str, Any]:
    """Keyword arguments of `LLM`, except for the model and its revision.

    Raises:
      ConfigError: A field cannot be honoured.
    """
    from jaxis.llm import LLM  # and with it JAX, for which refusing a field need not wait

    if params.torch_dtype_str not in _DTYPES:
        raise ConfigError(f"model.torch_dtype_str={params.torch_dtype_str!r} must be one of {', '.join(_DTYPES)}")
    arguments: dict[str, Any] = {"dtype": _DTYPES[params.torch_dtype_str]}
    if params.model_max_length is not None:
        arguments["max_model_len"] = params.model_max_length
    if not params.load_pretrained_weights:
        arguments["load_format"] = "dummy"
    known = sorted(set(inspect.signature(LLM).parameters) - _NOT_IN_MODEL_KWARGS)
    for name, value in params.model_kwargs.items():
        if name in _SHORT_QUANTIZATION:
            if value and "quantization" in {**params.model_kwargs, **arguments}:
                raise ConfigError(f"model.model_kwargs.{name} and another quantization were both given: leave one out")
            if value:
                arguments["quantization"] = _SHORT_QUANTIZATION[name]
        elif name in known:
            arguments[name] = value
        else:
            raise ConfigError(
                f"model.model_kwargs.{name} is not known; known: {', '.join([*known, *_SHORT_QUANTIZATION])}"
            )
    return arguments


def to_sampling_params(params: GenerationParams) -> SamplingParams:
    """How each row is sampled.

    Raises:
      RequestError: A value is out of range.
    """
    more: dict[str, Any] = {}
    if params.guided_decoding is not None:
        more["structured_outputs"] = _structured_outputs(params.guided_decoding)
    renamed = {"max_tokens": "max_new_tokens", "stop": "stop_strings"}
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
            **more,
        )
    except RequestError as error:
        message = str(error)
        name = next((name for name in renamed if message.startswith((f"{name}=", f"{name} "))), None)
        if name is not None:
            message = renamed[name] + message.removeprefix(name)
        raise ConfigError(f"generation.{message}") from None


def to_logit_bias(bias: dict[Any, float]) -> dict[int, float]:
    """Token id -> bias, where JSON and YAML may have made the ids text.

    Raises:
      RequestError: A key is no token id.
    """
    try:
        return {int(token_id): value for token_id, value in bias.items()}
    except (TypeError, ValueError, AttributeError):
        raise RequestError(f"logit_bias={bias!r} must map token ids to numbers") from None


def template_arguments(model: ModelParams, generation: GenerationParams, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Keyword arguments for rendering every conversation.

    Raises:
      ConfigError: There is no such template, or it does not read what it is given.
    """
    arguments: dict[str, Any] = dict(model.chat_template_kwargs or {})
    if reserved := sorted(RESERVED_TEMPLATE_ARGUMENTS & set(arguments)):
        raise ConfigError(f"model.chat_template_kwargs.{reserved[0]} is no variable of a template's own: leave it out")
    templates = {} if tokenizer is None else tokenizer.chat_templates
    if (asked := model.chat_template) is not None:
        arguments["chat_template"] = asked if asked in templates else _template_source(asked, sorted(templates))
    if generation.reasoning_effort is not None:
        source = arguments.get("chat_template", "".join(templates.values()))
        if "reasoning_effort" not in templates.get(source, source):
            raise ConfigError(
                f"generation.reasoning_effort={generation.reasoning_effort!r} cannot be honoured: the model's chat "
                "template does not read it"
            )
        arguments["reasoning_effort"] = generation.reasoning_effort
    return arguments


def _template_source(asked: str, names: list[str]) -> str:
    if "{" in asked:
        return asked
    if not os.path.isfile(asked):
        raise ConfigError(
            f"model.chat_template={asked!r} is neither Jinja source, nor a file, nor one of the checkpoint's templates "
            f"({', '.join(names) or 'it has none'})"
        )
    with open(asked, encoding="utf-8") as file:
        return file.read()


def _structured_outputs(guided: GuidedDecodingParams) -> StructuredOutputs | None:
    given = {"json_schema": guided.json, "regex": guided.regex, "choice": guided.choice}
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        return None
    try:
        return StructuredOutputs(**given)
    except RequestError as error:
        message = str(error).replace("structured_outputs.json_schema", "structured_outputs.json")
        raise ConfigError(message.replace("structured_outputs", "generation.guided_decoding")) from None


def _integer(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"generation.{name}={value!r} must be an integer")
    return value
