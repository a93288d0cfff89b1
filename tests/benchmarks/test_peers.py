"""The peers run the checkpoint's own weights: their logits are the reference's."""

import importlib
import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from jaxis.bench.run import Load

PROMPT = [5, 17, 3, 99, 42, 7, 64, 23]


@pytest.fixture(scope="module")
def reference_logits(checkpoint):
    """Logits of the token after the prompt, [V]."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint(), dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([PROMPT])).logits[0, -1].numpy()


@pytest.fixture(scope="module")
def gguf(checkpoint, tmp_path_factory):
    pytest.importorskip("gguf")
    pytest.importorskip("llama_cpp")
    from gguf_file import write_gguf

    file = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(checkpoint(), file)
    return file


def test_llama_cpp_computes_the_checkpoint_s_logits(gguf, reference_logits):
    import llama_cpp

    from peers.llama_cpp_peer import LlamaCppPeer

    peer = LlamaCppPeer(gguf, {"threads": 1}, [])
    peer._make_context(Load(2, 16, 4))
    alone = peer._decode([PROMPT], 0)
    logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(peer._context), (len(reference_logits),))
    assert alone == [reference_logits.argmax()]
    assert np.corrcoef(logits, reference_logits)[0, 1] > 0.999  # its weights are bfloat16

    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(peer._context), True)
    assert peer._decode([PROMPT[::-1], PROMPT], 0)[1] == alone[0]


def test_llama_cpp_reads_what_the_file_holds(gguf, checkpoint):
    from peers.llama_cpp_peer import LlamaCppPeer

    config = json.loads((checkpoint() / "config.json").read_text())
    cost = LlamaCppPeer(gguf, {"threads": 1}, []).decode_cost
    float16 = 2
    heads = 2 * config["num_key_value_heads"] * config["head_dim"]
    assert cost.kv_bytes_per_token == config["num_hidden_layers"] * heads * float16
    assert cost.weight_bytes < gguf.stat().st_size


@pytest.mark.sampled(3)
@pytest.mark.parametrize("peer", ["transformers", "llama.cpp", "jaxis"])
def test_a_peer_decodes_as_often_as_asked(peer, checkpoint, request):
    from worker import CLASSES

    load = Load(batch_size=2, input_len=6, output_len=4)
    model = request.getfixturevalue("gguf") if peer == "llama.cpp" else checkpoint()
    module, _, name = CLASSES[peer].partition(":")
    arguments = {"jaxis": {"max_num_batched_tokens": 64}, "transformers": {"threads": 1, "dtype": "float32"}}
    loads = [Load(batch_size=1, input_len=3, output_len=2), load]
    peer = getattr(importlib.import_module(module), name)(model, arguments.get(peer, {"threads": 1}), loads)
    peer.run(loads[0], np.random.default_rng(0))
    peer.warm_up(load, np.random.default_rng(0))
    run = peer.run(load, np.random.default_rng(0))
    assert len(run.step_seconds) == 3
    assert min(run.step_seconds) > 0
    assert len(run.first_token_seconds) == 2
    assert 6 < run.context_len <= 6 + 4
    assert peer.decode_cost.step_bytes(2, 8) == peer.decode_cost.weight_bytes + 16 * peer.decode_cost.kv_bytes_per_token


def test_transformers_and_jaxis_read_the_same_bytes(checkpoint):
    from peers.jaxis_peer import JaxisPeer
    from peers.transformers_peer import TransformersPeer

    load = Load(1, 6, 4)
    ours = JaxisPeer(checkpoint(), {"dtype": "float32", "max_num_batched_tokens": 64}, [load])
    theirs = TransformersPeer(checkpoint(), {"threads": 1, "dtype": "float32"}, [load])
    assert ours.decode_cost == theirs.decode_cost


IK_OUTPUT = """
main: n_kv_max = 512, n_batch = 2048, n_ubatch = 512

|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |
|-------|--------|------|--------|----------|----------|----------|----------|----------|----------|
|    32 |      4 |    2 |     72 |    0.408 |   156.73 |    0.313 |    25.58 |    0.721 |    99.85 |
|    32 |      4 |    2 |     72 |    0.419 |   152.85 |    0.348 |    22.98 |    0.767 |    93.88 |

