"""`quantize_checkpoint`: what is in the folder, how large it gets in memory, and that a failure leaves nothing."""

import json
import shutil
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxis.errors import CheckpointError, ConfigError, JaxisError
from jaxis.quantization.arguments import parse_quantization
from jaxis.quantization.checkpoint import quantize_checkpoint
from tests.support.quantized_models import assert_equal, load
from tests.support.tiny_checkpoints import variant


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_everything_but_the_weights_is_copied(checkpoint, tmp_path):
    source = variant(tmp_path / "source", checkpoint())
    (source / "README.md").write_text("model card")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "rag.jinja").write_text("{{ messages }}")
    (source / "pytorch_model.bin").write_text("weights in another format")
    quantize_checkpoint(source, tmp_path / "q", parse_quantization("int8"))
    assert names(tmp_path / "q") == sorted({*names(source)} - {"pytorch_model.bin"})
    for path in source.iterdir():
        if path.is_file() and path.name not in ("config.json", "model.safetensors", "pytorch_model.bin"):
            assert (tmp_path / "q" / path.name).read_bytes() == path.read_bytes()
    assert (tmp_path / "q" / "additional_chat_templates" / "rag.jinja").read_text() == "{{ messages }}"
    config, original = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "q", source))
    assert config.keys() - original.keys() == {"quantization_config", "jaxis_quantization"}
    assert original.items() <= config.items()


def test_safetensors_reads_the_file_and_unquantized_tensors_are_unchanged(checkpoint, tmp_path):
    nbytes = quantize_checkpoint(checkpoint(), tmp_path / "q", parse_quantization("int8"))
    written, original = (load_file(folder / "model.safetensors") for folder in (tmp_path / "q", checkpoint()))
    assert sum(tensor.nbytes for tensor in written.values()) == nbytes
    for name, tensor in original.items():
        if "norm" in name:
            np.testing.assert_array_equal(written[name], tensor)
        else:
            scale = written[name.replace("weight", "weight_scale")].astype(np.float64)
            restored = written[name] * np.repeat(scale, 32, axis=1)
            np.testing.assert_allclose(restored, tensor, rtol=0, atol=np.abs(tensor).max() / 250)


def test_shards_load_as_one_file_does(checkpoint, tmp_path):
    rules = "int4"
    quantize_checkpoint(checkpoint(), tmp_path / "one", parse_quantization(rules))
    quantize_checkpoint(checkpoint(), tmp_path / "shards", parse_quantization(rules), max_shard_bytes=20_000)
    shards = sorted((tmp_path / "shards").glob("model-*.safetensors"))
    assert len(shards) > 2
    # Of a header and at most so many bytes; embeddings and head alone are more.
    assert sum(path.stat().st_size > 24_000 for path in shards) == 2
    index = json.loads((tmp_path / "shards" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(load_file(tmp_path / "one" / "model.safetensors"))
    assert_equal(load(tmp_path / "one"), load(tmp_path / "shards"))


def test_sharded_sources_are_read(checkpoint, tmp_path):
    source = variant(tmp_path / "source", checkpoint(), files={"model.safetensors": None})
    tensors, weight_map = load_file(checkpoint() / "model.safetensors"), {}
    for number in (1, 2):
        part = dict(list(tensors.items())[number - 1 :: 2])
        save_file(part, source / f"model-0000{number}-of-00002.safetensors")
        weight_map |= dict.fromkeys(part, f"model-0000{number}-of-00002.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for name, folder in (("a", checkpoint()), ("b", source)):
        quantize_checkpoint(folder, tmp_path / name, parse_quantization("int8"))
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])


def test_a_tied_head_that_repeats_the_embeddings_is_left_out(checkpoint, tmp_path):
    source = variant(tmp_path / "source", checkpoint(), tie_word_embeddings=True)
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}, source / "model.safetensors")
    quantize_checkpoint(source, tmp_path / "q", parse_quantization("int8"))
    assert "lm_head.weight" not in load_file(tmp_path / "q" / "model.safetensors")
    load(tmp_path / "q")


def test_progress_ends_at_all_bytes(checkpoint, tmp_path):
    seen = []
    quantize_checkpoint(checkpoint(), tmp_path / "q", parse_quantization("int8"), on_progress=lambda *s: seen.append(s))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] > 0


@pytest.fixture
def broken(checkpoint, tmp_path):
    """A source with a weight that is not finite, in its last layer."""
    source = variant(tmp_path / "source", checkpoint())
    tensors = {name: tensor.copy() for name, tensor in load_file(source / "model.safetensors").items()}
    tensors["model.layers.1.mlp.up_proj.weight"][3, 3] = np.inf
    (source / "model.safetensors").unlink()
    save_file(tensors, source / "model.safetensors")
    return source


