"""Conversion of vLLM's configuration to jaxis' terms, with a refusal of what is not supported. Imports no JAX."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jaxis.engine.arguments import EngineArgs
from jaxis.errors import ConfigError, RequestError
from jaxis.integrations.vllm.contract import (
    ADAPTERS_REFUSED,
    PAIR_KEYS,
    POOLING_REFUSED,
    SECOND_START,
    SPECULATIVE_DEFAULTS,
)
from jaxis.integrations.vllm.sampling import translate_params
from jaxis.models.registry import declared_architectures
from jaxis.pooling.classifier_settings import decoders_of_classifiers
from jaxis.pooling.encoders import is_encoder
from jaxis.sampling_params import MAX_LOGPROBS

if TYPE_CHECKING:
    from vllm.config import CacheConfig, LoRAConfig, ModelConfig, SpeculativeConfig, VllmConfig

    from jaxis.vision.processors.processor import ImageProcessor

OWN_SETTINGS = ("dtype", "quantization", "kv_cache_dtype")
"""Keys of additional_config["jaxis"], each an argument of `EngineArgs`."""

_LOAD_FORMATS = {"auto": "auto", "safetensors": "auto", "hf": "auto", "dummy": "dummy"}
_KV_CACHE_DTYPES = ("auto", "bfloat16", "float16")

_NONE_ONLY = {
    "watermark_config": "tokens have no watermark here",
    "diffusion_config": "diffusion models are not supported",
    "kv_transfer_config": "KV transfer is not supported inside vLLM: use jaxis serve --kv-transfer-config",
    "ec_transfer_config": "encoder outputs are not transferred",
    "weight_transfer_config": "weights are not updated inside vLLM: use jaxis.LLM.update_weights",
}
_ONE_ONLY = (
    *("pipeline_parallel_size", "data_parallel_size", "prefill_context_parallel_size"),
    *("decode_context_parallel_size", "nnodes"),
)
# Fields of the model's configuration that must not be set.
_MODEL_UNSET = {
    "logits_processors": "give logit_bias, allowed_token_ids or bad_words to requests",
    "enable_sleep_mode": "use jaxis serve --enable-sleep-mode",
    "enable_prompt_embeds": "prompts are strings or token ids",
    "return_sampling_mask": "leave it out",
    "enable_trace_replay": "leave it out",
    "model_class_overrides": "register the model with jaxis: see docs/adding-a-model.md",
}


# Settings of images and other media that must not be set.
_MEDIA_UNSET = {
    "enable_mm_embeds": "prompts have images, not their embeddings",
    "mm_processor_kwargs": "images are prepared as the checkpoint's files say",
    "media_io_kwargs": "leave it out",
    "mm_encoder_only": "leave it out",
    "mm_encoder_attn_dtype": "the tower computes in the model's type",
}


def check_config(config: VllmConfig) -> None:
    """Raises ConfigError for the first argument of vLLM that jaxis cannot honour."""
    for fault in _faults(config):
        raise ConfigError(f"jaxis inside vLLM: {fault}")
    _ = own_settings(config)


def _faults(config: VllmConfig) -> Iterator[str]:
    for name, reason in _NONE_ONLY.items():
        if getattr(config, name, None) is not None:
            yield f"{name} is given: {reason}"
    for name in _ONE_ONLY:
        if (value := getattr(config.parallel_config, name)) != 1:
            yield f"{name}={value} is not supported, only 1: use jaxis serve"
    if config.model_config is not None:
        yield from _model_faults(config.model_config)
        yield from _feature_faults(config)
    if config.speculative_config is not None:
        yield from _speculative_faults(config.speculative_config)
    yield from _cache_faults(config.cache_config)
    if (load_format := config.load_config.load_format) not in _LOAD_FORMATS:
        yield f"load_format={load_format!r} is not supported, only {', '.join(_LOAD_FORMATS)}"


def _feature_faults(config: VllmConfig) -> Iterator[str]:
    if config.lora_config is not None:
        yield from _adapter_faults(config.lora_config, config.model_config)
    if config.model_config.runner_type == "pooling":
        yield from _pooling_faults(config)
    yield from _image_faults(config)


def _model_faults(model: ModelConfig) -> Iterator[str]:
    known = {*declared_architectures(), *(name for name in model.architectures if is_encoder([name]))}
    names = {*model.architectures, *(decoders_of_classifiers(model.architectures) or ())}
    if not known.intersection(names):
        yield f"architectures={model.architectures} is not supported; docs/models.md lists those that are"
    of_checkpoint = [getattr(each, "quantization_config", None) for each in (model.hf_config, model.hf_text_config)]
    if model.quantization_config is not None or (model.quantization is not None and not any(of_checkpoint)):
        yield (
            f"quantization={model.quantization!r} is not how the checkpoint is quantized: leave it out; jaxis' own is "
            'additional_config={"jaxis": {"quantization": "int8"}}'
        )
    for name, instead in _MODEL_UNSET.items():
        if value := getattr(model, name, None):
            yield f"{name}={value!r} is not supported: {instead}"
    if not 0 <= model.max_logprobs <= MAX_LOGPROBS:
        yield f"max_logprobs={model.max_logprobs} is not supported: give at most {MAX_LOGPROBS}"
    if not isinstance(model.hf_overrides, dict):
        yield "hf_overrides must be a dict of keys of config.json, not a function"


def _image_faults(config: VllmConfig) -> Iterator[str]:
    model, step_tokens = config.model_config, config.scheduler_config.max_num_batched_tokens
    for name, instead in _MEDIA_UNSET.items():
        if value := getattr(model.multimodal_config, name, None):
            yield f"{name}={value!r} is not supported: {instead}"
    processor = image_processor(model)
    if processor is not None and processor.is_bidirectional and step_tokens < model.max_model_len:
        yield (
            f"max_num_batched_tokens={step_tokens} is less than max_model_len={model.max_model_len}, and the tokens of "
            "an image of this model see each other, so a prompt is computed in one step: give as many, or "
            'limit_mm_per_prompt={"image": 0}'
        )


def image_processor(model: ModelConfig) -> ImageProcessor | None:
    """Returns the model's image processor; None if the model takes no images, or is configured to take none."""
    from vllm.multimodal import MULTIMODAL_REGISTRY  # which itself wants a platform

    if not model.supports_multimodal_inputs:
        return None
    info: Any = MULTIMODAL_REGISTRY.get_processing_info(model)
    return info.processor