llama_print_timings:        load time =     902.64 ms
"""


@pytest.fixture
def ik_peer(tmp_path):
    """A peer whose tool writes its arguments to a file and prints IK_OUTPUT."""
    from peers.ik_llama_cpp_peer import TOOL, IkLlamaCppPeer

    tool = tmp_path / TOOL
    tool.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\ncat << EOF >&2{IK_OUTPUT}EOF\n')
    tool.chmod(0o755)
    return IkLlamaCppPeer(tmp_path / "model.gguf", {"threads": 3, "binaries": str(tmp_path)}, [])


def test_ik_llama_cpp_s_second_pass_is_the_run(ik_peer, tmp_path):
    run = ik_peer.run(Load(batch_size=2, input_len=32, output_len=5), np.random.default_rng(0))
    assert run.first_token_seconds == [0.419, 0.419]
    assert run.step_seconds == pytest.approx([0.348 / 4] * 4)
    assert run.context_len == 34.5
    arguments = (tmp_path / "arguments").read_text()
    assert arguments == f"-m {tmp_path}/model.gguf -t 3 -fa 1 -rtr -c 256 -npl 2 -npp 32,32 -ntg 4\n"


def test_a_long_prompt_runs_once_in_ik_llama_cpp(ik_peer, tmp_path):
    ik_peer.run(Load(batch_size=1, input_len=4096, output_len=5), np.random.default_rng(0))
    assert "-c 4352 -npl 1 -npp 4096 -ntg 4" in (tmp_path / "arguments").read_text()


def test_ik_llama_cpp_that_is_not_there_or_prints_something_else_is_an_error(tmp_path):
    from peers.ik_llama_cpp_peer import IkLlamaCppPeer, parse_table

    for folder in (None, str(tmp_path)):
        with pytest.raises(FileNotFoundError, match="--ik-llama-cpp"):
            IkLlamaCppPeer(tmp_path / "model.gguf", {"threads": 1, "binaries": folder}, [])
    with pytest.raises(RuntimeError, match="columns"):
        parse_table(IK_OUTPUT.replace("T_PP s", "T_PP ms"))
    with pytest.raises(RuntimeError, match="without rows"):
        parse_table(IK_OUTPUT.replace("    32 |", "    pp |"))


def test_a_long_prompt_of_jaxis_is_warmed_up_with_a_shorter_one(checkpoint, monkeypatch):
    from peers import jaxis_peer

    load = Load(batch_size=1, input_len=100, output_len=8)
    peer = jaxis_peer.JaxisPeer(checkpoint(), {"max_num_batched_tokens": 16}, [load])
    runs = []
    monkeypatch.setattr(jaxis_peer, "run_batch", lambda _engine, load, _rng: runs.append(load))
    for each in (load, Load(1, 20, 8), Load(4, 100, 8)):
        peer.warm_up(each, np.random.default_rng(0))
    assert runs == [Load(1, 2 * 16 + 100 % 16, 4), Load(1, 20, 4), Load(4, 100, 4)]


def test_a_float32_copy_has_the_same_weights(checkpoint, tmp_path):
    from engines import prepare_weights
    from jaxis.loading.checkpoint import Checkpoint

    folder = prepare_weights(checkpoint(), "float32", tmp_path)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    with Checkpoint(checkpoint()) as source, Checkpoint(folder) as copy:
        weights = dict(source.iterate())
        for name, tensor in copy.iterate():
            assert tensor.dtype == np.float32
            np.testing.assert_array_equal(tensor, weights.pop(name).astype(np.float32))
        assert not weights
    assert prepare_weights(checkpoint(), "float32", tmp_path) == folder


def test_a_family_that_gguf_is_not_written_for_is_one_clear_error(checkpoint, tmp_path):
    pytest.importorskip("gguf")
    pytest.importorskip("llama_cpp")
    from gguf_file import write_gguf
    from jaxis.errors import CheckpointError

    with pytest.raises(CheckpointError, match="MistralForCausalLM"):
        write_gguf(checkpoint("mistral"), tmp_path / "model.gguf")
