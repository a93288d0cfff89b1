"""The pack cache: a second start has the bits of the first, from a mapped file, and never those of another model."""

import fcntl
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from jaxis.cli.main import app
from jaxis.engine.arguments import EngineArgs
from jaxis.engine.opened_model import open_model
from jaxis.errors import ConfigError
from jaxis.host.progress import ProgressDisplay
from jaxis.kernels import native
from jaxis.loading.packed_name import PACKED
from jaxis.packed.cache import PackCache
from jaxis.packed.cached_folders import packed_models, root
from jaxis.packed.folder import PackedFolder
from jaxis.pooling.embedder import open_embedder
from tests.support.adapters import save_adapter
from tests.support.quantized_models import assert_equal
from tests.support.tiny_checkpoints import write_checkpoint

pytestmark = pytest.mark.skipif(native.library() is None, reason="needs the native kernels")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("jaxis.engine.fingerprint.sources", lambda: "this version")


@pytest.fixture
def source(tmp_path):
    return write_checkpoint(tmp_path / "source")


class Notes(ProgressDisplay):
    def __init__(self):
        super().__init__(enabled=False)
        self.said = []

    def note(self, message):
        self.said.append(message)


def start(model, **arguments):
    """Loads a model; returns it, whether its weights are mapped from the cache, and what was said."""
    args, notes = EngineArgs(model=str(model), pack_cache=True, **arguments), Notes()
    opened = open_model(args)
    loaded = opened.load(args, opened.make_meshes(EngineArgs()), notes)
    return loaded.models[0], isinstance(loaded.vllm_config.quant_config, PackedFolder), notes.said


def plain(model, **arguments):
    args = EngineArgs(model=str(model), **arguments)
    opened = open_model(args)
    return opened.load(args, opened.make_meshes(args), Notes()).models[0]


@pytest.mark.parametrize(
    "arguments",
    [{}, {"quantization": "int8"}, {"quantization": [{"module_path": ".*mlp.*", "weight_qtype": "int4"}]}],
    ids=["floats", "int8", "rules"],
)
def test_the_second_start_maps_the_weights_of_the_first(source, arguments):
    first, was_mapped, [said] = start(source, **arguments)
    assert not was_mapped
    assert "packed for the next start" in said
    second, is_mapped, said = start(source, max_model_len=64, **arguments)
    assert is_mapped
    assert said == []
    assert_equal(first, second)
    assert_equal(plain(source, **arguments), second)


def test_a_merged_adapter_is_part_of_the_weights(source, tmp_path):
    adapters = [str(save_adapter(source, tmp_path / f"adapter{seed}", seed=seed)) for seed in range(2)]
    start(source)
    for adapter in adapters:
        assert not start(source, adapter=adapter, merge=True)[1]
        assert_equal(plain(source, adapter=adapter, merge=True), start(source, adapter=adapter, merge=True)[0])
    assert start(source, adapter=adapters[0], merge=True)[1]


@pytest.mark.parametrize(
    "arguments",
    [{"quantization": "int4"}, {"dtype": "bfloat16"}, {"hf_overrides": {"tie_word_embeddings": True}}],
    ids=lambda each: next(iter(each)),
)
def test_arguments_that_change_weights_have_a_place_of_their_own(source, arguments):
    start(source)
    model, is_mapped, _ = start(source, **arguments)
    assert not is_mapped
    assert_equal(plain(source, **arguments), model)
    assert len(packed_models()) == 2


def edit(folder):
    """Changes one value, not the size of a file, and says that it is as old as before."""
    path = folder / "model.safetensors"
    tensors, times = load_file(path), path.stat()
    name = min(tensors)
    tensors[name] = np.array(tensors[name])
    tensors[name].flat[3] += 1
    save_file(tensors, path, {"format": "pt"})
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_an_edited_checkpoint_is_packed_anew(source):
    start(source)
    edit(source)
    model, is_mapped, _ = start(source)
    assert not is_mapped
    assert_equal(plain(source), model)
    assert_equal(plain(source), start(source)[0])


def test_a_checkpoint_that_is_edited_while_it_is_read_is_not_kept(source, monkeypatch):
    load = PackCache.find
    monkeypatch.setattr(PackCache, "find", lambda cache: (edit(source), load(cache))[1])
    assert start(source)[2] == []
    assert packed_models() == []


