"""Fingerprints: equal for equal engines, and different for whatever changes an answer."""

import dataclasses
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxis.engine import fingerprint
from jaxis.engine.arguments import EngineArgs
from jaxis.engine.fingerprint import WHOLE_FILE_BYTES, engine_fingerprint
from jaxis.engine.opened_model import EMBEDDED_MODEL
from jaxis.kernels import native

ARGUMENTS = EngineArgs()


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(EMBEDDED_MODEL, tmp_path / "model")
    return tmp_path / "model"


def test_it_is_the_contents_and_not_the_place(folder, tmp_path):
    expected = engine_fingerprint(EMBEDDED_MODEL, ARGUMENTS, 2048)
    assert engine_fingerprint(folder, ARGUMENTS, 2048) == expected
    (folder / "README.md").write_text("x")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "x.json").write_text("x")
    named = dataclasses.replace(ARGUMENTS, model=str(folder), cache_dir=str(tmp_path), token="secret")
    assert engine_fingerprint(folder, named, 2048) == expected
    assert expected.startswith("fp_")
    assert len(expected) == 23


@pytest.mark.parametrize(
    "changed",
    [
        {"load_format": "dummy"},
        {"chat_template": "chatml"},
        {"quantization": "int8"},
        {"kv_cache_dtype": "int8"},
        {"dtype": "bfloat16"},
        {"hf_overrides": {"rope_theta": 5e5}},
    ],
)
def test_arguments_that_change_answers_change_it(changed):
    arguments = dataclasses.replace(ARGUMENTS, **changed)
    assert engine_fingerprint(EMBEDDED_MODEL, arguments, 2048) != engine_fingerprint(EMBEDDED_MODEL, ARGUMENTS, 2048)


def test_how_several_devices_share_the_model_changes_it():
    """They sum in another order than one does, and without native kernels the batch counts, too."""
    changes = [
        {},
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 4},
        {"tensor_parallel_size": 4, "decode_context_parallel_size": 4},
        {"tensor_parallel_size": 4, "nnodes": 2},
        {"tensor_parallel_size": 4, "enable_expert_parallel": True},
        {"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True},
        {"tensor_parallel_size": 2, "max_num_batched_tokens": 64},
    ]
    arguments = [dataclasses.replace(ARGUMENTS, **change) for change in changes]
    assert len({engine_fingerprint(EMBEDDED_MODEL, each, 2048) for each in arguments}) == len(changes)
    published = dataclasses.replace(arguments[1], kv_events_config={"enable_kv_cache_events": True})
    assert engine_fingerprint(EMBEDDED_MODEL, published, 2048) == engine_fingerprint(EMBEDDED_MODEL, arguments[1], 2048)


def test_a_server_that_draws_its_seed_keeps_it_unless_the_seed_makes_the_weights():
    drawn = [dataclasses.replace(ARGUMENTS, seed=seed, fit_memory=True) for seed in (1, 2)]
    first = engine_fingerprint(EMBEDDED_MODEL, ARGUMENTS, 2048)
    assert [engine_fingerprint(EMBEDDED_MODEL, each, 2048) for each in drawn] == [first, first]
    random = [dataclasses.replace(each, load_format="dummy") for each in drawn]
    assert len({engine_fingerprint(EMBEDDED_MODEL, each, 2048) for each in random}) == 2


def test_the_context_kernels_and_batches_count_where_answers_depend_on_them(monkeypatch):
    batched = dataclasses.replace(ARGUMENTS, max_num_batched_tokens=64)
    first = engine_fingerprint(EMBEDDED_MODEL, ARGUMENTS, 2048)
    assert engine_fingerprint(EMBEDDED_MODEL, ARGUMENTS, 1024) != first
    if native.usable():  # which give the same bits in any batch
        assert engine_fingerprint(EMBEDDED_MODEL, batched, 2048) == first
    monkeypatch.setattr(native, "usable", lambda: False)
    plain = engine_fingerprint(EMBEDDED_MODEL, ARGUMENTS, 2048)
    assert plain != first or not native.library()
    assert engine_fingerprint(EMBEDDED_MODEL, batched, 2048) != plain
    monkeypatch.setattr(fingerprint, "__version__", "0.0.1")
    assert engine_fingerprint(EMBEDDED_MODEL, ARGUMENTS, 2048) != plain


def test_rules_in_a_file_are_their_text(tmp_path):
    rules = tmp_path / "rules.yaml"
    fingerprints = []
    for method in ("int8", "int4", "int8"):
        rules.write_text(f"qwix:\n  rules:\n    - module_path: .*\n      weight_qtype: {method}\n")
        fingerprints.append(engine_fingerprint(EMBEDDED_MODEL, EngineArgs(quantization=str(rules)), 2048))
    assert fingerprints[0] == fingerprints[2] != fingerprints[1]


def test_other_weights_in_files_of_equal_sizes_change_it(folder):
    before = engine_fingerprint(folder, ARGUMENTS, 2048)
    for file in folder.glob("*.safetensors"):
        save_file({name: _next(tensor) for name, tensor in load_file(file).items()}, file)
    assert engine_fingerprint(folder, ARGUMENTS, 2048) != before


def test_large_files_are_sampled_to_their_end(tmp_path):
    data = bytearray(4 * WHOLE_FILE_BYTES)
    file = tmp_path / "model.safetensors"
    seen = set()
    for position in (None, 0, WHOLE_FILE_BYTES - 1, len(data) - 1):
        changed = bytearray(data)
        if position is not None:
            changed[position] = 1
        file.write_bytes(changed)
        seen.add(engine_fingerprint(tmp_path, ARGUMENTS, 2048))
    file.write_bytes(data[:-1])
    seen.add(engine_fingerprint(tmp_path, ARGUMENTS, 2048))
    assert len(seen) == 5


def _next(tensor):
    return np.nextafter(tensor, np.inf) if tensor.dtype == np.float32 else tensor[::-1].copy()
