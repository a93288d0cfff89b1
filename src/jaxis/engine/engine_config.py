"""The engine's configuration, made from its arguments and a checkpoint's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxis.config import CacheConfig, LoadConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from jaxis.config.checkpoint_values import DEFAULT_CONTEXT_LENGTH, checkpoint_dtype, trained_context_length
from jaxis.config.hf_config import HFConfig
from jaxis.config.quantization import QuantizationConfig
from jaxis.config.rope_config import rope_config
from jaxis.engine.argument_groups.fields import argument_infos
from jaxis.engine.arguments import EngineArgs
from jaxis.errors import ConfigError
from jaxis.kernels import native
from jaxis.loading.open_checkpoint import TensorListing
from jaxis.loading.packed_name import is_packed
from jaxis.loading.safetensors import TensorInfo
from jaxis.models.tied_tables import tables_of
from jaxis.packed.folder import PackedFolder
from jaxis.quantization.arguments import requested_config
from jaxis.quantization.rules import RuleQuantizationConfig
from jaxis.quantization.wrappers import Dequantize, PackingConfig

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
DEFAULT_DTYPE = "bfloat16"  # of a checkpoint whose config.json names none
KV_CACHE_DTYPES = {**DTYPES, "int8": jnp.int8}
DEFAULT_MAX_NUM_SEQS = 64
DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048
CPU_DEFAULT_MAX_NUM_BATCHED_TOKENS = 512


def make_vllm_config(
    args: EngineArgs,
    path: Path,
    hf_config: HFConfig,
    platform: str,
    stored: Mapping[str, TensorInfo] | None = None,
    packed: PackedFolder | None = None,
) -> VllmConfig:
    """Makes the configuration of an engine on a platform such as "cpu".

    The checkpoint's tensors, `stored`, are listed if needed and not given; `packed` has its weights if they are packed,
    and were opened before.

    Raises:
      ConfigError: The arguments and the checkpoint do not fit together.
    """
    quantization = requested_config(args.requested_quantization)
    speculative = args.parsed_speculative_config
    predicts = speculative is not None and speculative.method == "mtp"
    has_weights = stored != {} and args.load_format != "dummy" and not is_packed(path)
    if is_packed(path) and args.load_format != "dummy":
        packed = packed or PackedFolder(path)
        _check_packed(packed, args, hf_config, platform, stored, predicts=predicts)
    tables = tables_of(hf_config, path, changes := args.tensor_changes, has_weights=has_weights)
    return VllmConfig(
        model_config=ModelConfig(
            model=str(path),
            hf_config=tables.config,
            dtype=_dtype(args.dtype, hf_config, platform),
            max_model_len=_max_model_len(args.max_model_len, hf_config),
            **_fields_of(ModelConfig, args),
        ),
        cache_config=CacheConfig(
            cache_dtype=_kv_cache_dtype(args, hf_config),
            kv_cache_memory_bytes=args.kv_cache_memory_bytes,
            **_fields_of(CacheConfig, args),
        ),
        scheduler_config=SchedulerConfig(
            *_step_limits(args.max_num_seqs, args.max_num_batched_tokens, platform),
            **_fields_of(SchedulerConfig, args),
        ),
        parallel_config=ParallelConfig(**_fields_of(ParallelConfig, args)),
        load_config=LoadConfig(
            prediction_layer=predicts,
            tensor_changes=changes,
            splits_tied=tables.are_split,
            **_fields_of(LoadConfig, args),
        ),
        quant_config=packed
        or make_quant_config(args, TensorListing(path) if stored is None else stored, hf_config, quantization),
        speculative_config=speculative,
    )


def _fields_of(config: type, args: EngineArgs) -> dict[str, Any]:
    """Returns the arguments that are unchanged fields of a part of the configuration."""
    infos = argument_infos().items()
    return {name: getattr(args, name) for name, info in infos if info.config == config.__name__}


def _kv_cache_dtype(args: EngineArgs, hf_config: HFConfig) -> DTypeLike | None:
    """Returns the requested type; else the model's or, if neither was requested, a checkpoint's own bfloat16.

    On CPU a model computes in float32 by default, whatever its checkpoint's type: a bfloat16 cache is what the
    checkpoint was trained with, and half the memory to read. The native kernels have no float16 cache.
    """
    if args.kv_cache_dtype != "auto":
        return KV_CACHE_DTYPES[args.kv_cache_dtype]
    if args.dtype == "auto" and native.usable() and _checkpoint_dtype(hf_config) == "bfloat16":
        return jnp.bfloat16
    if args.dtype == "float16" and native.usable() and args.num_devices == 1:
        return jnp.float32
    return None


def check_quant_method(expected: str | None, hf_config: HFConfig) -> None:
    """Raises a ConfigError if the checkpoint is not quantized in the expected format."""
    found = (hf_config.read_object("quantization_config") or {}).get("quant_method")
    # Some formats add the name of a variant: modelopt_fp4.
    if expected is not None and found != expected and not str(found).startswith(f"{expected}_"):
        raise ConfigError(
            f"quantization={expected!r}, but {hf_config.source} says {found or 'that the weights are not quantized'}: "
            "leave it out; how a checkpoint is quantized is read from its config.json"
        )


def _checkpoint_dtype(hf_config: HFConfig) -> str:
    return checkpoint_dtype(hf_config) or DEFAULT_DTYPE


def make_quant_config(
    args: EngineArgs,
    stored: Mapping[str, TensorInfo],
    hf_config: HFConfig,
    choice: RuleQuantizationConfig | Dequantize | None,
) -> QuantizationConfig | None:
    """Returns the storage of weights, by the checkpoint and the user's choice; None leaves them as they are."""
    if args.load_format != "dummy":
        # All formats, of which a packed folder needs none.
        from jaxis.quantization.checkpoint_formats import quantization_of_checkpoint

        config = quantization_of_checkpoint(hf_config, choice, stored)
    else:  # random weights are not quantized
        config = None if isinstance(choice, Dequantize) else choice
    shares_layers = args.num_devices > args.pipeline_parallel_size
    return PackingConfig(config) if native.usable() and not shares_layers else config


