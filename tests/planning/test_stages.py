"""Pipeline stages: what their devices hold, against an engine's, and what steps through them take."""

import json

import jax
import pytest

from jaxis.bringup.analyze.source import open_source
from jaxis.compilation.step_costs import bytes_per_device
from jaxis.compilation.targets import parse_target
from jaxis.errors import ConfigError
from jaxis.planning.compiled import with_compiled_steps
from jaxis.planning.exchanges import exchange_seconds, links
from jaxis.planning.layout import Layout, WantedLayout
from jaxis.planning.plan import Planner, Wanted
from jaxis.planning.plan_summary import PlanReport, command, remarks, verdict
from jaxis.planning.roofline import bound
from tests.support.plan_sources import LLAMA_70B, published
from tests.support.simulated_devices import run_on_devices
from tests.support.tiny_checkpoints import DELTA_NET_SIZES, write_checkpoint

# Llama 3.1 8B: E=4096, F=14336, K x D=1024, V=128256, 32 layers, an embedding and a head.
LAYER = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 14336
EMBEDDING = 128256 * 4096


def print_placed(folder, stages, tensor):
    """Prints what an engine holds on a device of each stage; called in a process with devices enough."""
    from jaxis import LLM

    sizes = {"max_num_batched_tokens": 16, "max_num_seqs": 4, "kv_cache_memory": "2MiB", "show_progress": False}
    with LLM(folder, pipeline_parallel_size=stages, tensor_parallel_size=tensor, **sizes) as llm:
        placed = []
        [num_blocks] = llm.engine.runner.num_blocks.values()
        for stage in llm.engine.runner.executor.stages:
            caches = stage.state.caches
            paged = [cache.array for cache in caches if not isinstance(cache, tuple)]
            states = jax.tree.leaves([cache for cache in caches if isinstance(cache, tuple)])
            slots = (llm.engine.runner.num_state_slots or 1) * tensor  # the plan counts whole bytes of a device
            placed.append(
                {
                    "weights": bytes_per_device(stage.context.model.arrays),
                    "block": bytes_per_device(paged) // num_blocks,
                    "state": sum(array.nbytes for array in states) // slots,
                }
            )
    print(json.dumps(placed))


@pytest.mark.multi_device
@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llama", {"num_hidden_layers": 3, "tie_word_embeddings": True}),
        ("llama", {"num_hidden_layers": 5}),
        ("qwen3_5_text", DELTA_NET_SIZES),
    ],
)
def test_devices_hold_what_the_engine_places_there(tmp_path, family, config):
    folder = write_checkpoint(tmp_path / "model", family, **config)
    main = f"from {__name__} import print_placed; print_placed({str(folder)!r}, 2, 2)"
    placed = json.loads(run_on_devices("-c", main, num_devices=4).splitlines()[-1])
    planner = Planner(open_source(str(folder)), Wanted(quantization="none", dtype="float32"))
    parts = planner.stages(parse_target("h100x4"), Layout(2, pipeline_parallel_size=2))
    assert [part.held_bytes for part in parts] == [stage["weights"] for stage in placed]
    assert [sum(part.bytes_per_block.values()) for part in parts] == [stage["block"] for stage in placed]
    assert [part.state_bytes for part in parts] == [stage["state"] for stage in placed]


@pytest.fixture(scope="module")
def llama():
    return Planner(published("llama-3.1-8b"), Wanted(quantization="none"))


def test_the_first_stage_reads_no_embeddings_and_the_last_has_the_head(llama):
    parts = llama.stages(parse_target("h100x4"), Layout(pipeline_parallel_size=4))
    norms = [16 * 4096, 16 * 4096, 16 * 4096, 17 * 4096]
    tables = [EMBEDDING, 0, 0, EMBEDDING]
    held = [8 * LAYER + norm + table for norm, table in zip(norms, tables, strict=True)]
    assert [part.held_bytes for part in parts] == [2 * number for number in held]
    decodes = [part.decode(4, 1000) for part in parts]
    assert [cost.weight_bytes for cost in decodes] == [2 * number for number in (held[0] - EMBEDDING, *held[1:])]
    attention = 8 * 4 * 1000 * 2 * 32 * (128 + 128)
    flops = [4 * 2 * 8 * LAYER + attention] * 3 + [4 * 2 * (8 * LAYER + EMBEDDING) + attention]
    assert [cost.flops for cost in decodes] == pytest.approx(flops)
    assert {cost.context_bytes for cost in decodes} == {4 * 1000 * 8 * 2 * 1024 * 2}


def test_each_link_between_stages_has_one_vector_a_token(llama):
    target, layout = parse_target("h100x8"), Layout(2, pipeline_parallel_size=4)
    for part in llama.stages(target, layout):
        [handed] = [each for each in part.decode(6, 1000).exchanges if each.opcode == "collective-permute"]
        assert handed.sent_bytes == 6 * 4096 * 2
        assert links(handed, target, layout) == "NVLink"
        assert exchange_seconds(handed, target, layout) == pytest.approx(6 * 4096 * 2 / 450e9)
        sums = [each.count for each in part.decode(6, 1000).exchanges if each.name in ("attention", "feed-forward")]
        assert sums == [8, 8], "of its own layers"