def test_other_code_packs_anew(source, monkeypatch):
    start(source)
    monkeypatch.setattr("jaxis.engine.fingerprint.sources", lambda: "another version")
    assert not start(source)[1]
    monkeypatch.setattr("jaxis.engine.fingerprint.sources", lambda: None)  # files are changing
    assert start(source)[1:] == (False, [])


def damage(at):
    [kept] = packed_models()
    path = kept.path / PACKED
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.unlink()
    path.write_bytes(content)


@pytest.mark.parametrize("at", [100, -100])
def test_a_damaged_folder_is_packed_anew(source, at):
    start(source)
    damage(at)
    model, is_mapped, said = start(source)
    assert not is_mapped
    assert "packed for the next start" in said[-1]
    assert_equal(plain(source), model)
    assert start(source)[1]


def test_a_damaged_folder_that_cannot_be_deleted_is_not_used(source, monkeypatch):
    start(source)
    damage(-100)
    monkeypatch.setattr("jaxis.packed.cache.remove", lambda folder: None)
    model, is_mapped, _ = start(source)
    assert not is_mapped
    assert_equal(plain(source), model)


def test_the_least_recently_used_go_first(tmp_path):
    sources = [write_checkpoint(tmp_path / name, tokenizer=False) for name in "abcd"]
    start(sources[0])
    [kept] = packed_models()
    limit = int(3.5 * kept.nbytes)
    for each in sources[1:3]:
        start(each, pack_cache_size=limit)
    assert start(sources[0])[1]
    start(sources[3], pack_cache_size=limit)
    assert {model.name for model in packed_models()} == {str(sources[i]) for i in (0, 2, 3)}
    assert sum(model.nbytes for model in packed_models()) <= limit


def test_a_model_larger_than_the_cache_is_not_kept(source):
    _, _, [said] = start(source, pack_cache_size=1000)
    assert "not packed" in said
    assert "pack_cache_size" in said
    assert packed_models() == []


def test_what_a_killed_process_left_goes_with_the_next_one_that_is_packed(source):
    (left := root() / ".0123-partial").mkdir(parents=True)
    start(source)
    assert not left.exists()
    assert start(source)[1]


def test_a_process_does_not_wait_for_another_that_packs(source):
    root().mkdir(parents=True)
    with (root() / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "another process" in start(source)[2][0]
    start(source)
    assert start(source)[1]


@pytest.mark.slow
def test_processes_that_start_at_once_have_the_same_answers(source):
    program = (
        "import sys, jaxis; llm = jaxis.LLM(sys.argv[1], pack_cache=True, kv_cache_memory='4MiB')\n"
        "print(llm.generate({'prompt_token_ids': [5, 6, 7]}, jaxis.SamplingParams(max_tokens=5, temperature=0))"
        "[0].outputs[0].token_ids)"
    )
    for _ in range(2):
        processes = [
            subprocess.Popen([sys.executable, "-c", program, str(source)], stdout=subprocess.PIPE) for _ in range(4)
        ]
        answers = {process.communicate()[0] for process in processes}
        assert [process.returncode for process in processes] == [0] * 4
        assert len(answers) == 1
    assert [path.name for path in root().iterdir() if path.name != ".lock"] == [packed_models()[0].path.name]


def test_the_cache_is_listed_and_emptied(source):
    def run(*arguments):
        result = CliRunner().invoke(app, ["list", *arguments])
        return [line for line in result.stdout.splitlines() if str(source) in line], result.stderr

    start(source)
    assert run()[0][0].split()[1] == "packed"
    assert json.loads(run("--json")[0][0])["nbytes"] == packed_models()[0].nbytes
    assert "freed" in run("--empty-pack-cache")[1]
    assert packed_models() == []
    assert not start(source)[1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"load_format": "dummy"}, "load_format='dummy'"),
        ({"pack_cache_size": "much"}, "pack_cache_size='much'"),
        ({"tensor_parallel_size": 2}, "one CPU device"),
    ],
)
def test_what_cannot_be_had_is_refused(source, arguments, said):
    with pytest.raises(ConfigError, match=said) as error:
        start(source, **arguments)
    assert "\n" not in str(error.value)


def test_models_that_make_vectors_refuse_it(source):
    args = EngineArgs(model=str(source), pack_cache=True)
    with pytest.raises(ConfigError, match="pack_cache=True is for models that generate text"):
        open_embedder(args, open_model(args), Notes())
