"""Conversion between Hugging Face's and Orbax's formats."""

import json
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxis import LLM, SamplingParams
from jaxis.bringup.convert import convert, orbax_writer, partial_folder
from jaxis.bringup.convert.convert import convert_checkpoint
from jaxis.errors import CheckpointError, ConfigError
from jaxis.loading.checkpoint import Checkpoint
from jaxis.loading.orbax_checkpoint import OrbaxCheckpoint
from jaxis.loading.safetensors_writer import SafetensorsWriter, TensorHeader

TINY = Path(__import__("jaxis").__file__).parent / "assets" / "tiny"


def assert_same_tensors(a: Path, b: Path) -> None:
    with Checkpoint(a) as first, Checkpoint(b) as second:
        assert sorted(first.names()) == sorted(second.names())
        for name in first.names():
            x, y = first.tensor(name), second.tensor(name)
            assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes()), name


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    """Layers of two kinds with experts, in every type that published checkpoints have; of no family."""
    monkeypatch.setattr(convert, "check_complete", lambda *_: None)
    rng = np.random.default_rng(0)
    tensors = {"head": rng.normal(size=(7, 5)).astype(np.float32), "scalar": np.float32(3).reshape(())}
    for i in range(12):
        tensors[f"layers.{i}.norm"] = rng.normal(size=5).astype(ml_dtypes.bfloat16)
        tensors[f"layers.{i}.zeros"] = np.zeros((3, 4), np.float16)
        if i:
            for e in range(3):
                tensors[f"layers.{i}.experts.{e}.w"] = rng.normal(size=(6, 4)).astype(ml_dtypes.float8_e4m3fn)
        else:
            tensors[f"layers.{i}.blocks"] = rng.integers(0, 256, (2, 3, 4)).astype(np.uint8)
    made = tmp_path / "source"
    made.mkdir()
    specs = {name: TensorHeader(tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    with SafetensorsWriter(made / "model.safetensors", specs) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    (made / "config.json").write_text("{}")
    (made / "tokenizer.json").write_text("{}")
    return made


@pytest.mark.sampled(4)
@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("piece_bytes", [16, 1 << 20])
def test_round_trip_is_bit_exact(folder: Path, tmp_path: Path, scanned: bool, piece_bytes: int, monkeypatch):
    monkeypatch.setattr(orbax_writer, "PIECE_BYTES", piece_bytes)
    orbax, back = tmp_path / "orbax", tmp_path / "back"
    convert_checkpoint(folder, orbax, "orbax", scanned=scanned)
    convert_checkpoint(orbax, back, "hf", max_shard_bytes=300)
    assert len(list(back.glob("*.safetensors"))) > 1
    assert_same_tensors(folder, back)
    assert (back / "tokenizer.json").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "orbax", "source"]


def test_scanned_and_unscanned_convert_into_one_another(folder: Path, tmp_path: Path):
    convert_checkpoint(folder, tmp_path / "a", "orbax", scanned=True)
    convert_checkpoint(tmp_path / "a", tmp_path / "b", "orbax")
    convert_checkpoint(tmp_path / "b", tmp_path / "c", "hf")
    assert_same_tensors(folder, tmp_path / "c")


def test_orbax_itself_restores_it_with_layers_stacked(folder: Path, tmp_path: Path):
    convert_checkpoint(folder, tmp_path / "orbax", "orbax", scanned=True)
    tree = ocp.StandardCheckpointer().restore(tmp_path / "orbax" / "params")
    with Checkpoint(folder) as checkpoint:
        expected = np.stack([checkpoint.tensor(f"layers.{i}.experts.2.w") for i in range(1, 12)])
        norms = np.stack([checkpoint.tensor(f"layers.{i}.norm") for i in range(1, 12)])
    experts = tree["layers"]["group_1"]["experts"]["w"]
    assert experts.shape == (11, 3, 6, 4)
    np.testing.assert_array_equal(np.asarray(experts)[:, 2].view(np.uint8), expected.view(np.uint8))
    np.testing.assert_array_equal(np.asarray(tree["layers"]["group_1"]["norm"]), norms)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("use_ocdbt", [False, True])
@pytest.mark.parametrize("use_zarr3", [False, True])
def test_what_training_saved_over_the_arrays_is_loaded(tmp_path: Path, use_ocdbt: bool, use_zarr3: bool):
    orbax = tmp_path / "orbax"
    convert_checkpoint(TINY, orbax, "orbax", scanned=True)
    tree = ocp.StandardCheckpointer().restore(orbax / "params")
    trained = jax.tree.map(lambda leaf: np.asarray(leaf) * np.asarray(0.5, leaf.dtype), tree)
    shutil.rmtree(orbax / "params")
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt, use_zarr3=use_zarr3)) as checkpointer:
        checkpointer.save(orbax / "params", trained)
    with OrbaxCheckpoint(orbax) as checkpoint, Checkpoint(TINY) as original:
        for name in original.names():
            expected = original.tensor(name) * np.asarray(0.5, original.tensor(name).dtype)
            np.testing.assert_array_equal(checkpoint.tensor(name), expected)


