"""Writes a tiny checkpoint that sees as llama.cpp's converters would: its text in one GGUF file, its tower in another.

Keys and names follow `conversion/qwenvl.py`, `gemma.py`, `smolvlm.py` and `base.py` through gguf-py's writer and name
map: nothing here is shared with how jaxis reads the files.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
from safetensors.numpy import load_file, save_file

from tests.support.gguf_models import QuantizedRows, add_key, write_gguf
from tests.support.gguf_tokenizers import NORMAL, UNUSED, byte_level_metadata

Tensors = dict[str, np.ndarray]
Quantize = Callable[[str, np.ndarray], "QuantizedRows | None"]

_TEXT = {"gemma3": "Gemma3ForCausalLM", "smolvlm": "LlamaForCausalLM"}
_KINDS = {
    **{"qwen2_vl": "qwen2vl_merger", "qwen2_5_vl": "qwen2.5vl_merger", "qwen3_vl": "qwen3vl_merger"},
    **{"gemma3": "gemma3", "smolvlm": "idefics3"},
}


def write_text(folder: Path, path: Path, work: Path) -> None:
    """The text of a checkpoint, with its tokenizer and chat template; `work` is a folder that may be filled."""
    config = json.loads((folder / "config.json").read_text())
    own = config["text_config"]
    own["architectures"] = [_TEXT.get(config["model_type"], config["architectures"][0])]
    own["tie_word_embeddings"] = config.get("tie_word_embeddings", own.get("tie_word_embeddings", False))
    (work / "config.json").write_text(json.dumps(own))
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        plain = re.sub(r"^(model\.)?(language_model|text_model)\.(model\.)?", "model.", name)
        if plain != name or name.startswith(("lm_head.", "model.layers.", "model.embed_tokens.", "model.norm.")):
            tensors[plain.replace("model.lm_head", "lm_head")] = tensor
    save_file(tensors, work / "model.safetensors")
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    keys = byte_level_metadata(
        backend, "gpt-2", bos_token_id=backend.token_to_id("<s>"), eos_token_id=backend.token_to_id("</s>")
    )
    keys["tokenizer.chat_template"] = settings["chat_template"]
    # A file has at least one merge; no prompt has this one. What embeddings have beyond the tokens is unused.
    tokens, types = [*keys["tokenizer.ggml.tokens"], "zq"], [*keys["tokenizer.ggml.token_type"], NORMAL]
    num_unused = own["vocab_size"] - len(tokens)
    keys["tokenizer.ggml.merges"] = ["z q"]
    keys["tokenizer.ggml.tokens"] = tokens + [f"[PAD{i}]" for i in range(num_unused)]
    keys["tokenizer.ggml.token_type"] = types + [UNUSED] * num_unused

    def more(writer: gguf.GGUFWriter) -> None:
        for key, value in keys.items():
            if key.startswith("tokenizer."):
                add_key(writer, key, value)

    kinds = own.get("layer_types") if config["model_type"] == "gemma3" else None
    pattern = kinds and [kind == "sliding_attention" for kind in kinds]
    write_gguf(work, path, more=more, keys={"attention.sliding_window_pattern": pattern})
    shutil.rmtree(work)


def write_mmproj(
    folder: Path, path: Path, *, quantize: Quantize = lambda *_: None, swap: bool = False, **keys: Any
) -> None:
    """The tower of a checkpoint.

    Args:
      folder: The checkpoint, with its preprocessor_config.json.
      path: The file.
      quantize: See `write_gguf`.
      swap: Whether the feed-forward block's two tensors have each other's name, as older converters wrote them.
      **keys: Further keys below `clip.`, with "__" for ".".
    """
    config = json.loads((folder / "config.json").read_text())
    images = json.loads((folder / "preprocessor_config.json").read_text())
    vision, text = config["vision_config"], config["text_config"]
    kind = _KINDS[config["model_type"]]
    depth = vision.get("num_hidden_layers", vision.get("depth"))
    hidden = vision.get("embed_dim") if kind == "qwen2vl_merger" else vision["hidden_size"]
    places = vision.get("num_position_embeddings", 0)  # of Qwen3-VL, which has no size of images
    image_size = int(places**0.5) * vision["patch_size"] if places else vision.get("image_size", 560)
    values = {
        "has_vision_encoder": True,
        "projector_type": kind,
        "vision.projection_dim": text["hidden_size"],
        "vision.image_size": image_size,
        "vision.patch_size": vision["patch_size"],
        "vision.embedding_length": hidden,
        "vision.feed_forward_length": vision.get("intermediate_size", 0),
        "vision.block_count": depth,
        "vision.attention.head_count": vision.get("num_attention_heads", vision.get("num_heads")),
        "vision.attention.layer_norm_epsilon": float(vision.get("layer_norm_eps", 1e-6)),
        "vision.image_mean": [float(each) for each in images["image_mean"]],
        "vision.image_std": [float(each) for each in images["image_std"]],
    }
    if kind.startswith("qwen"):
        # Not of the published files, whose towers have one window and one range of sizes.
        values |= {
            f"vision.image_{a}_pixels": images["size"][f"{b}_edge"]
            for a, b in (("min", "shortest"), ("max", "longest"))
        }
    if kind == "qwen2.5vl_merger":
        values |= {"use_silu": True, "vision.n_wa_pattern": vision["fullatt_block_indexes"][0] + 1}
        values["vision.window_size"] = vision["window_size"]
    if kind == "qwen3vl_merger":
        deep = [i in vision["deepstack_visual_indexes"] for i in range(depth)]
        values |= {"use_gelu": True, "vision.spatial_merge_size": vision["spatial_merge_size"]}
        values["vision.is_deepstack_layers"] = deep
    if kind == "gemma3":
        side = int(config["mm_tokens_per_image"] ** 0.5)
        values |= {
            "use_gelu": True,
            "vision.projector.scale_factor": vision["image_size"] // vision["patch_size"] // side,
        }
    if kind == "idefics3":
        values |= {"use_gelu": True, "vision.projector.scale_factor": config["scale_factor"]}
        values["vision.preproc_image_size"] = images["size"]["longest_edge"]
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type(gguf.GGUFType.MMPROJ)
    for key, value in (values | {key.replace("__", "."): value for key, value in keys.items()}).items():
        if value is not None:
            add_key(writer, f"clip.{key}", value)
    for name, tensor in _tensors(kind, vision, load_file(folder / "model.safetensors")).items():
        if swap and ".ffn_" in name:
            name = name.replace("ffn_up", "ffn_x").replace("ffn_down", "ffn_up").replace("ffn_x", "ffn_down")
        tensor = np.ascontiguousarray(tensor, np.float32)
        rows = quantize(name, tensor) if tensor.ndim == 2 else None
        if rows is None:
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, rows[0], raw_dtype=rows[1])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(kind: str, vision: dict[str, Any], tensors: Tensors) -> Tensors:
    """As `modify_tensors` changes them, by their names in the file."""
    depth = vision.get("num_hidden_layers", vision.get("depth"))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, max(depth, 3))  # `merger.mlp.2` counts as a block
    found: Tensors = {}
    for name, tensor in tensors.items():
        name = re.sub(r"^(model\.)?visual\.", "visual.", name)
        name = re.sub(r"^model\.(vision_tower|multi_modal_projector)\.", r"\1.", name)
        name = re.sub(r"^vision_tower\.(?!vision_model\.)", "vision_tower.vision_model.", name)
        if name.startswith("vision_tower.vision_model.head."):
            continue
        if match := re.fullmatch(r"visual\.deepstack_merger_list\.(\d+)\.(?:linear_)?(norm|fc1|fc2)\.(\w+)", name):
            layer = vision["deepstack_visual_indexes"][int(match[1])]
            found[f"v.deepstack.{layer}.{match[2]}.{match[3]}"] = tensor
        elif name == "visual.patch_embed.proj.weight":
            found["v.patch_embd.weight"], found["v.patch_embd.weight.1"] = tensor[:, :, 0], tensor[:, :, 1]
        elif ".qkv." in name and kind != "qwen3vl_merger":
            for part, each in zip("qkv", np.split(tensor, 3), strict=True):
                found[_mapped(names, name.replace("qkv", part))] = each
        elif match := re.fullmatch(r"visual\.merger\.(norm|linear_fc1|linear_fc2)\.(\w+)", name):
            base = {"norm": "v.post_ln", "linear_fc1": "mm.0", "linear_fc2": "mm.2"}[match[1]]
            found[f"{base}.{match[2]}"] = tensor
        elif name == "multi_modal_projector.mm_input_projection_weight":
            found["mm.input_projection.weight"] = tensor
        elif name == "multi_modal_projector.mm_soft_emb_norm.weight":
            found["mm.soft_emb_norm.weight"] = tensor + 1
        elif re.match(r"(visual|vision_tower|model\.vision_model|model\.connector)\.", name):
            found[_mapped(names, name)] = tensor
    return found


def _mapped(names: gguf.TensorNameMap, name: str) -> str:
    mapped = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert mapped is not None, name
    return mapped
