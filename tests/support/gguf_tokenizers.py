"""Vocabularies as the metadata of GGUF files, made from tokenizers of other layouts."""

import io
import json

import gguf
import sentencepiece

from tests.support.gguf_models import add_key
from tests.support.tokenizer_families import CORPUS

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
# llama.cpp needs a model's shape to open a file, if only for the vocabulary.
_SHAPE = {
    "context_length": 64,
    "embedding_length": 8,
    "block_count": 1,
    "feed_forward_length": 8,
    "attention.head_count": 1,
    "rope.dimension_count": 8,
}


def byte_level_metadata(backend, pre, **keys):
    """Metadata of a `tokenizers` backend with byte-level BPE; `keys` are further keys under tokenizer.ggml."""
    added = backend.get_added_tokens_decoder()
    size = backend.get_vocab_size()
    model = json.loads(backend.to_str())["model"]
    types = [NORMAL if i not in added else CONTROL if added[i].special else USER_DEFINED for i in range(size)]
    return _metadata(
        model="gpt2",
        pre=pre,
        tokens=[backend.id_to_token(i) for i in range(size)],
        token_type=types,
        merges=[" ".join(merge) for merge in model["merges"]],
        **keys,
    )


def train_sentencepiece(**options):
    """A small SentencePiece BPE model of the corpus with byte fallback."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        **{
            "model_type": "bpe",
            "vocab_size": 900,
            "byte_fallback": True,
            "hard_vocab_limit": False,
            "normalization_rule_name": "identity",
            "remove_extra_whitespaces": False,
            "allow_whitespace_only_pieces": True,
            "minloglevel": 2,
            **options,
        },
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def piece_type(processor, i):
    kinds = [("is_unknown", UNKNOWN), ("is_control", CONTROL), ("is_byte", BYTE), ("is_unused", UNUSED)]
    return next((kind for name, kind in kinds if getattr(processor, name)(i)), NORMAL)


def sentencepiece_metadata(processor, user_defined=(), **keys):
    """Metadata of a SentencePiece model, with user-defined pieces as llama.cpp's converter writes them."""
    size = processor.get_piece_size()
    tokens = [processor.id_to_piece(i) for i in range(size)]
    scores = [processor.get_score(i) for i in range(size)]
    types = [piece_type(processor, i) for i in range(size)]
    for i, token in enumerate(tokens):
        if token in user_defined:
            tokens[i], scores[i], types[i] = token.replace("▁", " "), -1000.0, USER_DEFINED
    return _metadata(model="llama", tokens=tokens, scores=scores, token_type=types, **keys)


def _metadata(**keys):
    named = {"chat_template", "architecture"}
    metadata = {f"tokenizer.ggml.{name}": value for name, value in keys.items() if name not in named}
    if "chat_template" in keys:
        metadata["tokenizer.chat_template"] = keys["chat_template"]
    return {"general.architecture": keys.get("architecture", "llama"), **metadata}


def write_gguf(path, metadata):
    """Writes a file that holds a vocabulary only."""
    architecture = metadata["general.architecture"]
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in _SHAPE.items():
        writer.add_uint32(f"{architecture}.{name}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-6)
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        add_key(writer, key, value if isinstance(value, int | str) else [_encoded(element) for element in value])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def _encoded(element):
    return element.encode("utf-8", errors="surrogateescape") if isinstance(element, str) else element
