"""Keys of config.json that cannot change a decoder's logits, by name or by value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NEUTRAL_KEYS = frozenset(
    {
        # Bookkeeping.
        *("architectures", "model_type", "transformers_version"),
        # How the weights are stored or computed with; the engine decides that. `quantization` is MLX's, and read with
        # `quantization_config`.
        *("dtype", "torch_dtype", "use_cache", "use_bfloat16", "torchscript", "pretraining_tp", "quantization"),
        *("cache_implementation", "for_llm_compressor", "ep_size", "use_parallel_embedding", "num_logits_to_keep"),
        # The layers that a window begins with: whether there is a window is said by other keys.
        "max_window_layers",
        # Training only.
        *("gradient_checkpointing", "use_cache_in_training", "router_aux_loss_coef", "output_router_logits"),
        *("router_jitter_noise", "aux_loss_alpha", "seq_aux", "layerdrop", "seed"),
        # What a call returns, in transformers.
        *("return_dict", "output_attentions", "output_hidden_states", "tie_last_hidden_states"),
        *("tf_legacy_loss", "chunk_size_feed_forward"),
        # Classification heads.
        *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params"),
        *("summary_activation", "summary_proj_to_labels", "summary_type", "summary_use_proj"),
        # Generation settings that old versions of transformers wrote here.
        *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "temperature"),
        *("diversity_penalty", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty"),
        *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences"),
        *("return_dict_in_generate", "output_scores", "prefix", "max_new_tokens", "min_new_tokens", "min_p"),
        *("remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens"),
    }
)
"""Keys with no effect, whatever their value, that transformers itself knows.

`pretraining_tp` is here because it only split a product into parts with the same sum; transformers 5 ignores it.
"""

STAMPS = frozenset(
    {
        # The tool that wrote the file, and from what.
        *("_name_or_path", "name_or_path", "_model_name_or_path", "_commit_hash", "license", "tokenizer_class"),
        *("unsloth_version", "unsloth_fixed", "transformers.js_config", "quantization_version"),
        # Code that came with the checkpoint and is never run: the architecture is one that jaxis has.
        "auto_map",
        # What a GGUF file says of vectors, which a model that generates does not make.
        *("gguf_pooling_mode", "gguf_dense_sizes"),
        # The longest sequence, under other names than `max_position_embeddings`.
        *("model_max_length", "max_sequence_length", "max_seq_length", "max_seq_len", "sequence_length", "seq_length"),
        *("seq_len", "context_length", "max_context_length", "n_ctx", "n_positions"),
    }
)
"""Keys with no effect, whatever their value, that other tools write."""

NEUTRAL_SUFFIXES = ("_token_id", "_token_ids", "_token_index")
"""Suffixes of token ids' names: they are for the tokenizer and the generation config."""

NEUTRAL_WORDS = frozenset(
    {
        # Training only.
        *("dropout", "pdrop", "init", "initializer", "loss", "checkpointing", "reentrant", "train", "training"),
        *("grad", "gradient", "lr"),
        # How the same result is computed.
        *("flash", "fused", "liger", "impl", "implementation"),
    }
)
"""Words in names of keys that have no effect, whatever their value: `attn_pdrop`, `use_flash_attention_2`."""

NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False,),
    "is_decoder": (False, True),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({},),
    "use_mrope": (False,),
    # What every decoder does anyway: being off, too, would be something to implement.
    "is_causal": (True,),
    "causal": (True,),
    "scale_attn_weights": (True,),
    "attention_softmax_in_fp32": (True,),
    "scale_attention_softmax_in_fp32": (True,),
    "position_embedding_type": ("rope", "rotary"),
    "use_rope": (True,),
    "use_rotary_embeddings": (True,),
}
"""Keys with the only values at which they do nothing, for models that have no use for them."""

_HIDDEN_ACT = ("hidden_act", "hidden_activation")
_NORM_EPSILON = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")

SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "activation": _HIDDEN_ACT,
    "activation_function": _HIDDEN_ACT,
    "hidden_act": _HIDDEN_ACT,
    "hidden_activation": _HIDDEN_ACT,
    "layer_norm_eps": _NORM_EPSILON,
    "layer_norm_epsilon": _NORM_EPSILON,
    "norm_eps": _NORM_EPSILON,
    "norm_epsilon": _NORM_EPSILON,
    "rms_norm_eps": _NORM_EPSILON,
    "d_model": ("hidden_size",),
    "n_embd": ("hidden_size",),
    "n_layer": ("num_hidden_layers",),
    "n_layers": ("num_hidden_layers",),
    "num_layers": ("num_hidden_layers",),
    "n_head": ("num_attention_heads",),
    "n_heads": ("num_attention_heads",),
    "num_heads": ("num_attention_heads",),
    "n_kv_heads": ("num_key_value_heads",),
    "num_kv_heads": ("num_key_value_heads",),
    "ffn_dim": ("intermediate_size",),
    "ffn_hidden_size": ("intermediate_size",),
    "n_inner": ("intermediate_size",),
    "kv_channels": ("head_dim",),
    "attention_head_dim": ("head_dim",),
    "rotary_emb_base": ("rope_theta",),
    "rope_base": ("rope_theta",),
    "rotary_pct": ("partial_rotary_factor",),
    "qkv_bias": ("attention_bias",),
    "use_qkv_bias": ("attention_bias",),
    "tie_embedding": ("tie_word_embeddings",),
    "tie_embeddings": ("tie_word_embeddings",),
}
"""Names of other families -> the names of the same setting; with the same value they add nothing."""

VALUE_SYNONYMS: Mapping[Any, Any] = {"swiglu": "silu", "swish": "silu"}
"""Other names of values: a gated block whose gate is a SiLU, in full or by its gate."""

COMPUTATION_WORDS = frozenset(
    {
        # Positions.
        *("rope", "rotary", "rot", "yarn", "ntk", "alibi", "position", "positional", "positions", "theta", "freq"),
        # Attention.
        *("attn", "attention", "head", "heads", "kv", "qk", "qkv", "query", "softmax", "sink", "sinks", "mask"),
        *("causal", "bidirectional", "window", "windows", "sliding", "swa", "chunk", "chunked", "softcap"),
        *("softcapping", "cap", "capping", "clip", "clamp"),
        # Norms, factors, biases.
        *("norm", "norms", "layernorm", "rmsnorm", "ln", "eps", "epsilon", "bias", "biases", "scale", "scaled"),
        *("scaling", "scalar", "multiplier", "mult", "mup", "factor"),
        # Feed-forward blocks.
        *("act", "activation", "mlp", "ffn", "glu", "swiglu", "moe", "expert", "experts", "router", "routing"),
        *("routed", "gate", "gated", "gates", "gating", "topk", "shared", "sparse", "sparsity"),
        # The rest of a model.
        *("layer", "layers", "block", "blocks", "loop", "loops", "skip", "depth", "hidden", "dim", "dims", "rank"),
        *("residual", "resid", "embedding", "embeddings", "embed", "emb", "logit", "logits", "tie", "tied"),
        *("mamba", "ssm", "conv", "linear", "recurrent", "mtp", "nextn"),
        # Weights.
        *("quant", "quantization", "quantized", "quantize", "bits", "compression"),
    }
)
"""Words in names of keys that describe a model's computation. An unknown key with one of them is not ignored."""

SWITCH_WORDS = frozenset({"use", "enable", "enabled", "with", "switch"})
"""Words in names of keys that turn something on. An unknown key with one of them is not ignored if it is true."""

FACTOR_WORDS = frozenset({"factor", "multiplier", "scaling", "pct"})
"""Words in names of keys that have no effect at 1, and not at 0."""
