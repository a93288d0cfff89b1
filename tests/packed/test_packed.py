"""A packed folder is the model that was packed, bit for bit; a changed one is refused in one line."""

import itertools
import json
import shutil
import weakref

import gguf
import jax
import numpy as np
import pytest

from jaxis import LLM, SamplingParams
from jaxis.bringup.convert.to_packed import pack_model
from jaxis.engine.arguments import EngineArgs
from jaxis.engine.opened_model import EMBEDDED_MODEL, open_model
from jaxis.errors import CheckpointError, ConfigError, JaxisError, RequestError
from jaxis.host.progress import ProgressDisplay
from jaxis.kernels import native
from jaxis.loading.open_checkpoint import open_checkpoint
from jaxis.loading.packed_name import PACKED
from jaxis.models.model_loader import construct_abstractly
from jaxis.packed import digests
from jaxis.packed.digests import seal
from jaxis.packed.folder import PackedFolder
from tests.support.gguf_blocks import QUANTIZED, random_rows
from tests.support.gguf_models import write_gguf
from tests.support.quantized_models import assert_equal, values
from tests.support.tiny_checkpoints import DELTA_NET_SIZES, GPT_OSS_SIZES, LATENT_SIZES, write_checkpoint
from tests.support.vision_checkpoints import random_image
from tests.support.vision_families import FAMILIES

pytestmark = pytest.mark.skipif(native.library() is None, reason="needs the native kernels")

QUIET = ProgressDisplay(enabled=False)


def load(model, **arguments):
    args = EngineArgs(model=str(model), **arguments)
    opened = open_model(args)
    return opened.load(args, opened.make_meshes(args), QUIET)


def assert_packs(source, folder, **arguments):
    pack_model(EngineArgs(model=str(source), **arguments), folder, QUIET)
    [original], [packed] = load(source, **arguments).models, load(folder).models
    assert_equal(original, packed)


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen3", {}),
        ("qwen2", {"tie_word_embeddings": True, "dtype": "bfloat16"}),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
        ("deepseek_v2", LATENT_SIZES),
        ("gpt_oss", GPT_OSS_SIZES),
        ("qwen3_5_text", DELTA_NET_SIZES),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_the_model_of_a_packed_folder_is_the_one_that_was_packed(family, sizes, quantization, tmp_path):
    source = write_checkpoint(tmp_path / "source", family, **sizes)
    assert_packs(source, tmp_path / "packed", quantization=quantization)


def test_the_model_of_a_packed_gguf_file_is_the_one_that_was_packed(tmp_path):
    folder = write_checkpoint(tmp_path / "source", hidden_size=256, intermediate_size=256, num_attention_heads=16)
    kinds = itertools.cycle(QUANTIZED)

    def quantize(_, tensor):
        kind = next(kinds)
        return random_rows(kind, *tensor.shape), gguf.GGMLQuantizationType[kind]

    write_gguf(folder, tmp_path / "model.gguf", quantize=quantize)
    assert_packs(tmp_path / "model.gguf", tmp_path / "packed")


QUICK_TOWERS = ("Gemma 3", "Qwen2.5-VL")


def write_gemma3(folder):
    folder.mkdir()
    next(each for each in FAMILIES if each.name == "Gemma 3").write(folder)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(each, marks=() if each.name in QUICK_TOWERS else pytest.mark.slow, id=each.name)
        for each in FAMILIES
        # Qwen3.8's table of n-grams stays in its own files, and such a model is not packed.
        if each.name not in ("LLaVA-OneVision, one image", "Qwen3.8-Flash-Next")
    ],
)
def test_a_packed_vision_tower_sees_what_the_model_sees(family, tmp_path):
    (tmp_path / "source").mkdir()
    family.write(tmp_path / "source")
    quantized = {"quantization": "int8", "vision_quantization": "int8"}
    args = EngineArgs(model=str(tmp_path / "source"), **quantized)
    pack_model(args, tmp_path / "packed", QUIET)
    prompt = {"prompt": f"Look: {family.placeholder}", "multi_modal_data": {"image": random_image(70, 50)}}
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=2, ignore_eos=True)

    def bits(model, **arguments):
        with LLM(str(model), max_num_seqs=2, kv_cache_memory="4MiB", show_progress=False, **arguments) as llm:
            [completion] = llm.generate([prompt], params)[0].outputs
        assert completion.logprobs is not None
        return completion.token_ids, [{k: v.logprob.hex() for k, v in step.items()} for step in completion.logprobs]

    assert bits(tmp_path / "packed") == bits(tmp_path / "source", **quantized)


def test_digests_hold_what_they_read_when_nobody_waits_for_them(monkeypatch):
    begun = []
    monkeypatch.setattr(digests, "begin_each_part", lambda function, *_: begun.append(function) or [])
    array = np.arange(256, dtype=np.uint8)
    held = weakref.ref(array)
    digests.begin_digests([array])
    del array
    assert held() is not None
    assert len(begun[0](0, 1)[0]) == 8


def test_a_packed_vision_tower_is_not_quantized_anew(tmp_path):
    write_gemma3(tmp_path / "source")
    pack_model(EngineArgs(model=str(tmp_path / "source")), tmp_path / "packed", QUIET)
    with pytest.raises(ConfigError, match="vision_quantization"):
        LLM(str(tmp_path / "packed"), vision_quantization="int8", show_progress=False)


