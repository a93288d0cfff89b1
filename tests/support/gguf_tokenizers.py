"""Vocabularies as the metadata of GGUF files, made from tokenizers of other layouts."""

import io
import json
import random

import gguf
import sentencepiece
import transformers

from jaxis.tokenizer.sentencepiece_file import SentencePieceModel
from tests.support.gguf_models import add_key
from tests.support.tokenizer_families import CORPUS

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
MULTILINGUAL = """
the quick brown foxes jumped over lazy dogs , running quickly . straße größer schön Übermut français déjà garçon œuvre
мир мирный работа работать хорошо לשלום עולם עברית مرحبا بالعالم العربية नमस्ते दुनिया हिन्दी สวัสดีชาวโลก ภาษาไทย
東京都に住んでいます 日本語 カタカナ 我们 学习 中文 한국어 안녕하세요 세계 xin chào Việt Nam 12345 3.14 e-mail x=y+1
"""
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


def train_sentencepiece(corpus=CORPUS, **options):
    """A small SentencePiece BPE model of a corpus with byte fallback."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(corpus),
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


def xlm_roberta(folder):
    """A small tokenizer of XLM-RoBERTa's kind in transformers, and its metadata from sentencepiece.bpe.model."""
    options = {"model_type": "unigram", "byte_fallback": False, "normalization_rule_name": "nmt_nfkc"}
    options |= {"remove_extra_whitespaces": True, "allow_whitespace_only_pieces": False, "vocab_size": 500}
    words, choose = MULTILINGUAL.split(), random.Random(0)
    # Also of parts of words, so that there are many ways to cut one.
    parts = [word[start : start + size] for word in words for start in range(len(word)) for size in (2, 3, 5)]
    corpus = [" ".join(choose.choices(words, k=4) + choose.choices(parts, k=8)) for _ in range(800)]
    processor = train_sentencepiece(corpus, **options, character_coverage=0.99)
    path = folder / "sentencepiece.bpe.model"
    path.write_bytes(processor.serialized_model_proto())
    charsmap = SentencePieceModel.from_file(path).charsmap
    size = processor.get_piece_size()
    pieces = [(processor.id_to_piece(i), processor.get_score(i), piece_type(processor, i)) for i in range(size)]
    starts = ["<s>", "<pad>", "</s>", "<unk>"]
    vocabulary = [(token, 0.0) for token in starts] + [piece[:2] for piece in pieces[3:]] + [("<mask>", 0.0)]
    reference = transformers.XLMRobertaTokenizer(vocab=vocabulary, _spm_precompiled_charsmap=charsmap)
    # The converter fills up to the table's rows, moves all by one, and has no row for <mask>.
    rows = [*zip(starts, [0.0] * 4, [CONTROL, CONTROL, CONTROL, UNKNOWN], strict=True), *pieces[3:]]
    rows.append((f"[PAD{size}]", -10000.0, UNUSED))
    tokens, scores, types = map(list, zip(*rows, strict=True))
    ids = {"bos_token_id": 0, "eos_token_id": 2, "unknown_token_id": 3, "padding_token_id": 1, "seperator_token_id": 2}
    return reference, _metadata(
        model="t5",
        pre="default",
        architecture="bert",
        tokens=tokens,
        scores=scores,
        token_type=types,
        add_space_prefix=True,
        remove_extra_whitespaces=True,
        precompiled_charsmap=list(charsmap),
        add_bos_token=True,
        add_eos_token=True,
        **ids,
    )


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
