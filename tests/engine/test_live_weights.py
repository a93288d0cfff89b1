"""A running engine whose weights were changed answers as a fresh one with those weights, bit for bit."""

import gc
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxis import LLM, LoRARequest, SamplingParams
from jaxis.engine.opened_model import EMBEDDED_MODEL
from jaxis.errors import CheckpointError, ConfigError, EngineError, JaxisError, RequestError
from jaxis.kernels import native
from tests.support.adapters import save_adapter
from tests.support.simulated_devices import run_on_devices
from tests.support.tiny_checkpoints import write_checkpoint

PROMPT = list(range(5, 5 + 41))
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, logprobs=1, ignore_eos=True)
SIZES = {"max_model_len": 128, "max_num_seqs": 4, "kv_cache_memory": "8MiB", "show_progress": False}
NAME = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two checkpoints of one model with different weights."""
    root = tmp_path_factory.mktemp("weights")
    first = write_checkpoint(root / "first", num_hidden_layers=1)
    return first, other_weights(first, root / "second")


def other_weights(first, folder):
    """A copy of a checkpoint with noise on its weights."""
    shutil.copytree(first, folder)
    rng = np.random.default_rng(0)
    tensors = load_file(first / "model.safetensors")
    changed = {name: (x + 0.3 * x.std() * rng.standard_normal(x.shape)).astype(x.dtype) for name, x in tensors.items()}
    save_file(changed, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def llm(folders):
    with LLM(str(folders[0]), **SIZES, enable_lora=True, max_lora_rank=8) as llm:
        yield llm


def bits(llm, prompt=PROMPT, **more):
    [output] = llm.generate([prompt], GREEDY, **more)
    [completion] = output.outputs
    return completion.token_ids, [{k: v.logprob.hex() for k, v in step.items()} for step in completion.logprobs]


def fresh(folder, **arguments):
    with LLM(str(folder), **SIZES, **arguments) as llm:
        return bits(llm)


@pytest.fixture(scope="module")
def of_second(folders):
    """The answer of a fresh engine with the second weights."""
    return fresh(folders[1])


def tensors_of(folder):
    return load_file(folder / "model.safetensors")


def test_answers_are_those_of_a_fresh_engine(folders, llm, of_second, tmp_path):
    """Of arrays, pairs and folders; with adapters, whose own weights stay; with nothing found of the old weights."""
    first, second = folders
    kinds = {"plain": {}, "dora": {"use_dora": True}}
    adapters = [LoRARequest(name, 1, save_adapter(first, tmp_path / name, **kind)) for name, kind in kinds.items()]

    def with_adapters(llm):
        return [bits(llm, lora_request=adapter) for adapter in adapters]

    before, adapted = bits(llm), with_adapters(llm)
    assert bits(llm) == before
    assert of_second != before
    with LLM(str(second), **SIZES, enable_lora=True, max_lora_rank=8) as other:
        expected_adapted = with_adapters(other)
    given = tensors_of(second)
    ways = [given, iter(given.items()), str(second), {"model": {k[6:]: v for k, v in given.items() if k[0] == "m"}}]
    ways[3] |= {name: x for name, x in given.items() if not name.startswith("model.")}
    for number, way in enumerate(ways):
        llm.update_weights(way, version=f"second {number}")
        [output] = llm.generate([PROMPT], GREEDY)
        assert output.num_cached_tokens == 0
        assert output.outputs[0].weight_versions == [f"second {number}"] * 8
        assert bits(llm) == of_second
        assert with_adapters(llm) == expected_adapted
        llm.update_weights(str(first))
        assert bits(llm) == before
        assert with_adapters(llm) == adapted


def aligned(array):
    """A copy whose memory JAX's arrays could share on a CPU, as they do that of few arrays of NumPy."""
    room = np.empty(array.nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    copy = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@pytest.mark.parametrize("has_kernels", [True, False])
def test_later_changes_of_the_given_arrays_change_nothing(folders, has_kernels, monkeypatch):
    if not has_kernels:  # which copy weights as they pack them
        monkeypatch.setattr(native, "library", lambda: None)
    given = {name: aligned(array) for name, array in tensors_of(folders[1]).items()}
    with LLM(str(folders[0]), **SIZES) as llm:
        llm.update_weights(given)
        expected = bits(llm)
        for array in given.values():
            array[...] = 0
        llm.engine.reset_prefix_cache()
        assert bits(llm) == expected


def test_memory_does_not_grow(folders, llm):
    llm.update_weights(tensors_of(folders[1]))

    def live_bytes():
        gc.collect()
        return sum(array.nbytes for array in jax.live_arrays())

    before = live_bytes()
    for folder in folders:
        llm.update_weights(tensors_of(folder))
    assert live_bytes() <= 1.02 * before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({NAME: lambda x: x[:-1]}, f"tensor '{NAME}' has shape"),
        ({NAME: lambda x: x.astype(np.int32)}, f"tensor '{NAME}' is int32, and float32 in the model"),
        ({NAME: lambda x: "text"}, f"tensor '{NAME}' is no array"),
        ({NAME: None}, f"not in the checkpoint: {NAME}"),
        ({"model.more.weight": lambda x: np.zeros(3)}, "tensor 'model.more.weight' .* has no parameter"),
    ],
)
def test_what_does_not_fit_is_named_and_changes_nothing(change, message, folders, llm):
    before = bits(llm)
    given = tensors_of(folders[1])
    for name, make in change.items():
        given[name] = None if make is None else make(given.get(name))
    with pytest.raises(CheckpointError, match=message) as caught:
        llm.update_weights({name: x for name, x in given.items() if x is not None})
    assert "\n" not in str(caught.value)
    llm.engine.reset_prefix_cache()
    assert bits(llm) == before


