from __future__ import annotations

from jaxis.config.hf_config import HFConfig

HUNYUAN_RENAMES = (
    ("self_attn.query_layernorm", "self_attn.q_norm"),
    ("self_attn.key_layernorm", "self_attn.k_norm"),
)
_TOKENS = ("im_end_id", "im_newline_id", "im_start_id", "mask_init_id", "pad_id", "text_end_id", "text_start_id")


def check_hunyuan_keys(config: HFConfig) -> None:
    """Checks keys that may have only one value (ConfigError), and declares those that do not concern the decoder."""
    config.expect_all(use_qk_norm=True, use_rotary_pos_emb=True, use_cla=False, mlp_bias=False)
    config.expect_all(add_classification_head=False, norm_type="rms")
    config.expect("attention_head_dim", config.get("head_dim", config["hidden_size"] // config["num_attention_heads"]))
    config.ignore("cla_share_factor", because="use_cla is off")
    config.ignore("org_vocab_size", because="vocab_size says it")
    config.ignore("class_num", "dense_list", "pool_type", because="there is no classification head")
    config.ignore(*_TOKENS, because="tokens are the tokenizer's business")
