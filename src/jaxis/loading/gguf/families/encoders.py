"""BERT and Nomic's BERT without experts."""

from __future__ import annotations

from jaxis.loading.gguf.common_facts import BASE, DENSE, LAYER_NORM
from jaxis.loading.gguf.config_reader import ConfigReader, Values
from jaxis.loading.gguf.rope_keys import rope
from jaxis.loading.gguf.table import GGUF, Fact, constant
from jaxis.loading.gguf.tensor_names import GGUFNames

_EMBEDDINGS = {"token_embd": "embeddings.word_embeddings", "token_types": "embeddings.token_type_embeddings"}


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
        GGUFNames(
            {
                **{"attn_q": "attention.self.query", "attn_k": "attention.self.key", "attn_v": "attention.self.value"},
                **{"attn_output": "attention.output.dense", "attn_output_norm": "attention.output.LayerNorm"},
                **{"ffn_up": "intermediate.dense", "ffn_down": "output.dense", "layer_output_norm": "output.LayerNorm"},
            },
            layers="encoder.layer",
            top_level={
                **_EMBEDDINGS,
                "token_embd_norm": "embeddings.LayerNorm",
                "position_embd": "embeddings.position_embeddings",
            },
        ),
        is_causal=False,
    ),
    GGUF(
        ("nomic-bert", "nomic_bert", "NomicBertModel"),
        (_ENCODER, rope(1000.0), constant("hidden_act", "silu")),
        GGUFNames(
            {
                **{"attn_qkv": "attn.Wqkv", "attn_output": "attn.out_proj", "attn_output_norm": "norm1"},
                **{"ffn_up": "mlp.fc11", "ffn_gate": "mlp.fc12", "ffn_down": "mlp.fc2", "layer_output_norm": "norm2"},
            },
            layers="encoder.layers",
            top_level={**_EMBEDDINGS, "token_embd_norm": "emb_ln"},
        ),
        is_causal=False,
    ),
)
