"""Model of a run and how it is loaded, under Oumi's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from jaxis.config.parameter_group import ParameterGroup
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
      trust_remote_code: No effect: no code of a checkpoint is ever run, because jaxis has the families itself.
      adapter_model: Folder of an adapter in PEFT's format, which is merged into the weights while loading.
      adapter_trainable: Refused: nothing is trained.
      tokenizer_name: Only `model_name` again: the tokenizer is the checkpoint's.
      tokenizer_kwargs, processor_kwargs: Refused unless empty.
      tokenizer_pad_token, attn_implementation, compile, device_map, enable_liger_kernel, freeze_layers, text_only:
        No effect.
      tool_call_parser: Format of the model's tool calls, or "auto" to detect it in the chat template. Calls and
        reasoning are then separated from the message's text. None leaves them in the text.
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

    WITHOUT_EFFECT: ClassVar[Mapping[str, str]] = {
        "trust_remote_code": "no code of a checkpoint is run, jaxis has the model itself",
        "tokenizer_pad_token": "batches are not padded",
        "attn_implementation": "jaxis has attention kernels of its own",
        "compile": "every program is compiled",
        "enable_liger_kernel": "jaxis has kernels of its own",
        "freeze_layers": "nothing is trained",
        "text_only": "of a model that also sees or hears, the text part is all that runs",
        "device_map": "model_kwargs.tensor_parallel_size spreads a model over devices",
    }
    REFUSED: ClassVar[Mapping[str, str]] = {
        "adapter_trainable": "nothing is trained; leave it out",
        "tokenizer_kwargs": "the tokenizer is read as the checkpoint's files describe it; change those",
        "processor_kwargs": "the tokenizer is read as the checkpoint's files describe it; change those",
        "shard_for_eval": "model_kwargs.tensor_parallel_size spreads a model over devices",
    }

    @classmethod
    def section(cls) -> str:
        return "model"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("model_name", "model_revision", "chat_template", "tool_call_parser", "adapter_model"):
            self.check(name, str, "a string", optional=True)
        self.check("load_pretrained_weights", bool, "true or false")
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