def test_a_folder_that_was_packed_without_its_tower_takes_text(tmp_path):
    write_gemma3(tmp_path / "source")
    arguments = {"limit_mm_per_prompt": {"image": 0}}
    pack_model(EngineArgs(model=str(tmp_path / "source"), **arguments), tmp_path / "packed", QUIET)
    with LLM(str(tmp_path / "packed"), kv_cache_memory="4MiB", show_progress=False) as llm:
        with pytest.raises(RequestError, match="no vision tower"):
            llm.generate({"prompt": "<start_of_image>", "multi_modal_data": {"image": random_image(24, 24)}})
        assert llm.generate("Look", SamplingParams(max_tokens=2))[0].finished


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed") / "tiny"
    pack_model(EngineArgs(model=str(EMBEDDED_MODEL), quantization="int8"), folder, QUIET)
    return folder


def test_a_packed_folder_answers_with_the_bits_of_its_model_from_the_mapped_file(packed):
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=2, ignore_eos=True)

    def bits(model, **arguments):
        with LLM(str(model), max_model_len=64, kv_cache_memory="8MiB", show_progress=False, **arguments) as llm:
            [completion] = llm.generate(["What is the capital of France?"], params)[0].outputs
        assert completion.logprobs is not None
        return completion.token_ids, [{k: v.logprob.hex() for k, v in step.items()} for step in completion.logprobs]

    assert bits(packed) == bits(EMBEDDED_MODEL, quantization="int8")


def test_the_panels_of_a_packed_folder_are_memory_of_its_file(packed):
    [model] = load(packed).models
    starts = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(values(model)) if leaf.nbytes >= 4096]
    with open("/proc/self/maps") as maps:
        spans = [
            [int(end, 16) for end in line.split()[0].split("-")] for line in maps if line.rstrip().endswith(PACKED)
        ]
    assert all(any(first <= start < last for first, last in spans) for start in starts)
    assert all(start % 4096 == 0 for start in starts)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"quantization": "int4"}, "quantization"),
        ({"dtype": "bfloat16"}, "dtype='bfloat16'"),
        ({"tensor_parallel_size": 2}, "one CPU device"),
    ],
)
def test_arguments_that_a_packed_folder_cannot_honour_are_refused(packed, arguments, said):
    args = EngineArgs(model=str(packed), **arguments)
    opened = open_model(args)
    with pytest.raises(ConfigError, match=said) as error:
        opened.load(args, opened.make_meshes(EngineArgs(model=str(packed))), QUIET)
    assert "\n" not in str(error.value)


def test_what_reads_tensors_refuses_a_packed_folder(packed):
    with pytest.raises(CheckpointError, match="is packed"):
        open_checkpoint(packed)


def change_description(folder, **changes):
    """Changes what is said of the arrays, and seals it again."""
    path = folder / PACKED
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    metadata = header.pop("__metadata__")
    text = json.dumps(json.loads(metadata["description"]) | changes)
    sizes = {name: each["shape"][0] for name, each in header.items()}
    header["__metadata__"] = metadata | {"description": text, "seal": seal(text, sizes)}
    header = json.dumps(header).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + size :])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": "0.0.1"}, "packed by jaxis 0.0.1"),
        ({"arithmetic": "0"}, "other arithmetic"),
        ({"parts": {"OtherModel": {}}}, "holds OtherModel"),
    ],
)
def test_a_folder_of_another_version_arithmetic_or_model_is_refused(packed, tmp_path, changes, said):
    folder = shutil.copytree(packed, tmp_path / "copy")
    change_description(folder, **changes)
    with pytest.raises((CheckpointError, ConfigError), match=said) as error:
        load(folder)
    assert "\n" not in str(error.value)


def test_another_config_is_refused(packed, tmp_path):
    folder = shutil.copytree(packed, tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 5000.0}))
    with pytest.raises(CheckpointError, match=r"config\.json is not the file that was packed"):
        load(folder)


def mutate(content, rng):
    """One of the ways in which a file is damaged."""
    at, size = int(rng.integers(len(content))), int(rng.integers(1, 5000))
    kind = rng.integers(6)
    if kind == 0:
        return content[:at]
    if kind == 1:  # a bit in the header
        at %= 8 + int.from_bytes(content[:8], "little")
    if kind < 4:
        return content[:at] + bytes([content[at] ^ 1 << int(rng.integers(8))]) + content[at + 1 :]
    if kind == 4:  # a hole
        return content[:at] + bytes(len(content[at : at + size])) + content[at + size :]
    return content[:at] + rng.bytes(size) + content[at:]


@pytest.mark.parametrize("seed", range(2))
def test_no_damaged_file_gives_other_weights(packed, tmp_path, seed):
    rng = np.random.default_rng(seed)
    args = EngineArgs(model=str(packed))
    opened = open_model(args)
    config = opened.load(args, opened.make_meshes(args), QUIET).vllm_config
    content = (packed / PACKED).read_bytes()
    folder = shutil.copytree(packed, tmp_path / "copy")
    for _ in range(50):
        changed = mutate(content, rng)
        (folder / PACKED).unlink()  # a new file: the old one may be mapped
        (folder / PACKED).write_bytes(changed)
        if changed == content:
            continue
        model = construct_abstractly(config)
        with pytest.raises(JaxisError) as error:
            PackedFolder(folder).fill(model)
        assert "\n" not in str(error.value)
    (folder / PACKED).unlink()
    with pytest.raises(CheckpointError):
        load(folder)
