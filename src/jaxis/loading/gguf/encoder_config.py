"""Conversion of a GGUF file's keys to config.json for encoders, and the pooling of their hidden states."""

from __future__ import annotations

from jaxis.errors import ConfigError
from jaxis.loading.gguf.config_keys import Keys
from jaxis.loading.gguf.config_reader import ConfigReader, Values
from jaxis.loading.gguf_config_keys import DENSE_SIZES, POOLING_MODE

_POOLING_MODES = {1: "mean", 2: "cls", 3: "last"}


def bert(reader: ConfigReader) -> Values:
    """BERT, or RoBERTa. The file's table of positions lacks the rows that no position uses."""
    values = _encoder(reader, "BertModel", "bert") | {"hidden_act": "gelu"}
    return {**values, "max_position_embeddings": _rows(reader, "position_embd.weight")}


def nomic_bert(reader: ConfigReader) -> Values:
    """Nomic's BERT without experts."""
    return {**_encoder(reader, "NomicBertModel", "nomic_bert"), **reader.rope(theta=1000.0), "hidden_act": "silu"}


def pooling_values(keys: Keys) -> Values:
    """Returns the pooling of a model's hidden states, if the file describes it; ConfigError if it is not supported."""
    kind = keys.get("pooling_type", 0)
    if kind not in (0, *_POOLING_MODES):
        raise ConfigError(
            f"{keys.source} has {keys.architecture}.pooling_type = {kind}, of which 1 (mean), 2 (first token) and 3 "
            "(last token) are supported: use the original checkpoint"
        )
    sizes = {
        name: (keys.integer(f"{name}_feat_in"), keys.integer(f"{name}_feat_out"))
        for name in ("dense_2", "dense_3")
        if keys.has_tensor(f"{name}.weight")
    }
    return ({POOLING_MODE: _POOLING_MODES[kind]} if kind else {}) | ({DENSE_SIZES: sizes} if sizes else {})


def _encoder(reader: ConfigReader, architecture: str, model_type: str) -> Values:
    return {
        **reader.base(architecture, model_type),
        **reader.dense(),
        "layer_norm_eps": float(reader.keys.require("attention.layer_norm_epsilon")),
        "type_vocab_size": _rows(reader, "token_types.weight"),
    }


def _rows(reader: ConfigReader, name: str) -> int:
    tensor = reader.keys.tensors.get(name)
    if tensor is None or len(tensor.shape) != 2:
        raise ConfigError(f"{reader.keys.source} has no tensor {name}: use another file of the model")
    return tensor.shape[0]