def _check_packed(
    packed: PackedFolder,
    args: EngineArgs,
    hf_config: HFConfig,
    platform: str,
    stored: Mapping[str, TensorInfo] | None,
    *,
    predicts: bool,
) -> None:
    """Raises ConfigError if the engine would have other weights than a packed folder's."""
    if not native.usable() or args.num_devices > 1:
        raise ConfigError(
            f"{packed.folder} is packed for the native kernels on one CPU device: give the model that it was packed "
            "from"
        )
    dtype = np.dtype(_dtype(args.dtype, hf_config, platform)).name
    quantization = args.requested_quantization
    asked = {
        "other weights": stored is not None,
        "other quantization": quantization is not None and bool(quantization.rules or quantization.dequantize),
        f"dtype={dtype!r}": dtype != packed.dtype,
        "changed tensors": args.tensor_changes is not None,
        "layers that predict later tokens": predicts,
    }
    if wrong := [what for what, is_asked in asked.items() if is_asked]:
        raise ConfigError(
            f"{packed.folder} is packed, and {wrong[0]} cannot be had of it: leave that out, or give the model that it "
            "was packed from"
        )


def _dtype(name: str, hf_config: HFConfig, platform: str) -> DTypeLike:
    if name == "auto":
        # XLA's CPU backend upcasts low-precision weights on every use: float32 is the fastest there.
        name = "float32" if platform == "cpu" else _checkpoint_dtype(hf_config)
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r} in config.json is not supported; give dtype: {', '.join(DTYPES)}")
    return DTYPES[name]


def _step_limits(max_num_seqs: int | None, max_num_batched_tokens: int | None, platform: str) -> tuple[int, int]:
    """Returns the most sequences and tokens of a step. All sequences must be able to decode in one step.

    A limit that was not given follows from the other.
    """
    if max_num_batched_tokens is None:
        default = CPU_DEFAULT_MAX_NUM_BATCHED_TOKENS if platform == "cpu" else DEFAULT_MAX_NUM_BATCHED_TOKENS
        max_num_batched_tokens = max(default, max_num_seqs or 0)
    if max_num_seqs is None:
        max_num_seqs = min(DEFAULT_MAX_NUM_SEQS, max_num_batched_tokens)
    if max_num_seqs > max_num_batched_tokens:
        raise ConfigError(
            f"max_num_seqs={max_num_seqs} is more than max_num_batched_tokens={max_num_batched_tokens}, so not every "
            "running sequence could decode in a step: lower the one or raise the other"
        )
    return max_num_seqs, max_num_batched_tokens


def _max_model_len(wanted: int | None, hf_config: HFConfig) -> int:
    trained = trained_context_length(hf_config)
    if trained is None:
        return wanted or DEFAULT_CONTEXT_LENGTH
    if wanted is None:
        return min(trained, _short_context_len(hf_config) or trained)
    if wanted > trained:
        raise ConfigError(
            f"max_model_len={wanted} is more than the {trained} positions of the checkpoint; lower it, or raise "
            "max_position_embeddings through hf_overrides if the model is known to go on"
        )
    return wanted


def _short_context_len(hf_config: HFConfig) -> int | None:
    """Returns LongRoPE's longest sequence with the short frequencies; None for other ropes.

    A paged engine has one set of frequencies for all requests; the long ones are worse for short sequences.
    """
    # A copy, so that keys read here do not count as read by the model.
    text_config = hf_config.get_text_config()
    values = text_config.to_dict()
    kinds = [kind for kind, of_kind in (values.get("rope_parameters") or {}).items() if isinstance(of_kind, dict)]
    kind = kinds[0] if kinds and "full_attention" not in kinds else "full_attention"
    rope = rope_config(HFConfig(values, source=text_config.source), kind)
    return rope.original_max_position_embeddings if rope.rope_type == "longrope" else None