def test_a_failure_half_way_leaves_nothing(broken, tmp_path):
    before = names(tmp_path)
    with pytest.raises(CheckpointError, match=r"'model.layers.1.mlp.up_proj.weight' has values that are not finite"):
        quantize_checkpoint(broken, tmp_path / "q", parse_quantization("int8"))
    assert names(tmp_path) == before


def test_an_interrupt_leaves_nothing(checkpoint, tmp_path):
    def interrupt(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(checkpoint(), tmp_path / "q", parse_quantization("int8"), on_progress=interrupt)
    assert names(tmp_path) == []


class TestMistakes:
    def refuses(self, source, destination, rules, message, error: type[JaxisError] = CheckpointError):
        with pytest.raises(error, match=message):
            quantize_checkpoint(source, destination, parse_quantization(rules))

    def test_the_destination_exists(self, checkpoint, tmp_path):
        self.refuses(checkpoint(), tmp_path, "int8", "already exists: give a folder that does not exist, or remove it")

    def test_its_parent_does_not(self, checkpoint, tmp_path):
        self.refuses(checkpoint(), tmp_path / "no" / "q", "int8", "no is not a folder: make it first")

    def test_the_source_is_quantized(self, checkpoint, tmp_path):
        quantize_checkpoint(checkpoint(), tmp_path / "q", parse_quantization("int8"))
        self.refuses(tmp_path / "q", tmp_path / "again", "int8", "is quantized already")

    def test_rules_that_leave_everything(self, checkpoint, tmp_path):
        self.refuses(checkpoint(), tmp_path / "q", "none", "there is nothing to quantize", ConfigError)

    def test_rules_that_match_nothing(self, checkpoint, tmp_path):
        rules = [{"module_path": "q_proj", "weight_qtype": "int8"}]
        self.refuses(checkpoint(), tmp_path / "q", rules, "applies to no module", ConfigError)

    def test_a_tensor_without_a_parameter(self, checkpoint, tmp_path):
        source = variant(tmp_path / "source", checkpoint())
        tensors = load_file(source / "model.safetensors")
        (source / "model.safetensors").unlink()
        save_file(tensors | {"extra": np.zeros(3, np.float32)}, source / "model.safetensors")
        self.refuses(source, tmp_path / "q", "int8", "'extra' has no parameter in Qwen3ForCausalLM")
        del tensors["model.norm.weight"]
        save_file(tensors, source / "model.safetensors")
        self.refuses(source, tmp_path / "q", "int8", "'model.norm.weight' is not in the checkpoint")


@pytest.mark.slow
@pytest.mark.production_xla
def test_memory_stays_near_one_tensor(tmp_path):
    """A checkpoint of 350 MB, 175 quantized, whose largest tensor is 16; buffers and programs take 140."""
    script = """
    import json, sys
    from pathlib import Path
    import ml_dtypes, numpy as np
    from jaxis.quantization.arguments import parse_quantization
    from jaxis.quantization.checkpoint import quantize_checkpoint
    from tests.support.tiny_models import LLAMA
    root = Path(sys.argv[1])
    from safetensors.numpy import save_file
    def write(folder, layers, hidden, ffn, vocab):
        folder.mkdir()
        config = LLAMA | {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": ffn,
                          "vocab_size": vocab, "head_dim": hidden // 2, "num_key_value_heads": 2}
        (folder / "config.json").write_text(json.dumps(config))
        shapes = {"model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden),
                  "model.norm.weight": (hidden,)}
        for i in range(layers):
            name = f"model.layers.{i}"
            shapes |= {f"{name}.{n}_layernorm.weight": (hidden,) for n in ("input", "post_attention")}
            shapes |= {f"{name}.self_attn.{p}_proj.weight": (hidden, hidden) for p in "qkvo"}
            shapes |= {f"{name}.mlp.{p}_proj.weight": (ffn, hidden) for p in ("gate", "up")}
            shapes[f"{name}.mlp.down_proj.weight"] = (hidden, ffn)
        save_file({n: np.ones(s, ml_dtypes.bfloat16) for n, s in shapes.items()}, folder / "model.safetensors")
    def status(key):
        return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith(key)) * 1024
    if len(sys.argv) > 2:
        write(root / "large", 12, 1024, 3072, 8000)
        write(root / "small", 1, 64, 64, 64)
        sys.exit()
    quantize_checkpoint(root / "small", root / "small-q", parse_quantization("int8"))
    before = status("VmHWM")
    quantize_checkpoint(root / "large", root / "large-q", parse_quantization("int8"))
    print(status("VmHWM") - before)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    environment = {"PYTHONPATH": ":".join(sys.path), "JAX_PLATFORMS": "cpu"}
    # Written by another process, whose memory does not count.
    subprocess.run([*command, "write"], env=environment, check=True)
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    shutil.rmtree(tmp_path / "large")
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) < 220e6
