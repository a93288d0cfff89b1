"""What is chosen for a memory: against sizes counted by hand, and by loading what was chosen."""

from __future__ import annotations

import json
import re

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from jaxis import LLM
from jaxis.engine import memory_plan
from jaxis.engine.arguments import EngineArgs
from jaxis.engine.execution import cache_memory
from jaxis.engine.memory_budget import MemoryBudget
from jaxis.engine.setup import build_engine
from jaxis.errors import ConfigError, EngineError
from jaxis.host.progress import ProgressDisplay
from tests.support.cli_model import CONFIG, write_checkpoint
from tests.support.eagle_checkpoints import write_head, write_target
from tests.support.simulated_devices import run_on_devices
from tests.support.tiny_checkpoints import write_checkpoint as write_moe

MIB = 2**20
# Layers of attention (2 heads, 1 for keys and values, of 16) and an MLP, and the embedding.
HIDDEN, FFN, VOCAB, LAYERS = 512, 2048, 258, 2
MATRICES = VOCAB * HIDDEN + LAYERS * (HIDDEN * (2 + 1 + 1) * 16 + 2 * 16 * HIDDEN + 3 * HIDDEN * FFN)
FLOAT_BYTES, INT8_BYTES = 2 * MATRICES, 8.5 * MATRICES / 8
# A scale in bfloat16 and a zero point in uint8 for 32 codes; the table stays int8.
INT4_BYTES = (4.75 * (MATRICES - VOCAB * HIDDEN) + 8.5 * VOCAB * HIDDEN) / 8
CACHE_BYTES_A_TOKEN = LAYERS * 2 * 16 * 2  # of bfloat16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint in bfloat16, all of whose weights are 0."""
    folder = write_checkpoint(tmp_path_factory.mktemp("plan") / "model")
    config = CONFIG | {"hidden_size": HIDDEN, "intermediate_size": FFN, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 65536}))
    shapes = {"model.embed_tokens": (VOCAB, HIDDEN), "model.norm": (HIDDEN,)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.{norm}_layernorm": (HIDDEN,) for norm in ("input", "post_attention")}
        shapes |= {f"{layer}.self_attn.{x}_norm": (16,) for x in "qk"}
        shapes |= {f"{layer}.self_attn.{x}_proj": (n * 16, HIDDEN) for x, n in (("q", 2), ("k", 1), ("v", 1))}
        shapes |= {f"{layer}.self_attn.o_proj": (HIDDEN, 2 * 16)}
        shapes |= {f"{layer}.mlp.{x}_proj": (FFN, HIDDEN) for x in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj": (HIDDEN, FFN)}
    tensors = {f"{name}.weight": np.zeros(shape, ml_dtypes.bfloat16) for name, shape in shapes.items()}
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def plan(folder, monkeypatch, capsys):
    """Loads the model with so many bytes to use, and returns the line that says what was chosen, and the model."""
    opened = []

    def run(nbytes, **arguments):
        # What is kept back for steps and other programs is tested by itself.
        monkeypatch.setattr(memory_plan, "_STEP_BYTES", 0)
        monkeypatch.setattr(memory_plan, "_CPU_SHARE", 1.0)
        monkeypatch.setattr(memory_plan, "free_host_bytes", lambda: int(nbytes))
        monkeypatch.setattr(cache_memory, "free_host_bytes", lambda: 1 << 40)
        llm = LLM(folder, fit_memory=True, max_num_seqs=4, **arguments)
        opened.append(llm)
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("memory: ")]
        assert len(lines) == 1
        return lines[0], llm

    yield run
    for llm in opened:
        llm.close()


def has_bytes(llm, nbytes):
    return llm.weight_bytes == pytest.approx(nbytes, rel=0.03)


def test_weights_stay_as_stored_where_they_fit_with_the_whole_context(plan):
    line, llm = plan(FLOAT_BYTES + 2 * 65536 * CACHE_BYTES_A_TOKEN)
    assert llm.max_model_len == 65536
    assert has_bytes(llm, FLOAT_BYTES)
    assert "weights as stored, 12.4 MiB of 28.4 MiB free (--quantization makes them smaller)" in line
    assert "65536 tokens of context into 8.0 MiB of KV cache (--max-model-len, --kv-cache-memory)" in line


def test_the_context_is_what_the_rest_of_the_memory_holds(plan):
    left = 2 * MIB
    line, llm = plan(FLOAT_BYTES + left)
    assert llm.max_model_len == pytest.approx(left * 0.75 / CACHE_BYTES_A_TOKEN, rel=0.01)
    assert f"{llm.max_model_len} tokens of context, not 65536, which is what fits" in line


@pytest.mark.parametrize(("name", "nbytes"), [("int8", INT8_BYTES), ("int4", INT4_BYTES)])
def test_weights_are_quantized_as_little_as_possible_and_it_is_said(plan, name, nbytes):
    line, llm = plan(nbytes * 1.02 + 4096 * CACHE_BYTES_A_TOKEN)
    assert has_bytes(llm, nbytes)
    assert f"{name} weights of" in line
    assert "as they take 12.4 MiB as stored" in line
    assert "(--quantization none keeps them)" in line
    assert llm.max_model_len >= 4096


def test_what_was_asked_for_is_kept(plan):
    line, llm = plan(FLOAT_BYTES + 2 * MIB, max_model_len=1024, kv_cache_memory="1MiB")
    assert llm.max_model_len == 1024
    assert has_bytes(llm, FLOAT_BYTES)
    assert "1024 tokens of context into 1.0 MiB" in line
    line, llm = plan(FLOAT_BYTES * 4, quantization="int8")
    assert has_bytes(llm, INT8_BYTES)
    assert "weights as asked for" in line


def test_a_context_that_was_asked_for_quantizes_the_weights(plan):
    _, llm = plan(FLOAT_BYTES + 4 * MIB, max_model_len=65536)
    assert llm.max_model_len == 65536
    assert has_bytes(llm, INT8_BYTES)


def test_a_model_that_drafts_takes_weights_and_cache_too(plan, folder):
    """As its own drafter, a model takes twice as much of both."""
    drafting = {"speculative_config": {"method": "draft_model", "model": str(folder)}}
    left = 2 * MIB
    line, llm = plan(2 * FLOAT_BYTES + left, **drafting)
    assert "weights as stored, 24.9 MiB" in line
    assert has_bytes(llm, 2 * FLOAT_BYTES)
    assert llm.max_model_len == pytest.approx(left * 0.75 / (2 * CACHE_BYTES_A_TOKEN), rel=0.02)
    line, llm = plan(2 * INT8_BYTES * 1.02 + 4096 * 2 * CACHE_BYTES_A_TOKEN, **drafting)
    assert "int8 weights of" in line
    assert has_bytes(llm, 2 * INT8_BYTES)


def test_a_head_that_drafts_is_counted_as_it_is_loaded(tmp_path, monkeypatch, capsys):
    (tmp_path / "target").mkdir()
    (tmp_path / "head").mkdir()
    model, head = write_target(tmp_path / "target"), write_head(tmp_path / "head", "speculators", layers=(1, 2, 5))
    monkeypatch.setattr(memory_plan, "free_host_bytes", lambda: 4 << 30)
    speculative = {"method": "eagle3", "model": str(head)}
    with LLM(model, fit_memory=True, speculative_config=speculative, max_num_seqs=2) as llm:
        [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("memory: ")]
        files = [safetensors.numpy.load_file(folder / "model.safetensors") for folder in (model, head)]
        stored = sum(tensor.nbytes for file in files for name, tensor in file.items() if name != "t2d")
        shown = float(re.search(r"as stored, ([0-9.]+) MiB", line)[1])
        assert shown * MIB == pytest.approx(stored, rel=0.06), "rounded; without the head, less than 80%"
        num_blocks = llm.max_model_len // 16
        caches = sum(llm.engine.runner.kv_bytes_per_block.values())
        assert caches == 7 * 16 * 2 * 2 * 16 * 4, "6 layers and the head's"
        assert next(iter(llm.engine.runner.num_blocks.values())) >= num_blocks


def test_a_checkpoint_that_is_no_head_is_refused_before_anything_is_loaded(folder):
    with pytest.raises(ConfigError, match="is not of an EAGLE-3 head"):
        LLM(
            folder,
            fit_memory=True,
            speculative_config={"method": "eagle3", "model": str(folder)},
            load_format="dummy",
            show_progress=False,
        )


def test_memory_for_offloaded_blocks_is_left(plan):
    left, offloaded = 2 * MIB, 2**20
    _, llm = plan(FLOAT_BYTES + left + offloaded, kv_offloading_size=offloaded / 2**30)
    assert llm.max_model_len == pytest.approx(left * 0.75 / CACHE_BYTES_A_TOKEN, rel=0.01)


def test_what_does_not_fit_is_refused_before_it_is_loaded_unless_it_was_asked_for(plan):
    nbytes = INT4_BYTES * 0.9
    with pytest.raises(
        EngineError, match=r"the model does not fit: its weights take 12\.4 MiB, 6\.5 MiB with int8, 3\.7 "
    ) as raised:
        plan(nbytes)
    assert "or give a smaller --max-model-len or model; --quantization int4 tries nevertheless" in str(raised.value)
    assert "\n" not in str(raised.value)
    line, llm = plan(nbytes, quantization="none")
    assert has_bytes(llm, FLOAT_BYTES)
    assert "weights as asked for, although they take 12.4 MiB and 3.4 MiB are free; 4096 tokens" in line


@pytest.mark.sampled
@pytest.mark.parametrize("others_have", [0, FLOAT_BYTES * 100])
def test_among_other_engines_weights_are_those_of_one_alone_and_the_cache_is_a_share(folder, monkeypatch, others_have):
    """What is free at the moment decides nothing."""
    monkeypatch.setattr(memory_plan, "_STEP_BYTES", 0)
    monkeypatch.setattr(memory_plan, "_CPU_SHARE", 1.0)
    monkeypatch.setattr(memory_plan, "free_host_bytes", lambda: others_have)
    admitted = []
    total, share = FLOAT_BYTES * 10, int(FLOAT_BYTES + 2 * MIB)
    args = EngineArgs(model=str(folder), fit_memory=True, max_num_seqs=4)
    shared = MemoryBudget(total, share)
    built = build_engine(args, ProgressDisplay(False), shared=shared, admit=admitted.append)
    built.engine.close()
    assert built.engine.max_model_len == pytest.approx(2 * MIB * 0.75 / CACHE_BYTES_A_TOKEN, rel=0.02)
    assert admitted == [pytest.approx(FLOAT_BYTES + 2 * MIB * 0.75, rel=0.03)]
    needed = MemoryBudget(total, 0)  # a share that has no room for the weights leaves the least useful cache
    built = build_engine(args, ProgressDisplay(False), shared=needed, admit=admitted.append)
    built.engine.close()
    assert built.engine.max_model_len == 4096
    assert admitted[1:] == [pytest.approx(FLOAT_BYTES + 4096 * CACHE_BYTES_A_TOKEN, rel=0.03)]


@pytest.mark.parametrize("qtype", ["int6", "int5"])
def test_rules_are_counted_whatever_their_width(plan, qtype):
    rule = {"module_path": ".*", "weight_qtype": qtype, "tile_size": 32, "weight_calibration_method": "affine"}
    line, llm = plan(FLOAT_BYTES * 4, quantization=[rule])
    assert "weights as asked for" in line
    shown = float(re.search(r"as asked for, ([0-9.]+) MiB", line)[1])
    assert llm.weight_bytes / MIB == pytest.approx(shown, rel=0.05)


def test_memory_is_kept_for_steps_and_for_others(folder, monkeypatch):
    monkeypatch.setattr(memory_plan, "free_host_bytes", lambda: int(memory_plan._STEP_BYTES / memory_plan._CPU_SHARE))
    with pytest.raises(EngineError, match="0 B can be used"):
        LLM(folder, load_format="dummy", fit_memory=True, show_progress=False)


def print_planned(folder, nbytes, arguments):
    """Prints what is chosen for so much memory, and what is then there; called in a process with devices enough."""
    memory_plan._STEP_BYTES, memory_plan._CPU_SHARE = 0, 1.0
    memory_plan.free_host_bytes = lambda: int(nbytes)
    cache_memory.free_host_bytes = lambda: 1 << 40
    with LLM(folder, fit_memory=True, max_num_seqs=4, **arguments) as llm:
        runner = llm.engine.runner
        caches = sum(array.nbytes for stage in runner.executor.stages for array in jax.tree.leaves(stage.state.caches))
        planned = runner.num_ranks * sum(runner.kv_bytes_per_block[span] * n for span, n in runner.num_blocks.items())
        assert caches == planned
        print(json.dumps({"weights": llm.weight_bytes, "context": llm.max_model_len, "caches": caches}))


def planned_on_devices(folder, nbytes, **arguments):
    """What is chosen on two simulated devices: the line that says it, and what was printed."""
    main = f"from {__name__} import print_planned; print_planned({str(folder)!r}, {nbytes}, {arguments!r})"
    printed = run_on_devices("-c", f"{main.replace('; ', chr(10))}", num_devices=2)
    return json.loads(printed.splitlines()[-1])


@pytest.mark.multi_device
def test_stages_are_counted_as_they_lie_on_devices(folder):
    """The second of two stages has the table of embeddings again, as its head."""
    left, table = 2 * MIB, 2 * VOCAB * HIDDEN
    found = planned_on_devices(folder, FLOAT_BYTES + table + left, pipeline_parallel_size=2)
    assert found["weights"] == pytest.approx(FLOAT_BYTES + table, rel=0.015), "packed in whole panels"
    assert found["context"] == pytest.approx(left * 0.75 / CACHE_BYTES_A_TOKEN, rel=0.01)


@pytest.mark.multi_device
def test_data_ranks_are_counted_as_they_lie_on_devices(tmp_path):
    """Each rank has all but the experts, and a cache of its own."""
    folder = write_moe(tmp_path / "moe", "qwen3_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32)
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    experts = sum(array.nbytes for name, array in tensors.items() if ".experts." in name)
    others = sum(array.nbytes for array in tensors.values()) - experts
    config = json.loads((folder / "config.json").read_text())
    a_token = config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * config["head_dim"] * 4
    left = 2 * 10_000 * a_token / 0.75
    longest = {"hf_overrides": {"max_position_embeddings": 65536}}
    ranks = {"data_parallel_size": 2, "enable_expert_parallel": True, **longest}
    found = planned_on_devices(folder, 2 * others + experts + left, **ranks)
    assert found["weights"] == 2 * others + experts
    assert found["context"] == pytest.approx(10_000, rel=0.02)


def test_places_for_adapters_are_planned_beside_the_weights(folder, plan):
    # Of rank 16, in float32, as the model computes: in and out of each matrix.
    pairs = [(HIDDEN, 32), (HIDDEN, 16), (HIDDEN, 16), (32, HIDDEN), *[(HIDDEN, FFN)] * 3]
    place_bytes = 4 * 16 * LAYERS * sum(map(sum, pairs))
    room = FLOAT_BYTES + 4 * place_bytes + 2 * MIB
    line, _ = plan(room, enable_lora=True, max_loras=4, max_model_len=512)
    assert "weights as stored" in line
    line, llm = plan(room, enable_lora=True, max_loras=8, max_model_len=512)
    assert "int8 weights" in line
    assert has_bytes(llm, INT8_BYTES)
    with pytest.raises(EngineError, match=r"places for 9 adapters of rank 64 \(--max-loras, --max-lora-rank\) take "):
        plan(9 * place_bytes, enable_lora=True, max_loras=9, max_lora_rank=64)
