"""Plans: their choice, the load that fits, and their refusals."""

import dataclasses
import itertools
import json

import pytest
from typer.testing import CliRunner

from jaxis.cli.main import app
from jaxis.compilation.targets import parse_target
from jaxis.engine.execution.kv_cache import num_cache_blocks
from jaxis.engine.execution.state_cache import num_state_slots
from jaxis.engine.memory_account import MemoryAccount
from jaxis.errors import ConfigError
from jaxis.parallel.mesh import make_mesh
from jaxis.planning.layout import WantedLayout
from jaxis.planning.plan import Planner, Wanted
from jaxis.planning.plan_summary import PlanReport, command, remarks, verdict
from tests.support.plan_sources import LLAMA_70B, published
from tests.support.published_models import unsupported


@pytest.fixture(scope="module")
def llama():
    return published("llama-3.1-8b", **LLAMA_70B)


def test_the_widest_weights_that_run_are_chosen_on_all_devices(llama):
    plan = Planner(llama, Wanted()).plan(parse_target("v6e-8"))
    assert (plan.chosen.quantization, plan.chosen.layout.tensor_parallel_size, plan.chosen.num_servers) == (None, 8, 1)
    assert plan.chosen.hosts_of_server == 1
    assert plan.chosen.device_weight_bytes == pytest.approx(2 * 70.55e9 / 8, rel=1e-3)
    assert plan.chosen.max_requests >= 1


def test_one_host_with_quantized_weights_goes_before_several_with_wide_ones(llama):
    plan = Planner(llama, Wanted()).plan(parse_target("v5e-16"))
    chosen = plan.chosen
    assert (chosen.quantization, chosen.layout.tensor_parallel_size, chosen.num_servers) == ("int4", 4, 4)
    [wide] = [
        option
        for option in plan.options
        if option.quantization is None and option.kv_cache_dtype == "auto" and option.layout.tensor_parallel_size == 16
    ]
    assert wide.fits
    assert wide.hosts_of_server == 4
    [remark] = [line for line in remarks(plan) if "4 hosts" in line]
    assert remark.startswith("bfloat16 weights over 16 devices of 4 hosts: ")
    assert "have not been tried" in remark


def test_what_needs_several_hosts_is_said(llama):
    wanted = Wanted(quantization="none", layout=WantedLayout(tensor_parallel_size=16))
    plan = Planner(llama, wanted).plan(parse_target("v5e-16"))
    assert plan.chosen.fits
    assert verdict(plan) == "fits: bfloat16 weights over 16 devices of 4 hosts"
    assert "have not been tried" in remarks(plan)[0]
    line = command(PlanReport("m", (), (plan,)), plan)
    assert "--tensor-parallel-size 16 --nnodes 4 --node-rank 0 --master-addr ADDRESS" in line


def test_what_does_not_fit_is_said_with_sizes(llama):
    plan = Planner(llama, Wanted(quantization="none")).plan(parse_target("h100x1"))
    assert not plan.chosen.fits
    assert plan.chosen.steps == ()
    assert verdict(plan).startswith("does not fit: bfloat16 weights over 1 device take 131.4 GiB of 64.")


def test_places_for_adapters_take_memory_from_the_cache(tmp_path):
    source, target = published("qwen3-8b"), parse_target("h100x1")
    (tmp_path / "config.json").write_text(json.dumps(source.config))
    arguments = ["--on", "h100x1", "--quantization", "none", "--kv-cache-dtype", "auto", "--enable-lora"]
    result = CliRunner().invoke(app, ["plan", str(tmp_path), *arguments, "--max-loras", "8", "--json"])
    assert result.exit_code == 0, result.output
    [found] = json.loads(result.stdout)["plans"][0]["options"]
    # E 4096, 32 heads and 8 key-value heads of 128, F 12288, 36 layers; bfloat16 of rank 16, and a factor an output.
    sizes = [(4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096), *[(4096, 12288)] * 2, (12288, 4096)]
    expected = 8 * 36 * sum(2 * 16 * (size_in + size_out) + 4 * size_out for size_in, size_out in sizes)
    assert found["device_place_bytes"] == expected
    [without] = Planner(source, Wanted(quantization="none", kv_cache_dtype="auto")).plan(target).options
    assert without.device_place_bytes == 0
    assert found["device_weight_bytes"] == without.device_weight_bytes
    assert without.device_cache_bytes - found["device_cache_bytes"] == expected
    result = CliRunner().invoke(app, ["plan", str(tmp_path), *arguments, "--max-lora-rank", "64"])
    assert "--enable-lora --max-loras 1 --max-lora-rank 64" in " ".join(result.stdout.split())
    result = CliRunner().invoke(app, ["plan", str(tmp_path), *arguments, "--lora-target-modules", "lm_head", "--json"])
    [found] = json.loads(result.stdout)["plans"][0]["options"]
    assert found["device_place_bytes"] == 2 * 16 * (4096 + 151936) + 4 * 151936