def test_one_request_gets_no_faster_and_many_share_the_stages():
    layout = WantedLayout(1, pipeline_parallel_size=4)
    target = parse_target("h100x4")
    staged = Planner(published("llama-3.1-8b"), Wanted(quantization="none", layout=layout)).plan(target).chosen
    alone = Planner(published("llama-3.1-8b"), Wanted(quantization="none", layout=WantedLayout(1)))
    one, many, prefill = staged.steps
    whole = alone.plan(parse_target("h100x1")).chosen.steps[0]
    assert one.seconds == pytest.approx(whole.seconds, rel=1e-3), "all weights are read, one stage after the other"
    assert one.tokens_per_second == pytest.approx(1 / one.seconds)
    # Four steps are in flight, with a quarter of the requests each; the last stage, with the head, sets the pace.
    parts = alone.stages(target, staged.layout)
    share = -(-staged.max_requests // 4)
    pace = max(bound(part.decode(share, 4096), target, staged.layout).seconds for part in parts)
    assert many.num_requests == staged.max_requests
    assert many.bound.seconds == pace
    assert many.tokens_per_second == pytest.approx(staged.max_requests / (4 * pace))
    assert many.seconds < 4 * pace
    chunk = max(bound(part.prefill(2048), target, staged.layout).seconds for part in parts)
    assert prefill.tokens_per_second == pytest.approx(2048 / chunk), "chunks follow each other"


def test_fewer_requests_than_stages_leave_some_idle():
    """70 billion parameters in bfloat16 leave room for 3 requests on 4 devices of this size."""
    source = published("llama-3.1-8b", **LLAMA_70B)
    layout = WantedLayout(2, pipeline_parallel_size=4)
    plan = Planner(source, Wanted(context_len=65536, quantization="none", layout=layout)).plan(parse_target("h100x8"))
    one, many, _ = plan.chosen.steps
    assert many.num_requests > 1
    assert many.tokens_per_second <= many.num_requests / many.seconds
    assert many.tokens_per_second > one.tokens_per_second


def test_the_stage_with_the_least_memory_for_its_layers_decides(llama):
    """Counted by hand: each has 8 layers' caches, and the first and the last a table of 1 GB besides."""
    target, layout = parse_target("v5e-4"), Layout(pipeline_parallel_size=4)
    wanted = Wanted(quantization="none", kv_cache_dtype="auto", layout=WantedLayout(1, pipeline_parallel_size=4))
    chosen = Planner(published("llama-3.1-8b"), wanted).plan(target).chosen
    usable = int(target.accelerator.usable_bytes * 0.9)
    left = usable - max(part.held_bytes for part in llama.stages(target, layout))
    assert chosen.device_cache_bytes == left
    assert chosen.max_requests == left // (4096 * 8 * 2 * 1024 * 2)
    assert chosen.device_weight_bytes == 2 * (8 * LAYER + 17 * 4096 + EMBEDDING)


def test_the_plan_says_what_stages_are(llama):
    layout = WantedLayout(2, pipeline_parallel_size=4)
    plan = Planner(published("llama-3.1-8b"), Wanted(quantization="none", layout=layout)).plan(parse_target("h100x8"))
    assert verdict(plan) == "fits: bfloat16 weights over 8 devices (TP 2, PP 4)"
    assert any("one request gets no faster" in line for line in remarks(plan))
    line = command(PlanReport("m", (), (plan,)), plan)
    assert line is not None
    assert line.startswith("jaxis serve m --tensor-parallel-size 2 --pipeline-parallel-size 4 --max-model-len 4096")
    with pytest.raises(ConfigError, match="--compile compiles no pipeline stages"):
        with_compiled_steps(plan, llama)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "target", "wanted", "message"),
    [
        ("llama-3.1-8b", "h100x8", WantedLayout(pipeline_parallel_size=9), "--pipeline-parallel-size 9: h100x8 has 8"),
        (
            "llama-3.1-8b",
            "v5e-64",
            WantedLayout(1, pipeline_parallel_size=64),
            "nnodes|more than the model's 32 layers",
        ),
        ("gemma-3n-e2b", "h100x8", WantedLayout(pipeline_parallel_size=2), "its layers have embeddings of their own"),
        ("deepseek-v3", "h200x8", WantedLayout(2, 2, None, None, 2), "data_parallel_size=2 does not combine with"),
    ],
)
def test_what_cannot_be_divided_is_refused_in_one_line(name, target, wanted, message):
    with pytest.raises(ConfigError, match=message) as error:
        Planner(published(name), Wanted(quantization="none", layout=wanted)).plan(parse_target(target))
    assert "\n" not in str(error.value)