@pytest.mark.sampled
@pytest.mark.parametrize("scanned", [False, True])
def test_both_layouts_generate_what_the_original_does(tmp_path: Path, scanned: bool):
    convert_checkpoint(TINY, tmp_path / "orbax", "orbax", scanned=scanned)
    params = SamplingParams(temperature=0, max_tokens=12)

    def answer(model: Path) -> tuple[str, list]:
        with LLM(str(model), max_model_len=128) as llm:
            (output,) = llm.generate("The capital of France is", params)
            return output.outputs[0].text, list(output.outputs[0].token_ids)

    assert answer(tmp_path / "orbax") == answer(TINY)


@pytest.mark.parametrize("to", ["orbax", "hf"])
def test_an_interrupted_conversion_goes_on_where_it_stopped(folder: Path, tmp_path: Path, to: str, monkeypatch):
    source, destination = folder, tmp_path / "out"
    if to == "hf":
        source = tmp_path / "orbax"
        convert_checkpoint(folder, source, "orbax")
    written = []

    def record(write, stop_after):
        def recording(self, name, tensor):
            if len(written) >= stop_after:
                raise KeyboardInterrupt
            written.append(name)
            write(self, name, tensor)

        return recording

    owner = orbax_writer.OrbaxWriter if to == "orbax" else partial_folder.SafetensorsWriter
    original = owner.write
    options = {"to": to, "max_shard_bytes": 300}
    for stop_after in (5, 17):
        monkeypatch.setattr(owner, "write", record(original, stop_after))
        with pytest.raises(KeyboardInterrupt):
            convert_checkpoint(source, destination, **options)
        assert not destination.exists()
    monkeypatch.setattr(owner, "write", record(original, 10**6))
    done = convert_checkpoint(source, destination, **options)
    assert done.resumed_bytes > 0
    with Checkpoint(folder) as checkpoint:
        names = checkpoint.names()
    # No tensor is lost; of safetensors files, only the one that was being written is written again.
    assert set(written) == set(names)
    assert len(written) - len(names) <= (0 if to == "orbax" else 20)
    if to == "orbax":
        convert_checkpoint(destination, tmp_path / "back", "hf")
        destination = tmp_path / "back"
    assert_same_tensors(folder, destination)


def test_the_rest_of_another_conversion_is_not_gone_on_with(folder: Path, tmp_path: Path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(orbax_writer.OrbaxWriter, "write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            convert_checkpoint(folder, tmp_path / "out", "orbax")
    with pytest.raises(CheckpointError, match="left over from another conversion"):
        convert_checkpoint(folder, tmp_path / "out", "orbax", scanned=True)
    convert_checkpoint(folder, tmp_path / "out", "orbax")


def test_what_cannot_be_converted(folder: Path, tmp_path: Path):
    with pytest.raises(CheckpointError, match="already in Hugging Face format"):
        convert_checkpoint(folder, tmp_path / "out", "hf")
    with pytest.raises(CheckpointError, match="exists"):
        convert_checkpoint(folder, folder, "orbax")
    convert_checkpoint(folder, tmp_path / "out", "orbax")
    with pytest.raises(CheckpointError, match="already an unscanned Orbax checkpoint"):
        convert_checkpoint(tmp_path / "out", tmp_path / "again", "orbax")


def test_arrays_that_do_not_fit_the_layout(folder: Path, tmp_path: Path):
    orbax = tmp_path / "orbax"
    convert_checkpoint(folder, orbax, "orbax")
    layout = orbax / "orbax_layout.json"
    good = layout.read_text()
    changed = json.loads(good)
    changed["arrays"]["head"]["shape"] = [7, 6]
    layout.write_text(json.dumps(changed))
    with pytest.raises(CheckpointError, match=r"head is float32 \[7, 5\], but orbax_layout.json says"):
        OrbaxCheckpoint(orbax).tensor("head")
    layout.write_text(good.replace('"version": 1', '"version": 9'))
    with pytest.raises(CheckpointError, match="convert the checkpoint again"):
        OrbaxCheckpoint(orbax)
    layout.write_text(good)
    shutil.rmtree(orbax / "params" / "head")
    with pytest.raises(CheckpointError, match="no readable array 'head'"):
        OrbaxCheckpoint(orbax).tensor("head")
    (orbax / "params" / "_METADATA").unlink()
    with pytest.raises(CheckpointError, match="not a complete Orbax checkpoint"):
        OrbaxCheckpoint(orbax)


def test_a_checkpoint_that_its_model_would_not_load_is_refused(tmp_path: Path):
    source = tmp_path / "source"
    shutil.copytree(TINY, source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(CheckpointError, match=r"model\.layers\.3\..* problems with its tensors"):
        convert_checkpoint(source, tmp_path / "out", "orbax")
    (source / "config.json").write_text(json.dumps(config | {"architectures": ["NewForCausalLM"]}))
    with pytest.raises(ConfigError, match="jaxis has no family of NewForCausalLM"):
        convert_checkpoint(source, tmp_path / "out", "orbax")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
