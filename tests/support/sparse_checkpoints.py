"""Checkpoints of any size that take no disk: true safetensors headers before holes in sparse files."""

import json
import math
from pathlib import Path

BITS = {"BF16": 16, "F16": 16, "F32": 32, "F8_E4M3": 8, "U8": 8, "I32": 32, "I64": 64}


def write_sparse_checkpoint(folder, config, tensors, *, num_shards=1):
    """Writes config.json and `tensors`, name -> (safetensors type, shape), in order, over that many shards."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = list(tensors)
    per_shard = -(-len(names) // num_shards)
    weight_map = {}
    for shard in range(num_shards):
        file_name = "model.safetensors" if num_shards == 1 else f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = names[shard * per_shard : (shard + 1) * per_shard]
        weight_map |= dict.fromkeys(part, file_name)
        (folder / file_name).touch()
        with open(folder / file_name, "r+b") as file:
            header, size = safetensors_header({name: tensors[name] for name in part})
            file.write(header)
            file.truncate(len(header) + size)
    if num_shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def safetensors_header(tensors):
    """The header's bytes, and how many bytes of tensors follow."""
    header, offset = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text, offset


def deepseek_v3_tensors(config):
    """The tensors of DeepSeek V3's published checkpoint: fp8 blocks, and the layer that predicts one more token."""
    tensors = {"model.embed_tokens.weight": ("BF16", (config["vocab_size"], config["hidden_size"]))}
    width, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    rope, query_rank = config["qk_rope_head_dim"], config["q_lora_rank"]
    query, value = config["qk_nope_head_dim"] + rope, config["v_head_dim"]

    def add(name, out, columns):
        tensors[f"{name}.weight"] = ("F8_E4M3", (out, columns))
        tensors[f"{name}.weight_scale_inv"] = ("F32", (-(-out // 128), -(-columns // 128)))

    def add_mlp(name, inner):
        add(f"{name}.gate_proj", inner, width)
        add(f"{name}.up_proj", inner, width)
        add(f"{name}.down_proj", width, inner)

    for i in range(config["num_hidden_layers"] + config["num_nextn_predict_layers"]):
        layer = f"model.layers.{i}"
        add(f"{layer}.self_attn.q_a_proj", query_rank, width)
        add(f"{layer}.self_attn.q_b_proj", heads * query, query_rank)
        add(f"{layer}.self_attn.kv_a_proj_with_mqa", rank + rope, width)
        add(f"{layer}.self_attn.kv_b_proj", heads * (query - rope + value), rank)
        add(f"{layer}.self_attn.o_proj", width, heads * value)
        norms = {"self_attn.q_a_layernorm": query_rank, "self_attn.kv_a_layernorm": rank}
        norms |= {"input_layernorm": width, "post_attention_layernorm": width}
        for name, size in norms.items():
            tensors[f"{layer}.{name}.weight"] = ("BF16", (size,))
        if i < config["first_k_dense_replace"]:
            add_mlp(f"{layer}.mlp", config["intermediate_size"])
            continue
        for expert in range(config["n_routed_experts"]):
            add_mlp(f"{layer}.mlp.experts.{expert}", config["moe_intermediate_size"])
        add_mlp(f"{layer}.mlp.shared_experts", config["moe_intermediate_size"] * config["n_shared_experts"])
        tensors[f"{layer}.mlp.gate.weight"] = ("BF16", (config["n_routed_experts"], width))
        tensors[f"{layer}.mlp.gate.e_score_correction_bias"] = ("F32", (config["n_routed_experts"],))
        if i >= config["num_hidden_layers"]:
            for name in ("embed_tokens", "shared_head.head"):
                tensors[f"{layer}.{name}.weight"] = ("BF16", (config["vocab_size"], width))
            for name in ("enorm", "hnorm", "shared_head.norm"):
                tensors[f"{layer}.{name}.weight"] = ("BF16", (width,))
            tensors[f"{layer}.eh_proj.weight"] = ("BF16", (width, 2 * width))
    tensors["model.norm.weight"] = ("BF16", (width,))
    tensors["lm_head.weight"] = ("BF16", (config["vocab_size"], width))
    return tensors


def gpt_oss_tensors(config):
    """The tensors of GPT-OSS's published checkpoint: experts in blocks of 32 MXFP4 numbers, all in one tensor."""
    width, inner, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    heads, kv_heads, size = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    vocabulary = ("BF16", (config["vocab_size"], width))
    tensors = {"model.embed_tokens.weight": vocabulary}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for name, out, columns in (
            *(("q_proj", heads * size, width), ("k_proj", kv_heads * size, width), ("v_proj", kv_heads * size, width)),
            ("o_proj", width, heads * size),
        ):
            tensors[f"{layer}.self_attn.{name}.weight"] = ("BF16", (out, columns))
            tensors[f"{layer}.self_attn.{name}.bias"] = ("BF16", (out,))
        tensors[f"{layer}.self_attn.sinks"] = ("BF16", (heads,))
        tensors[f"{layer}.mlp.router.weight"] = ("BF16", (experts, width))
        tensors[f"{layer}.mlp.router.bias"] = ("BF16", (experts,))
        for name, out, columns in (("gate_up_proj", 2 * inner, width), ("down_proj", width, inner)):
            tensors[f"{layer}.mlp.experts.{name}_blocks"] = ("U8", (experts, out, columns // 32, 16))
            tensors[f"{layer}.mlp.experts.{name}_scales"] = ("U8", (experts, out, columns // 32))
            tensors[f"{layer}.mlp.experts.{name}_bias"] = ("BF16", (experts, out))
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{name}.weight"] = ("BF16", (width,))
    return tensors | {"model.norm.weight": ("BF16", (width,)), "lm_head.weight": vocabulary}
