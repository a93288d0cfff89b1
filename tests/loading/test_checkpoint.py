import json
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxis.errors import CheckpointError
from jaxis.loading.checkpoint import Checkpoint


def tensors(*names):
    return {name: np.full((2, 3), i, np.float32) for i, name in enumerate(names)}


def write_index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.fixture
def sharded(tmp_path):
    save_file(tensors("a", "b"), tmp_path / "model-00001-of-00002.safetensors")
    save_file(tensors("c"), tmp_path / "model-00002-of-00002.safetensors")
    weight_map = {name: f"model-0000{shard}-of-00002.safetensors" for name, shard in [("a", 1), ("b", 1), ("c", 2)]}
    write_index(tmp_path, weight_map)
    return tmp_path


def test_single_file(tmp_path):
    expected = tensors("x", "y")
    save_file(expected, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        assert set(checkpoint.names()) == {"x", "y"}
        assert checkpoint.total_bytes == 48
        assert checkpoint.info("y").shape == (2, 3)
        np.testing.assert_array_equal(checkpoint.tensor("y"), expected["y"])
        assert "x" in checkpoint
        assert "z" not in checkpoint


def test_shards_of_transformers_are_read_as_the_safetensors_library_reads_them(tmp_path):
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path, max_shard_size="20KB")
    paths = sorted(tmp_path.glob("*.safetensors"))
    assert len(paths) > 2
    expected = {name: array for path in paths for name, array in load_file(path).items()}
    found = {name: array.copy() for name, array in Checkpoint(tmp_path).iterate()}
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


def test_iterate_follows_the_files_order_and_kept_views_stay_valid(sharded):
    checkpoint = Checkpoint(sharded)
    kept = dict(checkpoint.iterate())
    assert tuple(kept) == checkpoint.names() == ("a", "b", "c")
    assert [float(kept[name][0, 0]) for name in "abc"] == [0.0, 1.0, 0.0]


def test_single_file_wins_over_an_index_as_in_transformers(sharded):
    save_file(tensors("only"), sharded / "model.safetensors")
    assert Checkpoint(sharded).names() == ("only",)


def test_files_of_any_name_are_read_where_no_standard_name_is_there(tmp_path):
    save_file(tensors("a"), tmp_path / "weights.safetensors")
    save_file(tensors("b"), tmp_path / "more.safetensors")
    assert set(Checkpoint(tmp_path).names()) == {"a", "b"}


def test_consolidated_duplicate_is_left_out(tmp_path):
    save_file(tensors("layers.0.w"), tmp_path / "consolidated.safetensors")
    with pytest.raises(CheckpointError, match="Mistral's own format"):
        Checkpoint(tmp_path)
    save_file(tensors("a"), tmp_path / "weights.safetensors")
    assert Checkpoint(tmp_path).names() == ("a",)


def check_refused(folder, message):
    with pytest.raises(CheckpointError, match=message) as error:
        Checkpoint(folder)
    assert "\n" not in str(error.value)


def test_missing_folder(tmp_path):
    check_refused(tmp_path / "nowhere", "nowhere is not a folder")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pytorch_model.bin", r"pytorch_model.bin is not read: it is a pickle, which may run code .*save_pretrained"),
        ("consolidated.00.pth", r"consolidated.00.pth is not read: it is weights in Meta's own format: use the checkp"),
        ("model-q4.gguf", r"model-q4.gguf is not read: it is a model in one file: give the path of that file"),
        ("model.onnx", r"model.onnx is not read: it is a graph for ONNX Runtime: use the original checkpoint"),
        ("weights.mlmodel", r"weights.mlmodel is not read: it is a graph for Core ML: use the original checkpoint"),
        ("flax_model.msgpack", r"flax_model.msgpack is not read: it is weights in Flax's format: convert it with"),
        ("weights.npz", r"weights.npz is not read: .* early versions of MLX"),
        ("adapter_model.safetensors", r"adapter_model.safetensors is not read: it is an adapter .*give its base model"),
        ("config.json", "no .*safetensors files: download"),
    ],
)
def test_folder_without_safetensors_says_what_to_do(tmp_path, name, message):
    (tmp_path / name).write_bytes(b"")
    check_refused(tmp_path, message)


def test_shard_that_the_index_names_is_missing(sharded):
    (sharded / "model-00002-of-00002.safetensors").unlink()
    check_refused(sharded, r"names 1 of 2 shards that are missing \(model-00002-of-00002")


def test_shard_is_missing_where_there_is_no_index(sharded):
    (sharded / "model.safetensors.index.json").unlink()
    assert set(Checkpoint(sharded).names()) == {"a", "b", "c"}
    (sharded / "model-00001-of-00002.safetensors").unlink()
    check_refused(sharded, "but not model-00001-of-00002.safetensors")


def test_tensor_is_not_in_the_shard_that_the_index_names(sharded):
    index = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    write_index(sharded, {**index, "d": "model-00002-of-00002.safetensors"})
    check_refused(sharded, "places tensor 'd' in model-00002.* which does not hold it")
    write_index(sharded, {**index, "a": "model-00002-of-00002.safetensors"})
    check_refused(sharded, "places tensor 'a' in model-00002.* which does not hold it")


def test_tensor_is_in_two_shards(sharded):
    save_file(tensors("c", "a"), sharded / "model-00002-of-00002.safetensors")
    check_refused(sharded, "tensor 'a' is in both model-00001.* and model-00002")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "must be a JSON object"),
        ("{}", "no weight_map"),
        ('{"weight_map": {"a": 1}}', "not a file name"),
        ('{"weight_map": {"a": "../secret.safetensors"}}', "not a file name"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "'a' appears twice"),
    ],
)
def test_broken_index(tmp_path, text, message):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    check_refused(tmp_path, message)


def test_truncated_shard(sharded):
    path = sharded / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    check_refused(sharded, r"model-00002-of-00002.safetensors is truncated: 10 of \d+ bytes are missing")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_pages_of_a_view_are_dropped(tmp_path):
    """Of the part that it views: a caller that reads tensors later than they were yielded holds no pages of them."""
    save_file({"t": np.ones((64, 2**18), np.float32)}, tmp_path / "model.safetensors")
    code = f"""
import numpy as np
from jaxis.loading.checkpoint import Checkpoint
from jaxis.loading.mapped_pages import drop_pages_of
def rss_mib():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmRSS")).split()[1]) / 1024
tensor = Checkpoint({str(tmp_path)!r}).tensor("t")
before = rss_mib()
assert tensor.sum() == tensor.size
print(rss_mib() - before)
drop_pages_of(tensor[16:].T)
print(rss_mib() - before)
assert tensor.sum() == tensor.size
array = np.ones(3)
drop_pages_of(array)
assert array.sum() == 3
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    read, dropped = map(float, result.stdout.split())
    assert read > 60
    assert dropped < 24


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_iterate_holds_one_mapped_tensor_at_a_time(tmp_path):
    tensor_mib, count = 8, 16
    names = [f"t{i:02d}" for i in range(count)]
    save_file({name: np.ones((tensor_mib, 2**18), np.float32) for name in names}, tmp_path / "model.safetensors")
    code = f"""
from jaxis.loading.checkpoint import Checkpoint
def rss_mib():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmRSS")).split()[1]) / 1024
checkpoint = Checkpoint({str(tmp_path)!r})
before, most = rss_mib(), 0
for _, array in checkpoint.iterate():
    assert array.sum() == array.size
    most = max(most, rss_mib() - before)
print(most)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(result.stdout) < 3 * tensor_mib < tensor_mib * count
