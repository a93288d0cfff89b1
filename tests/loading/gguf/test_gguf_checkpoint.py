"""GGUF models under Hugging Face names: shards, fused tensors, what is assumed and what is refused."""

import json
import re
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxis.errors import CheckpointError, ConfigError
from jaxis.loading.gguf.families import READ
from jaxis.loading.gguf.gguf_checkpoint import GGUFCheckpoint
from jaxis.loading.gguf.table import GGUF
from jaxis.loading.gguf_files import gguf_file
from jaxis.loading.open_checkpoint import open_checkpoint, read_config_values, read_generation_defaults
from tests.support import gguf_models, parity
from tests.support.gguf_models import write_gguf
from tests.support.parity import FAMILIES


def folder_of(family_name):
    return Path(parity.checkpoint_folder(next(family for family in FAMILIES if family.name == family_name)))


@pytest.fixture(scope="module")
def llama():
    return folder_of("Llama 2")


@pytest.fixture(scope="module")
def shards(llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    write_gguf(llama, folder / "tiny.gguf", split_max_tensors=8)
    assert len(list(folder.glob("tiny-0000?-of-00003.gguf"))) == 3
    return folder


def assert_same_tensors(checkpoint, folder):
    expected = load_file(folder / "model.safetensors")
    assert set(checkpoint.names()) == expected.keys()
    for name, tensor in checkpoint.iterate():
        np.testing.assert_array_equal(tensor, expected[name])
        info = checkpoint.info(name)
        assert (info.shape, info.dtype, info.nbytes) == (tensor.shape, tensor.dtype, tensor.nbytes)
        np.testing.assert_array_equal(checkpoint.tensor(name), tensor)
    assert checkpoint.total_bytes == sum(tensor.nbytes for tensor in expected.values())


@pytest.mark.parametrize("given", ["tiny-00001-of-00003.gguf", "tiny-00003-of-00003.gguf", ""])
def test_any_shard_and_the_folder_are_the_whole_model(given, shards, llama):
    with open_checkpoint(shards / given) as checkpoint:
        assert_same_tensors(checkpoint, llama)


def test_a_missing_shard_is_named(shards, tmp_path):
    folder = shutil.copytree(shards, tmp_path / "copy")
    (folder / "tiny-00002-of-00003.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"lacks 1 of the 3 files of tiny \(tiny-00002-of-00003.gguf\)"):
        open_checkpoint(folder)


def test_a_shard_under_anothers_name_is_an_error(shards, tmp_path):
    folder = shutil.copytree(shards, tmp_path / "copy")
    shutil.copyfile(folder / "tiny-00002-of-00003.gguf", folder / "tiny-00003-of-00003.gguf")
    with pytest.raises(CheckpointError, match="says that it is shard 2 of 3, not 3 of 3"):
        open_checkpoint(folder)


def test_a_shard_that_is_renamed_to_a_whole_model_is_an_error(shards, tmp_path):
    shutil.copyfile(shards / "tiny-00001-of-00003.gguf", tmp_path / "tiny.gguf")
    with pytest.raises(CheckpointError, match="says that it is shard 1 of 3, not 1 of 1"):
        open_checkpoint(tmp_path / "tiny.gguf")


def test_a_folder_with_several_models_asks_for_one(tmp_path):
    for name in ("a-Q4_K_M.gguf", "a-Q8_0.gguf", "mmproj-a-f16.gguf", "a.imatrix.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=r"has 2 models: .* \(a-Q4_K_M.gguf, a-Q8_0.gguf\)"):
        gguf_file(tmp_path)
    (tmp_path / "a-Q8_0.gguf").unlink()
    assert gguf_file(tmp_path) == tmp_path / "a-Q4_K_M.gguf"
    (tmp_path / "config.json").touch()
    assert gguf_file(tmp_path) is None


@pytest.mark.parametrize("name", ["Llama 2", "Qwen2"])
def test_queries_keys_and_values_in_one_tensor_are_split(name, tmp_path, monkeypatch):
    folder = folder_of(name)
    add = gguf.GGUFWriter.add_tensor
    parts = {}

    def add_fused(self, name, tensor, **arguments):
        if match := re.fullmatch(r"(blk\.\d+)\.attn_([qkv])\.(weight|bias)", name):
            parts.setdefault((match[1], match[3]), {})[match[2]] = tensor
            if len(parts[match[1], match[3]]) == 3:
                fused = np.concatenate([parts[match[1], match[3]][each] for each in "qkv"])
                add(self, f"{match[1]}.attn_qkv.{match[3]}", fused, **arguments)
        else:
            add(self, name, tensor, **arguments)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", add_fused)
    write_gguf(folder, tmp_path / "m.gguf")
    with GGUFCheckpoint(tmp_path / "m.gguf") as checkpoint:
        assert_same_tensors(checkpoint, folder)


def test_gates_and_ups_of_experts_in_one_tensor_are_split(tmp_path, monkeypatch):
    folder = folder_of("Qwen3 MoE")
    add = gguf.GGUFWriter.add_tensor
    gates = {}

    def add_fused(self, name, tensor, **arguments):
        if name.endswith("ffn_gate_exps.weight"):
            gates[name.split(".ffn")[0]] = tensor
        elif name.endswith("ffn_up_exps.weight"):
            layer = name.split(".ffn")[0]
            add(self, f"{layer}.ffn_gate_up_exps.weight", np.concatenate([gates[layer], tensor], 1), **arguments)
        else:
            add(self, name, tensor, **arguments)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", add_fused)
    # gguf-py names gates before ups, and so must the file.
    write_gguf(folder, tmp_path / "m.gguf")
    with GGUFCheckpoint(tmp_path / "m.gguf") as checkpoint:
        assert_same_tensors(checkpoint, folder)


def config_of(family_name, path, **keys):
    write_gguf(folder_of(family_name), path, keys=keys)
    return read_config_values(path)


def test_a_key_without_its_array_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_models, "ngram_keys", lambda _: {})
    with pytest.raises(ConfigError, match=r"lacks the key qwen4exp\.ple\.head_vocab_sizes"):
        config_of("Qwen3.8-Flash-Next", tmp_path / "m.gguf", **{"ple.layers": [0]})


def test_llama_3s_rope_is_recovered_from_the_divisors(tmp_path):
    folder = shutil.copytree(folder_of("Llama 3.1"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] |= {"original_max_position_embeddings": 8192, "factor": 32.0}
    (folder / "config.json").write_text(json.dumps(config))
    write_gguf(folder, tmp_path / "m.gguf")
    assert read_config_values(tmp_path / "m.gguf").values["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_other_divisors_of_frequencies_are_used_as_they_are(tmp_path):
    scaling = config_of("Llama 3.1", tmp_path / "m.gguf").values["rope_scaling"]
    assert scaling["rope_type"] == "longrope"
    assert scaling["short_factor"] == scaling["long_factor"]
    assert scaling["short_factor"][0] == 1
    assert scaling["short_factor"][-1] == 8
    assert scaling["original_max_position_embeddings"] == 1024


@pytest.mark.parametrize(
    ("family", "keys", "assumed"),
    [
        ("Llama 2", {}, ()),
        ("Gemma 3", {"rope.freq_base_swa": None}, ("sliding_window_pattern=6", "rope_local_base_freq=10000.0")),
        (
            "Gemma 2",
            dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "attention.sliding_window")),
            (
                *("attn_logit_softcapping=50.0", "final_logit_softcapping=30.0", "sliding_window=4096"),
                "sliding_window_pattern=2",
            ),
        ),
        ("Qwen3 MoE", {}, ("norm_topk_prob=True",)),
        ("DeepSeek V2 Lite", {}, ("scoring_func=softmax", "n_group=1", "topk_group=1")),
        (
            "DeepSeek V3",
            {"expert_group_count": None, "expert_group_used_count": None},
            ("n_group=1", "topk_group=1"),
        ),
        ("Cohere 2", {}, ("sliding_window_pattern=4",)),
    ],
)
def test_what_the_file_does_not_say_is_reported(family, keys, assumed, tmp_path):
    assert config_of(family, tmp_path / "m.gguf", **keys).assumptions == assumed


def test_the_layers_with_a_window_are_those_that_the_file_lists(tmp_path):
    pattern = [True, False, True]
    values = config_of("Gemma 3", tmp_path / "m.gguf", **{"attention.sliding_window_pattern": pattern}).values
    assert [kind == "sliding_attention" for kind in values["layer_types"]] == pattern


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [
        (
            "Llama 2",
            {"attention.max_alibi_bias": 8},
            "has keys that jaxis does not know: llama.attention.max_alibi_bias",
        ),
        ("Llama 2", {"rope.dimension_count": 8}, "rotates a part of each head"),
        ("Llama 2", {"embedding_length": None}, "lacks the key llama.embedding_length"),
        ("Qwen3.8-Flash-Next", {"ple.layers": [0, 2]}, "has n-grams in the layers [0, 2], of which one is supported"),
        ("Llama 2", {"attention.head_count": 0}, "an embedding length or a number of layers or heads of 0"),
        ("Llama 2", {"block_count": 0}, "an embedding length or a number of layers or heads of 0"),
        ("Llama 2", {"attention.head_count_kv": 3}, "has 4 heads, which 3 key-value heads do not divide"),
        ("Llama 2", {"rope.dimension_count": "half"}, "llama.rope.dimension_count = 'half', expected a number"),
        ("Llama 2", {"block_count": "two"}, "llama.block_count = 'two', expected an integer"),
        ("Llama 2", {"feed_forward_length": [96, 80]}, "layers that differ in it are not supported"),
        ("Llama 2", {"rope.scaling.type": "dynamic", "rope.scaling.factor": 2.0}, "of the type 'dynamic'"),
        ("Llama 2", {"attention.causal": False}, "llama.attention.causal = False, of which only True is supported"),
        ("Qwen3 MoE", {"expert_gating_func": 2}, "qwen3moe.expert_gating_func = 2, of which only 1 is supported"),
        ("GLM-4-0414", {"rope.dimension_sections": [2, 2, 2, 0]}, "is the text part of a GLM-4 vision model"),
        ("Mixtral", {"expert_weights_scale": 2.0}, "keys that jaxis does not know: llama.expert_weights_scale"),
        ("DeepSeek V3", {"expert_gating_func": 3}, "expert_gating_func = 3, expected 1 or 2"),
        ("Qwen2", {"attention.sliding_window": 512}, "keys that jaxis does not know: qwen2.attention.sliding_window"),
    ],
)
def test_keys_that_change_the_model_in_an_unknown_way_are_errors(family, keys, message, tmp_path):
    with pytest.raises(ConfigError, match=re.escape(message)):
        config_of(family, tmp_path / "m.gguf", **keys)


def test_every_file_is_of_a_model_and_one_is_written():
    written = [declared.model[1] for family in READ.values() for declared in family if declared.written]
    assert len(written) == len(set(written))
    for family in READ.values():
        assert family[-1].when is GGUF.when
        assert all(declared.when is not GGUF.when for declared in family[:-1])


def rename(monkeypatch, old, new):
    add = gguf.GGUFWriter.add_tensor
    monkeypatch.setattr(
        gguf.GGUFWriter,
        "add_tensor",
        lambda self, name, tensor, **rest: add(self, new if name == old else name, tensor, **rest),
    )


@pytest.mark.parametrize("new", ["blk.0.attn_sub_norm.weight", "rope_frequencies.weight", "blk.0.attn_norm.bias2"])
def test_unknown_tensors_are_named(new, llama, tmp_path, monkeypatch):
    rename(monkeypatch, "blk.0.attn_norm.weight", new)
    write_gguf(llama, tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match=re.escape(f"tensor {new!r} [64] is not one that jaxis knows")):
        GGUFCheckpoint(tmp_path / "m.gguf")


def test_layers_after_the_models_own_are_left_out(tmp_path, monkeypatch):
    """GLM-4.5's files have its prediction layer, which counts as a block."""
    folder = folder_of("GLM-4.5 MoE, groups, two dense layers")
    rename(monkeypatch, "blk.2.attn_output.weight", "blk.2.nextn.eh_proj.weight")
    write_gguf(folder, tmp_path / "m.gguf", keys={"nextn_predict_layers": 1})
    with GGUFCheckpoint(tmp_path / "m.gguf") as checkpoint:
        assert checkpoint.config["num_hidden_layers"] == 2
        assert checkpoint.config["num_nextn_predict_layers"] == 1
        assert not [name for name in checkpoint.names() if ".layers.2." in name]


def test_parts_of_a_tensor_are_of_one_type(tmp_path):
    """Granite's block that every token goes through is one tensor in the checkpoint, and two in the file."""

    def quantize(name, tensor):
        kind = gguf.GGMLQuantizationType.Q8_0 if name == "blk.1.ffn_up_shexp.weight" else None
        return kind and (gguf.quants.quantize(tensor, kind), kind)

    write_gguf(folder_of("Granite MoE Shared"), tmp_path / "m.gguf", quantize=quantize)
    message = (
        "tensors 'blk.1.ffn_gate_shexp.weight' and 'blk.1.ffn_up_shexp.weight' are parts of one .* different types"
    )
    with pytest.raises(CheckpointError, match=message):
        GGUFCheckpoint(tmp_path / "m.gguf")


def write_keys(path, architecture="llama", **keys):
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        writer.add_string(f"general.{key}", value) if isinstance(value, str) else writer.add_float32(key, value)
    writer.add_tensor("x", np.zeros(1, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("architecture", "keys", "message"),
    [
        ("rwkv7", {}, "has the architecture 'rwkv7'; supported in GGUF files: afmoe, apertus, arcee, bailingmoe2,"),
        ("clip", {}, "is the vision part of a model"),
        ("llama", {"type": "adapter"}, "is not a language model but of the type 'adapter'"),
        ("llama", {"type": "mmproj"}, "is not a language model but of the type 'mmproj'"),
    ],
)
def test_other_files_than_supported_models_are_refused(architecture, keys, message, tmp_path):
    with pytest.raises((CheckpointError, ConfigError), match=re.escape(message)):
        GGUFCheckpoint(write_keys(tmp_path / "m.gguf", architecture, **keys))


def test_sampling_settings_of_the_file(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_float32("general.sampling.temp", 0.6)
    writer.add_int32("general.sampling.top_k", 20)
    writer.add_float32("general.sampling.top_p", 0.95)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    expected = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert read_generation_defaults(tmp_path / "m.gguf") == expected
