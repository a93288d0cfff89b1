"""Writes a GGUF model as a folder in Hugging Face format, which transformers loads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxis.bringup.convert.dequantized import DequantizedTensors
from jaxis.bringup.convert.partial_folder import (
    Conversion,
    ConversionProgress,
    OnProgress,
    partial_folder,
    write_safetensors,
)
from jaxis.errors import CheckpointError
from jaxis.loading.checkpoint_files import MAX_SHARD_BYTES, check_destination
from jaxis.loading.gguf.generation import gguf_generation_defaults
from jaxis.loading.gguf.gguf_checkpoint import GGUFCheckpoint
from jaxis.loading.gguf_files import find_shards
from jaxis.tokenizer import Tokenizer
from jaxis.tokenizer.config import DEFAULT_TEMPLATE

DTYPES: Mapping[str, np.dtype | None] = {
    "auto": None,
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}


def convert_from_gguf(
    source: Path,
    destination: Path,
    dtype: str = "auto",
    *,
    on_note: Callable[[str], None] | None = None,
    on_progress: OnProgress | None = None,
) -> Conversion:
    """Writes the GGUF model `source` as config.json, generation_config.json, tokenizer and safetensors files.

    `dtype` is a name in DTYPES; "auto" loses nothing, see `DequantizedTensors`. `on_note` gets, before anything is
    written, the tensors that take more bytes and the config's assumptions; `on_progress` gets (bytes done, bytes in
    all).

    Raises:
      ConfigError: The model is not supported.
      CheckpointError: The source cannot be read, or the destination exists or cannot be written.
    """
    check_destination(destination)
    note = on_note or (lambda _: None)
    with GGUFCheckpoint(source) as checkpoint:
        tokenizer = Tokenizer.from_path(checkpoint.path)
        tensors = DequantizedTensors(checkpoint, DTYPES[dtype])
        for assumption in checkpoint.assumptions:
            note(f"the file does not say, and config.json will: {assumption}")
        if tensors.num_dequantized:
            stored, floats = (nbytes / 1e6 for nbytes in tensors.dequantized_bytes)
            wide = "float32" if dtype == "auto" else dtype
            note(
                f"{tensors.num_dequantized} quantized tensors of {stored:.1f} MB become {wide}, {floats:.1f} MB; "
                f"{tensors.total_bytes / 1e6:.1f} MB will be written"
            )
        with partial_folder(destination, _fingerprint(source, dtype)) as partial:
            progress = ConversionProgress(tensors, on_progress)
            num_files = write_safetensors(partial, tensors, MAX_SHARD_BYTES, progress)
            _write_json(partial / "config.json", _config(checkpoint, tensors, tokenizer))
            write_settings(checkpoint.path, partial, tokenizer)
    return Conversion(len(checkpoint.names()), tensors.total_bytes, progress.resumed_bytes, num_files)


def write_settings(source: Path, folder: Path, tokenizer: Tokenizer | None) -> None:
    """Writes generation_config.json and the tokenizer of a GGUF file, which may have none."""
    _write_json(folder / "generation_config.json", _generation_config(source, tokenizer))
    if tokenizer is not None:
        _write_tokenizer(folder, tokenizer)


def _fingerprint(source: Path, dtype: str) -> str:
    files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in find_shards(source)]
    return hashlib.sha256(json.dumps([files, dtype, MAX_SHARD_BYTES]).encode()).hexdigest()


def _config(checkpoint: GGUFCheckpoint, tensors: DequantizedTensors, tokenizer: Tokenizer | None) -> dict[str, Any]:
    values = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
    if values["model_type"] == "gpt_oss":  # whose class assumes a yarn rope if a config has none
        values.setdefault("rope_scaling", {"rope_type": "default"})
    if tokenizer is not None:
        values |= _token_ids(tokenizer)
    return _without_nulls(values) | {"dtype": tensors.widest}


def _without_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves out nulls in nested objects: there, transformers takes them for values."""
    return {
        key: {name: inner for name, inner in value.items() if inner is not None} if isinstance(value, dict) else value
        for key, value in values.items()
    }


def _token_ids(tokenizer: Tokenizer) -> dict[str, Any]:
    ends = sorted(tokenizer.stop_token_ids)
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": ends[0] if len(ends) == 1 else ends or tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return {name: value for name, value in ids.items() if value is not None}


def _generation_config(path: Path, tokenizer: Tokenizer | None) -> dict[str, Any]:
    settings = gguf_generation_defaults(path)
    samples = {"do_sample": True} if settings else {}
    return samples | settings | ({} if tokenizer is None else _token_ids(tokenizer))


def _write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    (folder / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    _write_json(folder / "tokenizer_config.json", config | tokenizer.special_tokens)
    for name, template in tokenizer.chat_templates.items():
        if name == DEFAULT_TEMPLATE:
            (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
            continue
        if Path(name).name != name:
            raise CheckpointError(f"the file has a chat template called {name!r}, which no file can be called")
        (folder / "additional_chat_templates").mkdir(exist_ok=True)
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text(template, encoding="utf-8")


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
