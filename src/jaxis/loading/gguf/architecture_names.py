"""Names of each architecture's tensors in GGUF files and in Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

OF_EACH_HEAD = ".{head}"
"""Suffix of names in the layer for tensors that the checkpoint has for each head, and the file all in one."""

OF_EACH = "{}"
"""Number in the name of a tensor outside layers, where the file has several tensors in one."""


@dataclass(frozen=True, kw_only=True)
class ArchitectureNames:
    """Names of an architecture's tensors in Hugging Face checkpoints.

    Attributes:
      block: Name in the file, without `blk.N.` and `.weight`, -> name in the layer. A value that ends in "=" is the
        whole name, without `.weight` or `.bias`. One that ends in "[0]" is of the tensor's first rows; the rows of
        "[1]" follow. See also OF_EACH_HEAD. A name in the file that ends in a suffix, such as `.scale`, is for tensors
        with that suffix only.
      experts: Name in the layer of the module with the experts.
      projections: Names of an expert's gate, up and down projections.
      permutes_rope: True if rows of queries and keys are stored so that rotated dimensions are neighbours.
      adds_one_to_norms: True if the file's norms include the 1 that the model adds; not the norms of states.
      groups_qkv: True if the checkpoint's projection has queries, key and value of each group of heads together, and
        the file's has all queries, all keys and all values.
      norm: Name of the norm after the last layer.
      layers: Name of the list of layers.
      top_level: Name in the file, without `.weight` or `.bias`, -> name, of tensors outside layers; the same for all
        decoders. See also OF_EACH.
    """

    block: Mapping[str, str]
    experts: str = "mlp.experts"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    permutes_rope: bool = False
    adds_one_to_norms: bool = False
    groups_qkv: bool = False
    norm: str = "model.norm"
    layers: str = "model.layers"
    top_level: Mapping[str, str] = field(default_factory=dict[str, str])


_ATTENTION = {
    **{f"attn_{each}": f"self_attn.{each}_proj" for each in "qkv"},
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MLP = {f"ffn_{each}": f"mlp.{each}_proj" for each in ("gate", "up", "down")}
_ROUTER = {"ffn_gate_inp": "mlp.gate", "exp_probs_b": "mlp.gate.e_score_correction_bias="}
_SHARED_EXPERTS = {f"ffn_{each}_shexp": f"mlp.shared_experts.{each}_proj" for each in ("gate", "up", "down")}
_LLAMA = {**_ATTENTION, "ffn_norm": "post_attention_layernorm", **_MLP}
_GEMMA = {
    **_ATTENTION,
    **_HEAD_NORMS,
    **_MLP,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
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
_LATENT_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    # The two parts of kv_b_proj, the first transposed: `LatentHeadsFormat` joins them.
    "attn_k_b": "self_attn.kv_b_proj.k_b=",
    "attn_v_b": "self_attn.kv_b_proj.v_b=",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
_DELTA_NET = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt": "linear_attn.dt_bias=",
    "ssm_a": "linear_attn.A_log=",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_SHORT_CONVOLUTIONS = {
    **{f"attn_{each}": f"self_attn.{each}_proj" for each in "qkv"},
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    **{f"shortconv.{each}": f"conv.{each}" for each in ("conv", "in_proj", "out_proj")},
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "ffn_gate_inp": "feed_forward.gate",
    "exp_probs_b": "feed_forward.expert_bias=",
}
_QWEN35 = {
    **_ATTENTION,
    **_HEAD_NORMS,
    **_DELTA_NET,
    "post_attention_norm": "post_attention_layernorm",
}
_BERT_EMBEDDINGS = {
    "token_embd": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
}
_FEED_FORWARD = {name: target.replace("mlp.", "feed_forward.") for name, target in _MLP.items()}


def _packed(attention: str, output: str, up: str, down: str) -> dict[str, str]:
    return {"attn_qkv": attention, "attn_output": output, "ffn_up": up, "ffn_down": down}


_BLOOM = _packed("self_attention.query_key_value", "self_attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
_SHARED_EXPERT = {
    **{f"ffn_{each}_shexp": f"mlp.shared_expert.{each}_proj" for each in ("gate", "up", "down")},
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_HUNYUAN_NORMS = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
# Experts' stacks are named as if each expert had tensors of its own.
_GRANITE_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_gate_shexp": "shared_mlp.input_linear[0]",
    "ffn_up_shexp": "shared_mlp.input_linear[1]",
    "ffn_down_shexp": "shared_mlp.output_linear",
}
_BACKBONE: Mapping[str, Any] = {
    "layers": "backbone.layers",
    "norm": "backbone.norm_f",
    "top_level": {"token_embd": "backbone.embeddings"},
}


def _mamba_mixer(mixer: str, time_steps: str) -> dict[str, str]:
    """Returns the names of a Mamba layer's tensors. The time steps of Mamba2 have a bias only."""
    names = {"in": "in_proj", "conv1d": "conv1d", "dt": time_steps, "a": "A_log=", "d": "D=", "out": "out_proj"}
    return {f"ssm_{name}": f"{mixer}.{target}" for name, target in names.items()} | {"ssm_norm": f"{mixer}.norm"}


