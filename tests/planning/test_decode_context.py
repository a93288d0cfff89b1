"""Devices that share the tokens of a cache of latents: what they hold and exchange, on paper and in a compiled step."""

import pytest

from jaxis.compilation.targets import parse_target
from jaxis.errors import ConfigError
from jaxis.planning.layout import Layout, WantedLayout, layouts
from jaxis.planning.plan import Planner, Wanted
from jaxis.planning.plan_summary import PlanReport, command
from tests.support.plan_sources import published
from tests.support.simulated_devices import run_on_devices

# DeepSeek V3: 61 layers, 128 heads, latents of 512 and rope keys of 64 elements.
DIVIDED = Layout(8, decode_context_parallel_size=8)


@pytest.fixture(scope="module")
def deepseek():
    return Planner(published("deepseek-v3"), Wanted(layout=WantedLayout(decode_context_parallel_size=8)))


def test_each_device_holds_and_reads_its_part_of_the_context(deepseek):
    target = parse_target("h200x8")
    divided, whole = deepseek.device_model(target, DIVIDED), deepseek.device_model(target, Layout(8))
    assert sum(divided.bytes_per_block.values()) == 61 * 16 * (512 + 64) * 2 // 8
    assert divided.held_bytes == whole.held_bytes
    ours, theirs = divided.decode(30, 4096), whole.decode(30, 4096)
    assert ours.context_bytes == pytest.approx(theirs.context_bytes / 8)
    assert ours.flops == pytest.approx(theirs.flops), "all heads for an eighth of the context"
    # Queries [30, 128, 576] in bfloat16 to all; of all heads the latents and sums [30, 128, 513] in float32 to one.
    queries, sums = 30 * 128 * 576 * 2, 30 * 128 * 513 * 4
    assert ours.sent_bytes - theirs.sent_bytes == pytest.approx(61 * (queries + sums) * 7 / 8)
    assert divided.prefill(100).sent_bytes - whole.prefill(100).sent_bytes == pytest.approx(
        100 / 30 * 61 * (queries + sums) * 7 / 8
    )


def test_a_plan_keeps_to_it_and_holds_more_requests(deepseek):
    target = parse_target("h200x8")
    plan = deepseek.plan(target)
    assert {option.layout for option in plan.options} == {DIVIDED}
    whole = Planner(published("deepseek-v3"), Wanted(layout=WantedLayout(8, 1))).plan(target)
    assert plan.chosen.max_requests > 7 * whole.chosen.max_requests
    line = command(PlanReport("m", (), (plan,)), plan)
    assert "--tensor-parallel-size 8 --decode-context-parallel-size 8 --max-model-len" in line
    assert str(DIVIDED) == "8 (DCP8)"
    assert DIVIDED.in_words == "8 devices (TP 8, DCP 8)"


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("model", "layout", "message"),
    [
        ("qwen3-8b", WantedLayout(decode_context_parallel_size=8), "8 is for caches of latents, which this model does"),
        ("deepseek-v3.2", WantedLayout(8, decode_context_parallel_size=8), "the model attends to selected tokens"),
    ],
)
def test_what_cannot_be_divided_is_refused_in_one_line(model, layout, message):
    with pytest.raises(ConfigError, match=f"^--(tensor.* )?decode-context-parallel-size.*{message}") as error:
        Planner(published(model), Wanted(layout=layout)).plan(parse_target("h200x8"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (WantedLayout(8, decode_context_parallel_size=4), "4 must be 1 or --tensor-parallel-size 8: all"),
        (WantedLayout(decode_context_parallel_size=16), "16: h200x8 has 8 devices"),
        (WantedLayout(decode_context_parallel_size=3), "3: h200x8 with its 8 devices, .* cannot be"),
    ],
)
def test_devices_that_cannot_share_it_are_refused(layout, message):
    with pytest.raises(ConfigError, match=f"^--decode-context-parallel-size {message}"):
        layouts(parse_target("h200x8"), layout, 256)


def test_blocks_that_the_devices_do_not_divide_are_refused():
    planner = Planner(published("deepseek-v3"), Wanted(layout=WantedLayout(32, decode_context_parallel_size=32)))
    with pytest.raises(ConfigError, match="32 does not divide blocks of 16 tokens: give a divisor of 16"):
        planner.plan(parse_target("v5e-32"))


SCRIPT = """
import dataclasses
import jax
from jaxis.planning import compiled
from jaxis.planning.layout import WantedLayout
from jaxis.planning.plan import Planner, Wanted
from jaxis.compilation.targets import Target, parse_target
from tests.support.plan_sources import published

compilers = []
class Spy(compiled.StepCompiler):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        compilers.append(self)
compiled.StepCompiler = Spy
Target.devices = lambda self: jax.devices()

source = published(
    "deepseek-v3", quantization_config=None, num_hidden_layers=2, first_k_dense_replace=1, hidden_size=256,
    intermediate_size=128, moe_intermediate_size=64, n_routed_experts=8, n_group=2, topk_group=1, num_attention_heads=8,
    num_key_value_heads=8, q_lora_rank=64, kv_lora_rank=96, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32,
    vocab_size=512, num_experts_per_tok=2,
)
layout = WantedLayout(4, 1, decode_context_parallel_size=4)
planner = Planner(source, Wanted(256, "none", "auto", "float32", layout))
target = parse_target("h100x4")
part = planner.device_model(target, planner.plan(target).chosen.layout)
# Room for 8 requests.
usable = int((part.held_bytes + 8 * 256 // part.block_size * sum(part.bytes_per_block.values())) / 0.9) + 1
small = dataclasses.replace(target, accelerator=dataclasses.replace(target.accelerator, usable_bytes=usable))
plan = planner.plan(small)
[decode] = [step for step in plan.chosen.steps if step.name == "decode" and step.num_requests > 1]
assert decode.num_requests == 8
one = dataclasses.replace(plan, options=(dataclasses.replace(plan.chosen, steps=(decode,)), *plan.options[1:]))
[found] = compiled.with_compiled_steps(one, planner).chosen.steps
planned = {each.name: each for each in decode.cost.exchanges}
numbers = {(each.opcode, each.nbytes): each.count for each in found.cost.exchanges}
queries, context = planned["queries"], planned["context"]
assert numbers[queries.opcode, queries.nbytes] == queries.count == 2, numbers
# On CPU each sum goes to all; what the scores sum up to, [8, 8] in float32, is an array of its own.
assert numbers["all-reduce", context.nbytes - 8 * 8 * 4] == context.count == 2, numbers
[compiler] = compilers
blocks = compiler.cache_bytes[0] // (sum(part.bytes_per_block.values()) // 2)
assert sum(compiler.cache_bytes) == blocks * sum(part.bytes_per_block.values())
assert blocks >= 8 * 256 // part.block_size
"""


@pytest.mark.multi_device
def test_a_compiled_step_exchanges_what_arithmetic_says():
    run_on_devices("-c", SCRIPT)