def test_a_folder_of_another_model_and_other_versions_are_refused(folders, llm, tmp_path):
    other = write_checkpoint(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"has layer_types=.*, and the engine's model"):
        llm.update_weights(str(other))
    for version in (0, -1, "", 1.5, True):
        with pytest.raises(RequestError, match="version"):
            llm.update_weights(str(folders[0]), version)
    with pytest.raises(ConfigError, match="enable_lora cannot sleep"):
        llm.sleep()


def test_open_streams_go_on_with_the_new_weights(folders):
    """Each token is the new weights' own continuation of all before it, and says by whom it was sampled."""
    first, second = folders
    with LLM(str(first), **SIZES) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
        stream = llm.stream({"prompt_token_ids": PROMPT}, params)
        tokens, versions = [], []

        def take(output):
            tokens.extend(output.token_ids)
            versions.extend(output.weight_versions or [0] * len(output.token_ids))

        while len(tokens) < 5:
            take(next(stream))
        llm.pause()
        with pytest.raises(EngineError, match="paused"):
            bits(llm)
        llm.update_weights(tensors_of(second), version=7)
        llm.resume()
        for output in stream:
            take(output)
    count = versions.count(0)
    assert versions == [0] * count + [7] * (20 - count)
    assert 5 <= count < 20
    for folder, prompt, expected in (
        (first, PROMPT, tokens[:count]),
        (second, PROMPT + tokens[:count], tokens[count:]),
    ):
        with LLM(str(folder), **SIZES) as llm:
            assert llm.generate([prompt], params)[0].outputs[0].token_ids[: len(expected)] == expected


def test_no_block_of_other_weights_comes_back_from_the_host(folders):
    first, second = folders
    with LLM(str(first), **{**SIZES, "kv_cache_memory": "64KiB", "max_model_len": 64}, kv_offloading_size=0.01) as llm:
        before = bits(llm)
        for start in (60, 70, 80):
            bits(llm, list(range(start, start + 41)))  # the first prompt's blocks go to the host
        llm.update_weights(str(second))
        assert llm.generate([PROMPT], GREEDY)[0].num_cached_tokens == 0
        assert bits(llm) == fresh(second)
        llm.update_weights(str(first))
        assert bits(llm) == before


def test_sleep_frees_caches_and_weights(folders):
    first, second = folders
    with LLM(str(first), **SIZES) as llm:
        before, weight_bytes = bits(llm), llm.weight_bytes
        llm.sleep(1)
        assert not llm.engine.runner.executor.stages[0].state.caches
        with pytest.raises(EngineError, match="sleeps: call wake_up"):
            bits(llm)
        llm.wake_up()
        assert bits(llm) == before
        llm.sleep(2)
        assert llm.weight_bytes == 0
        llm.wake_up(["kv_cache"])
        with pytest.raises(EngineError, match="sleeps"):
            bits(llm)
        llm.wake_up(["weights"])  # from the folder
        assert bits(llm) == before
        assert llm.weight_bytes == weight_bytes
        llm.sleep(2)
        llm.update_weights(tensors_of(second))
        llm.wake_up()
        assert bits(llm) == fresh(second)
        llm.sleep(2)
        with pytest.raises(EngineError, match="given by the caller"):
            llm.wake_up()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("arguments", [{"quantization": "int8"}, {"quantization": "int4"}, {"dtype": "bfloat16"}])
def test_weights_are_stored_as_at_load(arguments, folders):
    first, second = folders
    with LLM(str(first), **SIZES, **arguments) as llm:
        llm.update_weights(tensors_of(second))
        assert bits(llm) == fresh(second, **arguments)


def test_an_engine_begins_with_given_weights(folders, of_second, tmp_path):
    """A model's own arrays are not copied, and the folder needs no weights."""
    first, second = folders
    bare = shutil.copytree(first, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    with LLM.from_params(str(bare), tensors_of(second), **SIZES) as llm:
        assert bits(llm) == of_second
        with LLM.from_params(str(bare), llm.engine.runner.model, **SIZES) as shared:
            assert bits(shared) == bits(llm)
            pairs = zip(
                *(each.engine.runner.executor.stages[0].context.model.arrays for each in (llm, shared)), strict=True
            )
            assert all(ours is theirs for ours, theirs in pairs)
    with pytest.raises(JaxisError):
        LLM.from_params(str(bare), {}, **SIZES)


def test_a_merged_adapter_keeps_the_weights_what_they_are(tmp_path):
    adapter = save_adapter(EMBEDDED_MODEL, tmp_path / "adapter")
    with LLM(adapter=str(adapter), merge=True, **SIZES) as llm, pytest.raises(ConfigError, match="--adapter merges"):
        llm.update_weights(str(EMBEDDED_MODEL))


@pytest.mark.multi_device
def test_several_devices_get_other_weights(tmp_path):
    """Tensor parallelism, pipeline stages, both, and data ranks."""
    first = write_checkpoint(tmp_path / "first", "qwen3_moe")
    second = other_weights(first, tmp_path / "second")
    printed = run_on_devices("-m", "tests.engine.live_weights_script", str(first), str(second))
    assert printed.count("same answers") == 4
