"""Model of a run and how it is loaded, under Oumi's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from jaxis.config.parameter_group import ParameterGroup, Unused, no_effect, refused
from jaxis.engine.arguments import EngineArgs
from jaxis.errors import ConfigError
from jaxis.parsing.tool_parsers import get_tool_parser

_DTYPES = {
    "auto": "auto",
    **dict.fromkeys(("float32", "f32", "float"), "float32"),
    **dict.fromkeys(("float16", "f16", "half"), "float16"),
    **dict.fromkeys(("bfloat16", "bf16"), "bfloat16"),
}
_QUANTIZATION = {"load_in_8bit": "int8", "load_in_4bit": "int4"}
# ModelParams has its own fields for these.
_NOT_IN_MODEL_KWARGS = {"model", "dtype", "max_model_len", "load_format", "revision", "adapter", "merge"}


@dataclass(frozen=True, kw_only=True)
class ModelParams(ParameterGroup):
    """Model, and how it is loaded.

    Attributes:
      model_name: Folder or Hub id; None: the embedded demonstration model.
      model_max_length: Limit of a request's tokens; None: the checkpoint's.
      model_revision: Branch, tag or commit of a Hub id.
      torch_dtype_str: "auto", "float32", "bfloat16" or "float16", or one of Oumi's other names for these.
      load_pretrained_weights: False for random weights.
      chat_template: Jinja source, a file with it, or the name of a template: one of the checkpoint's, or one of
        jaxis's, such as chatml.
      chat_template_kwargs: More variables for the chat template, such as enable_thinking.
      model_kwargs: Further arguments of `jaxis.LLM`, such as quantization, kv_cache_dtype, tensor_parallel_size,
        max_num_seqs; also load_in_8bit and load_in_4bit.
      adapter_model: Folder of an adapter in PEFT's format, which is merged into the weights while loading.
      tokenizer_name: Only `model_name` again: the tokenizer is the checkpoint's.
      tool_call_parser: Format of the model's tool calls, or "auto" to detect it in the chat template. Calls and
        reasoning are then separated from the message's text. None leaves them in the text.
    """

    model_name: str | None = None
    model_max_length: int | None = None
    model_revision: str | None = None
    torch_dtype_str: str = "auto"
    load_pretrained_weights: bool = True
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    model_kwargs: dict[str, Any] = field(default_factory=dict)
    adapter_model: str | None = None
    tokenizer_name: str | None = None
    tool_call_parser: str | None = None

    UNUSED: ClassVar[Mapping[str, Unused]] = {
        "trust_remote_code": no_effect("no code of a checkpoint is run, jaxis has the model itself"),
        "tokenizer_pad_token": no_effect("batches are not padded"),
        "attn_implementation": no_effect("jaxis has attention kernels of its own"),
        "compile": no_effect("every program is compiled"),
        "enable_liger_kernel": no_effect("jaxis has kernels of its own"),
        "freeze_layers": no_effect("nothing is trained"),
        "text_only": no_effect("of a model that also sees or hears, the text part is all that runs"),
        "device_map": no_effect("model_kwargs.tensor_parallel_size spreads a model over devices", "auto"),
        "adapter_trainable": refused("nothing is trained; leave it out"),
        "tokenizer_kwargs": refused("the tokenizer is read as the checkpoint's files describe it; change those"),
        "processor_kwargs": refused("the tokenizer is read as the checkpoint's files describe it; change those"),
        "shard_for_eval": refused("model_kwargs.tensor_parallel_size spreads a model over devices"),
    }

    @classmethod
    def section(cls) -> str:
        return "model"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("model_name", "model_revision", "chat_template", "tool_call_parser", "adapter_model"):
            self.check(name, str, "a string", optional=True)
        self.check("torch_dtype_str", str, "a string such as bfloat16")
        self.check("model_kwargs", Mapping, "a mapping of arguments of jaxis.LLM")
        if self.tool_call_parser not in (None, "auto"):
            try:
                get_tool_parser(self.tool_call_parser)
            except ConfigError as error:
                raise ConfigError(f"model.{error}") from None
        self.check("chat_template_kwargs", Mapping, "a mapping of variables of the chat template", optional=True)
        if self.tokenizer_name not in (None, self.model_name):
            self.refuse("tokenizer_name", "the tokenizer is the one beside the weights; put the other one there")


def to_llm_arguments(params: ModelParams) -> dict[str, Any]:
    """Returns keyword arguments of `LLM` without model and revision; raises ConfigError for refused fields."""
    if params.torch_dtype_str not in _DTYPES:
        raise ConfigError(f"model.torch_dtype_str={params.torch_dtype_str!r} must be one of {', '.join(_DTYPES)}")
    arguments: dict[str, Any] = {"dtype": _DTYPES[params.torch_dtype_str]}
    if params.model_max_length is not None:
        arguments["max_model_len"] = params.model_max_length
    if not params.load_pretrained_weights:
        arguments["load_format"] = "dummy"
    if params.adapter_model is not None:
        arguments |= {"adapter": params.adapter_model, "merge": True}
    known = sorted({argument.name for argument in fields(EngineArgs)} - _NOT_IN_MODEL_KWARGS)
    for name, value in params.model_kwargs.items():
        if name in _QUANTIZATION:
            if value and "quantization" in {**params.model_kwargs, **arguments}:
                raise ConfigError(f"model.model_kwargs.{name} and another quantization were both given: leave one out")
            if value:
                arguments["quantization"] = _QUANTIZATION[name]
        elif name in known:
            arguments[name] = value
        else:
            raise ConfigError(f"model.model_kwargs.{name} is not known; known: {', '.join([*known, *_QUANTIZATION])}")
    return arguments
