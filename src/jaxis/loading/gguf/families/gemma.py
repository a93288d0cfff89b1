"""Gemma 1 to 4, and EmbeddingGemma."""

from __future__ import annotations

from collections.abc import Callable
from statistics import NormalDist

import numpy as np

from jaxis.config.hf_config import HFConfig
from jaxis.config.rope_config import rope_config
from jaxis.errors import ConfigError
from jaxis.loading.gguf.common_facts import BASE, CONTEXT, GELU, HEADS, ONE_BASE, RMS, SIZES, experts, usual, windows
from jaxis.loading.gguf.config_reader import FULL, SLIDING, ConfigReader, Values
from jaxis.loading.gguf.names import ROPE_FREQS
from jaxis.loading.gguf.table import GGUF, Fact, FileKeys, Written, constant, has, key, unused
from jaxis.loading.gguf.tensor_names import NORMS_AROUND, OF_EACH, GateUpOrder, GGUFNames

_NAMES = GGUFNames(NORMS_AROUND, adds_one_to_norms=True)
_OWN_EMBEDDINGS = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_OWN_EMBEDDINGS_OF_MODEL = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_GEMMA3N_NAMES = GGUFNames(
    {
        **NORMS_AROUND,
        **_OWN_EMBEDDINGS,
        "altup_correct_coef": "altup.correction_coefs",
        "altup_correct_scale": "altup.correct_output_scale=",
        "altup_predict_coef": "altup.prediction_coefs",
        "altup_router": "altup.modality_router",
        "altup_router_norm": "altup.router_norm",
        "laurel_l": "laurel.linear_left",
        "laurel_r": "laurel.linear_right",
        "laurel_post_norm": "laurel.post_laurel_norm",
    },
    top_level={
        **_OWN_EMBEDDINGS_OF_MODEL,
        "altup_proj": f"model.altup_projections.{OF_EACH}",
        "altup_unembd_proj": f"model.altup_unembed_projections.{OF_EACH}",
    },
)
_GEMMA4_NAMES = GGUFNames(
    {
        **NORMS_AROUND,
        **_OWN_EMBEDDINGS,
        "layer_output_scale": "layer_scalar=",
        "ffn_gate_inp": "router.proj",
        "ffn_gate_inp.scale": "router.scale=",
        "ffn_down_exps.scale": "router.per_expert_scale=",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
    },
    experts="experts",
    stack=GateUpOrder(outputs_first=True),
    top_level=_OWN_EMBEDDINGS_OF_MODEL,
)
_UNROTATED = 1e29  # the least divisor of frequencies that stand for none


def _score_scale(large_layers: int) -> Fact:
    """Returns the fact of Gemma 2 and 3's scale: models with the most layers scale by their width, not a head's."""

    def read(reader: ConfigReader) -> Values:
        is_large = reader.num_layers == large_layers
        return {"query_pre_attn_scalar": reader.hidden_size // reader.num_heads if is_large else reader.head_dim}

    return Fact(read)


def _gemma3_windows(reader: ConfigReader) -> Values:
    window = reader.keys.get("attention.sliding_window")
    if not window:
        return {"layer_types": [FULL] * reader.num_layers}
    types = reader.layer_types(full_every=6)
    return {"sliding_window": window, "layer_types": types, "rope_local_base_freq": _local_base(reader)}


def _local_base(reader: ConfigReader) -> float:
    base = reader.keys.typed("rope.freq_base_swa", float, None)
    return reader.keys.assume("rope_local_base_freq", 10_000.0) if base is None else base


def _write_gemma3_windows(config: HFConfig) -> FileKeys:
    local = rope_config(config, SLIDING).theta
    return {"attention.sliding_window": config["sliding_window"], "rope.freq_base_swa": local}


_NO_CAP = key("final_logit_softcapping", "final_logit_softcapping", None, float)
_FINAL_CAP = key("final_logit_softcapping", "final_logit_softcapping", 30.0, float, is_assumed=True)
_GEMMA3 = ([usual(1_000_000.0), GELU, _score_scale(62), _NO_CAP], Fact(_gemma3_windows, _write_gemma3_windows))


def _own_embeddings(reader: ConfigReader) -> Values:
    """Embeddings for each layer (of size 0: none)."""
    size = reader.keys.integer("embedding_length_per_layer_input", 0)
    rows = {"vocab_size_per_layer_input": reader.rows_of("per_layer_token_embd.weight")} if size else {}
    return {"hidden_size_per_layer_input": size, **rows}


def _two_ropes(full_rope: Callable[[ConfigReader], Values]) -> Fact:
    def read(reader: ConfigReader) -> Values:
        keys = reader.keys
        full = full_rope(reader) | {"rope_theta": keys.typed("rope.freq_base", float, 1_000_000.0)}
        local = {"rope_type": "default", "rope_theta": _local_base(reader)}
        keys.expect("rope.scaling.type", "none", "linear")
        keys.expect("rope.scaling.factor", 1.0, 0.0)
        return {"rope_parameters": {FULL: full, SLIDING: local}}

    return Fact(read)


_WITH_OWN_EMBEDDINGS = (RMS, Fact(_own_embeddings), GELU, windows(6, 512))


def _gemma3n(reader: ConfigReader) -> Values:
    """llama.cpp takes its sparse layers, rank and soft cap from the model or from the weights."""
    keys = reader.keys
    listed = keys.for_layers("activation_sparsity_scale", reader.num_layers)
    if listed is None:
        raise ConfigError(
            f"{keys.source} lacks the key {keys.architecture}.activation_sparsity_scale: use another file"
        )
    return {
        "intermediate_size": reader.of_layers("feed_forward_length"),
        # The file has how many standard deviations above the mean a gate must be.
        "activation_sparsity_pattern": [_share_below(scale) for scale in listed],
        "laurel_rank": reader.rows_of("blk.0.laurel_l.weight"),
    }


def _share_below(scale: float) -> float:
    return 0.0 if scale == -np.inf else round(NormalDist().cdf(scale), 6)


def _gemma4(reader: ConfigReader) -> Values:
    """Gemma 4, whose full layers have heads and ropes of their own."""
    keys = reader.keys
    global_head_dim, head_dim = reader.head_dim, keys.integer("attention.key_length_swa")
    keys.expect("attention.value_length", global_head_dim)
    keys.expect("attention.value_length_swa", head_dim)
    keys.expect("rope.dimension_count", global_head_dim)
    keys.expect("rope.dimension_count_swa", head_dim)
    widths = reader.of_layers("feed_forward_length")
    return {
        **_gemma4_kv_heads(reader, reader.layer_types(full_every=6)),
        "head_dim": head_dim,
        "global_head_dim": global_head_dim,
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] == 2 * widths[0],
    }