_LLAMA_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}

# By `general.architecture`; "mixtral" is a llama with experts.
NAMES: Mapping[str, ArchitectureNames] = {
    "llama": ArchitectureNames(block=_LLAMA, permutes_rope=True),
    "mixtral": ArchitectureNames(
        block={**_LLAMA, "ffn_gate_inp": "block_sparse_moe.gate"},
        experts="block_sparse_moe.experts",
        projections=("w1", "w3", "w2"),
        permutes_rope=True,
    ),
    "granite": ArchitectureNames(block=_LLAMA, permutes_rope=True),
    "mistral3": ArchitectureNames(block=_LLAMA, permutes_rope=True),
    **dict.fromkeys(("qwen2", "qwen2vl"), ArchitectureNames(block=_LLAMA)),
    **dict.fromkeys(("qwen3", "qwen3vl"), ArchitectureNames(block={**_LLAMA, **_HEAD_NORMS})),
    **dict.fromkeys(("qwen3moe", "qwen3vlmoe"), ArchitectureNames(block={**_LLAMA, **_HEAD_NORMS, **_ROUTER})),
    "phi3": ArchitectureNames(block={**_LLAMA, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
    "olmo2": ArchitectureNames(
        block={
            **_ATTENTION,
            **_HEAD_NORMS,
            **_MLP,
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        }
    ),
    "gpt-oss": ArchitectureNames(
        block={
            **_ATTENTION,
            "attn_sinks": "self_attn.sinks=",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router",
        }
    ),
    "starcoder2": ArchitectureNames(block={**_LLAMA, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
    "glm4": ArchitectureNames(
        block={
            **_ATTENTION,
            "post_attention_norm": "post_self_attn_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        }
    ),
    "glm4moe": ArchitectureNames(
        block={
            **_ATTENTION,
            **_HEAD_NORMS,
            **_MLP,
            **_ROUTER,
            **_SHARED_EXPERTS,
            "post_attention_norm": "post_attention_layernorm",
        }
    ),
    "gemma2": ArchitectureNames(block=_GEMMA, adds_one_to_norms=True),
    "gemma3": ArchitectureNames(block=_GEMMA, adds_one_to_norms=True),
    "gemma3n": ArchitectureNames(
        block={
            **_GEMMA,
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
    ),
    "gemma4": ArchitectureNames(
        block={
            **_GEMMA,
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
        top_level=_OWN_EMBEDDINGS_OF_MODEL,
    ),
    "command-r": ArchitectureNames(block={**_ATTENTION, **_HEAD_NORMS, **_MLP}),
    "cohere2": ArchitectureNames(block={**_ATTENTION, **_MLP}),
    "deepseek2": ArchitectureNames(block={**_LATENT_ATTENTION, **_MLP, **_ROUTER, **_SHARED_EXPERTS}),
    "llama4": ArchitectureNames(
        block={
            **_ATTENTION,
            **_FEED_FORWARD,
            "ffn_norm": "post_attention_layernorm",
            "ffn_gate_inp": "feed_forward.router",
            **{f"ffn_{each}_shexp": f"feed_forward.shared_expert.{each}_proj" for each in ("gate", "up", "down")},
        },
        experts="feed_forward.experts",
    ),
    "qwen35": ArchitectureNames(block={**_QWEN35, **_MLP}, adds_one_to_norms=True),
    "qwen35moe": ArchitectureNames(
        block={**_QWEN35, **_ROUTER, **_SHARED_EXPERT},
        adds_one_to_norms=True,
    ),
    "qwen3next": ArchitectureNames(block={**_QWEN35, **_ROUTER, **_SHARED_EXPERT}, adds_one_to_norms=True),
    "lfm2": ArchitectureNames(block=_SHORT_CONVOLUTIONS, norm="model.embedding_norm"),
    "lfm2moe": ArchitectureNames(
        block=_SHORT_CONVOLUTIONS,
        experts="feed_forward.experts",
        projections=("w1", "w3", "w2"),
        norm="model.embedding_norm",
    ),
    "minimax-m2": ArchitectureNames(
        block={
            **_ATTENTION,
            **_HEAD_NORMS,
            "ffn_norm": "post_attention_layernorm",
            "ffn_gate_inp": "block_sparse_moe.gate",
            "exp_probs_b": "block_sparse_moe.e_score_correction_bias=",
        },
        experts="block_sparse_moe.experts",
        projections=("w1", "w3", "w2"),
    ),
    "seed_oss": ArchitectureNames(
        block={**_ATTENTION, **_MLP, "post_attention_norm": "post_attention_layernorm"},
    ),
    "smollm3": ArchitectureNames(block=_LLAMA, permutes_rope=True),
    # With the names that jaxis itself writes.
    "gpt2": ArchitectureNames(
        block={**_packed("self_attn.qkv_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"), **_LLAMA_NORMS},
        top_level={"position_embd": "model.embed_positions"},
    ),
    "starcoder": ArchitectureNames(
        block={
            **_packed("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
            **{"attn_norm": "ln_1", "ffn_norm": "ln_2"},
        },
        layers="transformer.h",
        norm="transformer.ln_f",
        top_level={"token_embd": "transformer.wte", "position_embd": "transformer.wpe"},
    ),
    "gptneox": ArchitectureNames(
        block={
            **_packed("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
            **_LLAMA_NORMS,
        },
        groups_qkv=True,
        layers="gpt_neox.layers",
        norm="gpt_neox.final_layer_norm",
        top_level={"token_embd": "gpt_neox.embed_in", "output": "embed_out"},
    ),
    "falcon": ArchitectureNames(
        block={**_BLOOM, "attn_norm": "input_layernorm"},
        groups_qkv=True,
        layers="transformer.h",
        norm="transformer.ln_f",
        top_level={"token_embd": "transformer.word_embeddings"},
    ),
    "falcon with two norms": ArchitectureNames(
        block={**_BLOOM, "attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"},
        groups_qkv=True,
        layers="transformer.h",
        norm="transformer.ln_f",
        top_level={"token_embd": "transformer.word_embeddings"},
    ),
    "bloom": ArchitectureNames(
        block={**_BLOOM, **_LLAMA_NORMS},
        groups_qkv=True,
        layers="transformer.h",
        norm="transformer.ln_f",
        top_level={
            "token_embd": "transformer.word_embeddings",
            "token_embd_norm": "transformer.word_embeddings_layernorm",
        },
    ),
    "mpt": ArchitectureNames(
        block={
            **_packed("attn.Wqkv", "attn.out_proj", "ffn.up_proj", "ffn.down_proj"),
            **{"attn_norm": "norm_1", "ffn_norm": "norm_2"},
        },
        layers="transformer.blocks",
        norm="transformer.norm_f",
        top_level={"token_embd": "transformer.wte"},
    ),
    "phi2": ArchitectureNames(
        block={**_ATTENTION, "attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        norm="model.final_layernorm",
    ),
    "stablelm": ArchitectureNames(
        block={
            **_LLAMA,
            **{f"attn_{each}_norm": f"self_attn.{each}_layernorm.norms{OF_EACH_HEAD}" for each in "qk"},
        }
    ),
    "gemma": ArchitectureNames(block=_LLAMA, adds_one_to_norms=True),
    "internlm2": ArchitectureNames(block=_LLAMA, permutes_rope=True),
    "exaone": ArchitectureNames(
        block={
            **{f"attn_{each}": f"attn.attention.{each}_proj" for each in "qkv"},
            **{"attn_output": "attn.attention.out_proj", "attn_norm": "ln_1", "ffn_norm": "ln_2"},
            **{"ffn_gate": "mlp.c_fc_0", "ffn_up": "mlp.c_fc_1", "ffn_down": "mlp.c_proj"},
        },
        layers="transformer.h",
        norm="transformer.ln_f",
        top_level={"token_embd": "transformer.wte"},
    ),
    "nemotron": ArchitectureNames(block=_LLAMA, adds_one_to_norms=True),
    "chatglm": ArchitectureNames(block={**_LLAMA, "ffn_up": "mlp.gate_up_proj"}),
    "arcee": ArchitectureNames(block=_LLAMA, permutes_rope=True),
    "ernie4_5": ArchitectureNames(block=_LLAMA),
    "exaone4": ArchitectureNames(
        block={
            **{name: target for name, target in _ATTENTION.items() if name != "attn_norm"},
            **_HEAD_NORMS,
            **_MLP,
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        }
    ),
    "olmoe": ArchitectureNames(block={**_LLAMA, **_HEAD_NORMS, **_ROUTER}),
    "qwen2moe": ArchitectureNames(block={**_LLAMA, **_ROUTER, **_SHARED_EXPERT}),
    "hunyuan-dense": ArchitectureNames(block={**_LLAMA, **_HUNYUAN_NORMS}),
    "apertus": ArchitectureNames(
        block={
            **_LLAMA,
            **_HEAD_NORMS,
            **{"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"},
        }
    ),
    "olmo": ArchitectureNames(block=_LLAMA, permutes_rope=True),
    "minicpm": ArchitectureNames(block=_LLAMA, permutes_rope=True),
    "dots1": ArchitectureNames(block={**_LLAMA, **_HEAD_NORMS, **_ROUTER, **_SHARED_EXPERTS}),
    "bailingmoe2": ArchitectureNames(
        block={
            **_LLAMA,
            **{"attn_qkv": "attention.query_key_value", "attn_output": "attention.dense"},
            **{"attn_q_norm": "attention.query_layernorm", "attn_k_norm": "attention.key_layernorm"},
            **{"ffn_gate_inp": "mlp.gate", "exp_probs_b": "mlp.gate.expert_bias="},
            **_SHARED_EXPERTS,
        },
        top_level={"token_embd": "model.word_embeddings"},
    ),
    "ernie4_5-moe": ArchitectureNames(
        block={
            **_LLAMA,
            **{"ffn_gate_inp": "mlp.gate", "exp_probs_b": "mlp.moe_statics.e_score_correction_bias="},
            **_SHARED_EXPERTS,
        }
    ),
    "hunyuan-moe": ArchitectureNames(
        block={
            **_LLAMA,
            **_HUNYUAN_NORMS,
            "ffn_gate_inp": "mlp.gate.wg",
            **{f"ffn_{each}_shexp": f"mlp.shared_mlp.{each}_proj" for each in ("gate", "up", "down")},
        }
    ),
    "granitemoe": ArchitectureNames(
        block={**_LLAMA, **_GRANITE_EXPERTS}, experts="block_sparse_moe.experts", permutes_rope=True
    ),
    "phimoe": ArchitectureNames(
        block={**_LLAMA, "ffn_gate_inp": "block_sparse_moe.gate"},
        experts="block_sparse_moe.experts",
        projections=("w1", "w3", "w2"),
    ),
    "mamba": ArchitectureNames(
        block=_mamba_mixer("mixer", "dt_proj") | {"attn_norm": "norm", "ssm_x": "mixer.x_proj"}, **_BACKBONE
    ),
    "mamba2": ArchitectureNames(block=_mamba_mixer("mixer", "dt_bias=") | {"attn_norm": "norm"}, **_BACKBONE),
    "jamba": ArchitectureNames(
        block={
            **_ATTENTION,
            **_FEED_FORWARD,
            **_mamba_mixer("mamba", "dt_proj"),
            "ssm_x": "mamba.x_proj",
            **{f"ssm_{each}_norm": f"mamba.{each}_layernorm" for each in ("dt", "b", "c")},
            "ffn_norm": "pre_ff_layernorm",
            "ffn_gate_inp": "feed_forward.router",
        },
        experts="feed_forward.experts",
        norm="model.final_layernorm",
    ),
    "granitehybrid": ArchitectureNames(
        block={
            **_LLAMA,
            **_GRANITE_EXPERTS,
            **_mamba_mixer("mamba", "dt_bias="),
            **{"ffn_gate": "shared_mlp.input_linear[0]", "ffn_up": "shared_mlp.input_linear[1]"},
            "ffn_down": "shared_mlp.output_linear",
        },
        experts="block_sparse_moe.experts",
        permutes_rope=True,
    ),
    "falcon-h1": ArchitectureNames(
        block={
            **_ATTENTION,
            **_FEED_FORWARD,
            **_mamba_mixer("mamba", "dt_bias="),
            "ffn_norm": "pre_ff_layernorm.weight=",  # in the file without a suffix
        },
        norm="model.final_layernorm",
    ),
    **dict.fromkeys(
        ("nemotron_h", "nemotron_h_moe"),
        ArchitectureNames(
            block={
                **_mamba_mixer("mixer", "dt_bias="),
                **{f"attn_{each}": f"mixer.{each}_proj" for each in "qkv"},
                **{"attn_output": "mixer.o_proj", "attn_norm": "norm"},
                **{f"ffn_{each}": f"mixer.{each}_proj" for each in ("up", "down")},
                **{f"ffn_{each}_shexp": f"mixer.shared_experts.{each}_proj" for each in ("up", "down")},
                **{"ffn_gate_inp": "mixer.gate", "exp_probs_b": "mixer.gate.e_score_correction_bias="},
                **{"ffn_latent_down": "mixer.fc1_latent_proj", "ffn_latent_up": "mixer.fc2_latent_proj"},
            },
            experts="mixer.experts",
            **_BACKBONE,
        ),
    ),
    "bert": ArchitectureNames(
        block={
            "attn_q": "attention.self.query",
            "attn_k": "attention.self.key",
            "attn_v": "attention.self.value",
            "attn_output": "attention.output.dense",
            "attn_output_norm": "attention.output.LayerNorm",
            "ffn_up": "intermediate.dense",
            "ffn_down": "output.dense",
            "layer_output_norm": "output.LayerNorm",
        },
        layers="encoder.layer",
        top_level={
            **_BERT_EMBEDDINGS,
            "token_embd_norm": "embeddings.LayerNorm",
            "position_embd": "embeddings.position_embeddings",
        },
    ),
    "nomic-bert": ArchitectureNames(
        block={
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.out_proj",
            "attn_output_norm": "norm1",
            "ffn_up": "mlp.fc11",
            "ffn_gate": "mlp.fc12",
            "ffn_down": "mlp.fc2",
            "layer_output_norm": "norm2",
        },
        layers="encoder.layers",
        top_level={**_BERT_EMBEDDINGS, "token_embd_norm": "emb_ln"},
    ),
    # sentence-transformers' Dense modules have these names in the file alone.
    "gemma-embedding": ArchitectureNames(
        block=_GEMMA, adds_one_to_norms=True, top_level={name: name for name in ("dense_2", "dense_3")}
    ),
}