def _adapter_faults(adapters: LoRAConfig, model: ModelConfig) -> Iterator[str]:
    if adapters.lora_dtype != model.dtype:
        yield f"lora_dtype={adapters.lora_dtype} is not supported, only auto: adapters are computed as the model is"
    for name in ADAPTERS_REFUSED:
        if value := getattr(adapters, name, None):
            yield f"{name}={value!r} is not supported: leave it out"


def _pooling_faults(config: VllmConfig) -> Iterator[str]:
    model, scheduler = config.model_config, config.scheduler_config
    # The pooling of hidden states is defined by the checkpoint's files.
    if asked := sorted(name for name, source in model._pooler_config_sources.items() if source == "user"):
        yield f"pooler_config: {', '.join(asked)} are not supported: leave them out"
    if scheduler.max_num_batched_tokens < model.max_model_len:
        yield (
            f"max_num_batched_tokens={scheduler.max_num_batched_tokens} is less than max_model_len="
            f"{model.max_model_len}, and a prompt is computed in one step: give as many"
        )
    if config.lora_config is not None or config.speculative_config is not None:
        yield "enable_lora and speculative_config are for models that generate text: leave them out"


def _speculative_faults(speculative: SpeculativeConfig) -> Iterator[str]:
    if speculative.method != "ngram":
        yield (
            f"speculative_config: method={speculative.method!r} is not supported inside vLLM, only 'ngram': use jaxis "
            "serve"
        )
    for name, default in SPECULATIVE_DEFAULTS.items():
        if (value := getattr(speculative, name, default)) != default:
            yield f"speculative_config: {name}={value!r} is not supported: leave it out"


def _cache_faults(cache: CacheConfig) -> Iterator[str]:
    if cache.cache_dtype not in _KV_CACHE_DTYPES:
        yield (
            f"kv_cache_dtype={cache.cache_dtype!r} is not supported, only {', '.join(_KV_CACHE_DTYPES)}; jaxis' own "
            'int8 is additional_config={"jaxis": {"kv_cache_dtype": "int8"}}'
        )
    if cache.kv_offloading_size is not None:
        yield "kv_offloading_size is not supported inside vLLM: use jaxis serve --kv-offloading-size"


def own_settings(config: VllmConfig) -> dict[str, Any]:
    """Returns the arguments of `EngineArgs` in additional_config["jaxis"].

    Raises:
      ConfigError: A key is not in OWN_SETTINGS.
    """
    additional = config.additional_config
    given = additional.get("jaxis", {}) if isinstance(additional, dict) else {}
    if not isinstance(given, dict) or given.keys() - set(OWN_SETTINGS):
        raise ConfigError(
            f'additional_config={{"jaxis": {given!r}}} must be a dict of {", ".join(OWN_SETTINGS)}; others are vLLM\'s '
            "arguments"
        )
    return given