def _proportional_rope(reader: ConfigReader) -> Values:
    """The part of a full layer's frequencies that rotate; the others' divisors are practically infinite."""
    divisors = reader.read_tensor(ROPE_FREQS)
    rotated = 1.0
    if divisors is not None:
        count = int((divisors == 1).sum())
        if not (divisors[:count] == 1).all() or not (divisors[count:] >= _UNROTATED).all():
            raise ConfigError(
                f"{reader.keys.source} has a rope that jaxis does not know in this architecture (rope_freqs)"
            )
        rotated = count / len(divisors)
    return {"rope_type": "proportional", "partial_rotary_factor": rotated}


def _gemma4_kv_heads(reader: ConfigReader, kinds: list[str]) -> Values:
    """Returns key-value heads by kind of layer, and whether full layers use keys as values."""
    tensors = reader.keys.tensors
    same = any(
        f"blk.{i}.attn_k.weight" in tensors and f"blk.{i}.attn_v.weight" not in tensors
        for i, kind in enumerate(kinds)
        if kind == FULL
    )
    listed = reader.kv_heads_of_layers or [reader.num_kv_heads] * reader.num_layers
    of_kind = {kind: {heads for each, heads in zip(kinds, listed, strict=True) if each == kind} for kind in set(kinds)}
    if any(len(heads) > 1 for heads in of_kind.values()):
        raise ConfigError(f"{reader.keys.source} has {listed} key-value heads, which differ in layers of one kind")
    found = {kind: heads.pop() for kind, heads in of_kind.items()}
    full = found.get(FULL, reader.num_kv_heads)
    local = found.get(SLIDING, full)
    if full != local and not same:
        raise ConfigError(
            f"{reader.keys.source} has {full} key-value heads in full layers and {local} in others, which is "
            "supported only where values are keys"
        )
    return {"num_key_value_heads": local, "num_global_key_value_heads": full, "attention_k_eq_v": same}


_GEMMA4 = (
    [SIZES, HEADS, CONTEXT, _WITH_OWN_EMBEDDINGS, _two_ropes(_proportional_rope), Fact(_gemma4)],
    key("num_kv_shared_layers", "attention.shared_kv_layers", 0),
    has("attention_bias", "attn_q.bias"),
    _NO_CAP,
)
_GEMMA4_MOE = (
    [_GEMMA4, constant("enable_moe_block", True), experts("num_experts", "top_k_experts")],
    key("moe_intermediate_size", "expert_feed_forward_length"),
)
_GEMMA4_MODEL = ("gemma4", "gemma4_text", "Gemma4ForCausalLM")

GGUFS = (
    GGUF(
        ("gemma", "gemma", "GemmaForCausalLM"),
        (usual(), constant("hidden_act", "gelu_pytorch_tanh")),
        GGUFNames(adds_one_to_norms=True),
    ),
    GGUF(
        ("gemma2", "gemma2", "Gemma2ForCausalLM"),
        (
            [usual(), GELU, _score_scale(46), ONE_BASE],
            key("attn_logit_softcapping", "attn_logit_softcapping", 50.0, float, is_assumed=True),
            [_FINAL_CAP, windows(2, 4096)],
        ),
        _NAMES,
        written=Written(window=True),
    ),
    GGUF(("gemma3", "gemma3_text", "Gemma3ForCausalLM"), _GEMMA3, _NAMES, written=Written(window=True)),
    GGUF(
        ("gemma3n", "gemma3n_text", "Gemma3nForCausalLM"),
        (
            [BASE, _WITH_OWN_EMBEDDINGS, _two_ropes(lambda _: {"rope_type": "default"}), Fact(_gemma3n)],
            key("altup_num_inputs", "altup.num_inputs"),
            key("altup_active_idx", "altup.active_idx", 0),
            _FINAL_CAP,
            key("num_kv_shared_layers", "attention.shared_kv_layers"),
        ),
        _GEMMA3N_NAMES,
    ),
    GGUF(_GEMMA4_MODEL, _GEMMA4_MOE, _GEMMA4_NAMES, when="expert_count"),
    GGUF(_GEMMA4_MODEL, (_GEMMA4, unused("expert_feed_forward_length")), _GEMMA4_NAMES),
    # sentence-transformers' Dense modules have these names in the file alone.
    GGUF(
        ("gemma-embedding", "gemma3_text", "Gemma3TextModel"),
        (_GEMMA3, constant("use_bidirectional_attention", True)),
        GGUFNames(NORMS_AROUND, adds_one_to_norms=True, top_level={name: name for name in ("dense_2", "dense_3")}),
        is_causal=False,
    ),
)