def test_published_quantized_weights_are_not_quantized_again():
    plan = Planner(published("deepseek-v3"), Wanted()).plan(parse_target("h200x8"))
    assert {option.weights for option in plan.options} == {"fp8"}
    with pytest.raises(ConfigError, match="cannot be quantized again"):
        Planner(published("deepseek-v3"), Wanted(quantization="int8"))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "cache_mib"),
    [*itertools.product(["gemma-2-9b", "qwen3-8b", "deepseek-v2-lite"], [100, 300]), ("falcon-h1-0.5b", 3000)],
)
def test_as_many_requests_fit_as_the_engine_has_blocks_for(name, cache_mib):
    """The engine's own counts of blocks and of states' slots are enough for so many requests, and not for one more."""
    planner = Planner(published(name), Wanted(quantization="none", dtype="bfloat16"))
    config, place = planner.widths[0].vllm_config, planner.device_model(parse_target("v6e-1")).place()
    (per_block, per_slot), memory = place.units, cache_mib * 2**20
    max_requests = MemoryAccount(config, [place]).most_requests(place.held_bytes + memory, 256)
    assert max_requests > 0

    def suffices(num_requests):
        sized = dataclasses.replace(
            config,
            model_config=dataclasses.replace(config.model_config, max_model_len=256),
            cache_config=dataclasses.replace(config.cache_config, kv_cache_memory_bytes=memory),
            scheduler_config=dataclasses.replace(config.scheduler_config, max_num_seqs=num_requests),
        )
        slots = num_state_slots(sized, per_slot, memory, attends=True)
        blocks, longest = num_cache_blocks(sized, per_block, make_mesh(), state_bytes=slots * per_slot, memory=memory)
        held = {span: span.max_held_blocks(num_requests, 256, 16, 2048) for span in blocks}
        has_slots = not per_slot or slots >= num_requests
        return has_slots and longest == 256 and all(held[span] <= blocks[span] for span in blocks)

    assert suffices(max_requests)
    assert not suffices(max_requests + 1)


def test_a_quantized_cache_holds_more():
    plan = Planner(published("qwen3-8b"), Wanted(quantization="none")).plan(parse_target("h100x1"))
    wide, low_precision = (next(o for o in plan.options if o.kv_cache_dtype == dtype) for dtype in ("auto", "int8"))
    assert low_precision.max_requests / wide.max_requests == pytest.approx(2 * 128 / (128 + 4), rel=0.1)


def test_rates_are_those_of_all_servers():
    plan = Planner(published("qwen3-8b"), Wanted(quantization="none", layout=WantedLayout(1))).plan(
        parse_target("v6e-8")
    )
    decode = plan.chosen.steps[1]
    assert plan.chosen.num_servers == 8
    assert decode.tokens_per_second == pytest.approx(8 * decode.num_requests / decode.bound.seconds)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (Wanted(context_len=10**6), "--max-model-len 1000000 is more than the model's 40960 tokens"),
        (Wanted(quantization="dequantize"), "the checkpoint is not quantized"),
    ],
)
def test_what_cannot_be_kept_is_refused(wanted, message):
    with pytest.raises(ConfigError, match=message):
        Planner(published("qwen3-8b"), wanted)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("size", "message"), [(16, "has 8 devices"), (3, "=3 does not divide the model's 32 attention heads: give 1 or 2$")]
)
def test_devices_that_cannot_share_are_refused(size, message):
    planner = Planner(published("qwen3-8b"), Wanted(layout=WantedLayout(size)))
    with pytest.raises(ConfigError, match=message):
        planner.plan(parse_target("v6e-8"))


def test_an_unknown_family_cannot_be_planned():
    with pytest.raises(ConfigError, match=r"deepseek-v3.2 cannot run: .*jaxis analyze says more"):
        Planner(published("deepseek-v3.2", **unsupported()), Wanted())


def test_json_has_every_option_and_what_binds():
    planner = Planner(published("qwen3-8b"), Wanted())
    report = PlanReport("qwen", ("Qwen3ForCausalLM",), (planner.plan(parse_target("v6e-1")),))
    found = json.loads(report.to_json())
    assert found["schema"] == 2
    [plan] = found["plans"]
    assert plan["target"]["device_kind"] == "TPU v6 lite"
    assert {(o["weights"], o["kv_cache_dtype"]) for o in plan["options"]} == {
        (weights, cache) for weights in ("bfloat16", "int8", "int4") for cache in ("auto", "int8")
    }
    step = plan["options"][0]["steps"][0]
    assert step["seconds"] == max(step["memory_seconds"], step["compute_seconds"], step["network_seconds"])
    assert step["binds"] == "memory"
    assert step["compiled"] is None
