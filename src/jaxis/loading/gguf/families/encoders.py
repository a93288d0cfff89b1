"""BERT and Nomic's BERT without experts."""

from __future__ import annotations

from jaxis.loading.gguf.common_facts import BASE, DENSE, LAYER_NORM
from jaxis.loading.gguf.config_reader import ConfigReader, Values
from jaxis.loading.gguf.rope_keys import rope
from jaxis.loading.gguf.table import GGUF, Fact, constant
from jaxis.loading.gguf.tensor_names import PACKED, GGUFNames

_NORMS = {"attn_output_norm": "post_attention_layernorm", "layer_output_norm": "post_feedforward_layernorm"}
_EMBEDDINGS = {
    "token_types": "model.token_type_embeddings=",
    "token_embd_norm": "model.embeddings_norm",
    "position_embd": "model.position_embeddings=",
}


def _types(reader: ConfigReader) -> Values:
    return {"type_vocab_size": reader.rows_of("token_types.weight")}


def _positions(reader: ConfigReader) -> Values:
    """The file's table of positions lacks the rows that no position uses."""
    return {"max_position_embeddings": reader.rows_of("position_embd.weight")}


_ENCODER = (BASE, DENSE, LAYER_NORM, Fact(_types))

GGUFS = (
    # BERT, or RoBERTa.
    GGUF(
        ("bert", "bert", "BertModel"),
        (_ENCODER, Fact(_positions), constant("hidden_act", "gelu")),
        GGUFNames(_NORMS, top_level=_EMBEDDINGS),
        is_causal=False,
    ),
    GGUF(
        ("nomic-bert", "nomic_bert", "NomicBertModel"),
        (_ENCODER, rope(1000.0), constant("hidden_act", "silu")),
        GGUFNames(PACKED | _NORMS, top_level=_EMBEDDINGS),
        is_causal=False,
    ),
)