def engine_arguments(config: VllmConfig) -> EngineArgs:
    """Returns the engine arguments with which jaxis loads the model.

    Raises:
      ConfigError: `EngineArgs` refuses a value.
    """
    model, cache, scheduler = config.model_config, config.cache_config, config.scheduler_config
    parallel, memory = config.parallel_config, cache.kv_cache_memory_bytes
    arguments: dict[str, Any] = {
        "model": model.model,
        "revision": model.revision,
        "cache_dir": config.load_config.download_dir,
        "dtype": str(model.dtype).removeprefix("torch."),
        "max_model_len": model.max_model_len,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": max(scheduler.max_num_batched_tokens, scheduler.max_num_seqs),
        "kv_cache_memory": None if memory is None else memory * parallel.tensor_parallel_size,  # vLLM's: of a device
        "block_size": cache.block_size,
        "kv_cache_dtype": cache.cache_dtype,
        "enable_prefix_caching": False,  # vLLM's scheduler has its own
        "load_format": _LOAD_FORMATS[config.load_config.load_format],
        "seed": model.seed,
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "enable_expert_parallel": parallel.enable_expert_parallel,
        "hf_overrides": dict(model.hf_overrides) or None,
        "logprobs_mode": model.logprobs_mode,
        "speculative_config": {"num_speculative_tokens": 0},
    }
    max_images = model.multimodal_config.get_limit_per_prompt("image") if model.supports_multimodal_inputs else 0
    arguments["limit_mm_per_prompt"] = {"image": max_images, "video": 0}
    if (adapters := config.lora_config) is not None:
        arguments |= {
            "enable_lora": True,
            "max_loras": adapters.max_loras,
            "max_lora_rank": adapters.max_lora_rank,
            "lora_target_modules": adapters.target_modules,
        }
    if isinstance(model.hf_token, str):
        arguments["token"] = model.hf_token
    return EngineArgs(**(arguments | own_settings(config)))


def check_request(engine_input: Any, params: Any, *, vectors_are_normalized: bool = False) -> None:
    """Raises RequestError for a request that the worker could not honour.

    Args:
      engine_input: vLLM's EngineInput.
      params: vLLM's SamplingParams or PoolingParams.
      vectors_are_normalized: True if the checkpoint normalizes vectors to length 1.
    """
    if engine_input["type"] not in ("token", "multimodal"):
        raise RequestError(
            f"a prompt of the type {engine_input['type']!r} is not supported inside vLLM: prompts are strings or token "
            "ids, and images"
        )
    if engine_input["type"] == "multimodal":
        _check_images(engine_input["mm_kwargs"])
    if hasattr(params, "temperature"):
        _ = translate_params(params)
    else:
        _check_pooling(params, len(engine_input["prompt_token_ids"]), vectors_are_normalized=vectors_are_normalized)


def _check_images(items: Any) -> None:
    """Raises RequestError for data from a client that claims to be a processor's output."""
    from jaxis.integrations.vllm.images import IMAGE, ImageItem  # vLLM's registries need a platform

    if set(items) != {IMAGE} or not all(isinstance(item, ImageItem) for item in items[IMAGE]):
        raise RequestError("are not made by jaxis' processor here: send the images themselves", param="features")


def _check_pooling(params: Any, num_tokens: int, *, vectors_are_normalized: bool) -> None:
    if params.task not in ("embed", "classify"):
        raise RequestError(f"={params.task!r} is not supported inside vLLM, only 'embed' and 'classify'", param="task")
    for name in POOLING_REFUSED:
        if getattr(params, name, None):
            raise RequestError("is not supported inside vLLM: leave it out", param=name)
    if unknown := sorted((params.extra_kwargs or {}).keys() - set(PAIR_KEYS)):
        raise RequestError(f"has {', '.join(unknown)}, which nothing reads: leave them out", param="extra_kwargs")
    place = (params.extra_kwargs or {}).get(SECOND_START)
    if isinstance(place, Sequence) and place[1] != num_tokens:
        raise RequestError("of pairs is not supported: leave it out", param="padding")
    if params.task == "embed" and params.use_activation is False and vectors_are_normalized:
        raise RequestError("=False is not supported: the checkpoint's vectors have length 1", param="use_activation")
