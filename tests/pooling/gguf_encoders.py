"""Writes an encoder's folder as llama.cpp's converter would write it in GGUF (conversion/bert.py and gemma.py)."""

from __future__ import annotations

import json

import gguf
import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from tests.support.gguf_models import add_key

ARCHITECTURES = {
    "BertModel": "bert",
    "RobertaModel": "bert",
    "XLMRobertaModel": "bert",
    "NomicBertModel": "nomic-bert",
    "Gemma3TextModel": "gemma-embedding",
}
_ARCHS = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
CONTROL, NORMAL = 3, 1


def write_encoder(folder, path, *, pooling_type=1, quantize=lambda *_: None, keys=None, tokenizer=None):
    """Writes a GGUF file; see `write_gguf`. Dense modules come along, as with --sentence-transformers-dense-modules.

    The tokenizer's keys are those of the folder's WordPiece tokenizer unless they are given.
    """
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[config["architectures"][0]]
    is_gemma = architecture == "gemma-embedding"
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    unused = ("pooler.", "embeddings.position_ids")
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(unused)}
    first_position = config["pad_token_id"] + 1 if "Roberta" in config["architectures"][0] else 0
    values = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"] - first_position,
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "pooling_type": pooling_type,
    }
    if is_gemma:
        ropes = config["rope_parameters"]
        values |= {
            "attention.head_count_kv": config["num_key_value_heads"],
            "attention.key_length": config["head_dim"],
            "attention.value_length": config["head_dim"],
            "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
            "attention.sliding_window": config["sliding_window"],
            "rope.freq_base": float(ropes["full_attention"]["rope_theta"]),
            "rope.freq_base_swa": float(ropes["sliding_attention"]["rope_theta"]),
        }
    else:
        values |= {"attention.layer_norm_epsilon": config["layer_norm_eps"], "attention.causal": False}
    if architecture == "nomic-bert":
        values["rope.freq_base"] = float(config["rope_parameters"]["rope_theta"])
    writer = gguf.GGUFWriter(path, architecture)
    for number in (2, 3):
        if (dense := folder / f"{number}_Dense").is_dir():
            tensors[f"dense_{number}.weight"] = weight = load_file(dense / "model.safetensors")["linear.weight"]
            values |= {f"dense_{number}_feat_in": weight.shape[1], f"dense_{number}_feat_out": weight.shape[0]}
    for key, value in (values | (keys or {})).items():
        add_key(writer, f"{architecture}.{key}", value)
    if not is_gemma:
        add_key(writer, "tokenizer.ggml.token_type_count", config.get("type_vocab_size", 2))
        if tokenizer is None:
            _add_wordpiece(writer, Tokenizer.from_file(str(folder / "tokenizer.json")))
    for key, value in (tokenizer or {}).items():
        if key.startswith("tokenizer."):
            add_key(writer, key, value)
    names = gguf.get_tensor_name_map(_ARCHS[architecture], config["num_hidden_layers"])
    for name, tensor in tensors.items():
        stored = names.get_name(
            name if not is_gemma or name.startswith("dense") else f"model.{name}", (".weight", ".bias")
        )
        if name == "embeddings.position_embeddings.weight":
            tensor = tensor[first_position:]
        if is_gemma and name.endswith("norm.weight"):
            tensor = tensor + 1
        rows = quantize(stored, tensor) if tensor.ndim > 1 else None
        if rows is None:
            writer.add_tensor(stored, np.ascontiguousarray(tensor, np.float32))
        else:
            writer.add_tensor(stored, rows[0], raw_dtype=rows[1])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_wordpiece(writer, backend):
    special = {i: token.content for i, token in backend.get_added_tokens_decoder().items() if token.special}
    tokens = [backend.id_to_token(i) for i in range(backend.get_vocab_size())]
    stored = [
        token if i in special else token[2:] if token.startswith("##") else f"\u2581{token}"
        for i, token in enumerate(tokens)
    ]
    types = [CONTROL if i in special else NORMAL for i in range(len(tokens))]
    for key, value in (("model", "bert"), ("pre", "jina-v2-en"), ("tokens", stored), ("token_type", types)):
        add_key(writer, f"tokenizer.ggml.{key}", value)
    roles = {"unknown": "[UNK]", "seperator": "[SEP]", "padding": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}
    for role, token in roles.items():
        add_key(writer, f"tokenizer.ggml.{role}_token_id", tokens.index(token))
