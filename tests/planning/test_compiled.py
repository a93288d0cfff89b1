"""Plans whose steps were compiled: what replaces the arithmetic, and what stays."""

import dataclasses
from collections import Counter

import jax
import pytest

from jaxis.compilation.compiled_program import CompiledProgram, ProgramMemory
from jaxis.compilation.program_text import Collective, Copy, Kernel, ProgramText
from jaxis.compilation.step_costs import StepCosts, WeightReads, bytes_per_device
from jaxis.compilation.targets import Target, parse_target
from jaxis.errors import ConfigError, EngineError
from jaxis.planning import compiled
from jaxis.planning.compiled import exchanges_of, with_compiled_steps
from jaxis.planning.layout import Layout, WantedLayout
from jaxis.planning.plan import Planner, Wanted
from tests.support.plan_sources import published

MIB = 1 << 20


def test_exchanges_send_what_a_ring_sends():
    def of(opcode):
        [exchange] = exchanges_of([Collective(opcode, 800, is_in_loop=False)], Layout(4))
        assert exchange.group_size == 4
        return exchange.sent_bytes

    assert of("all-reduce") == 2 * 800 * 3 / 4
    assert of("all-gather") == 800 * 3 / 4
    assert of("reduce-scatter") == 800 * 3, "800 bytes are one device's part"
    assert of("collective-permute") == 800


def test_groups_lie_along_the_axes_of_the_mesh():
    layout = Layout(tensor_parallel_size=4, data_parallel_size=2)
    groups = [(0, 1, 2, 3), (0, 4), (), (4, 5, 6, 7), (0,)]
    found = exchanges_of([Collective("all-reduce", 8, False, group) for group in groups], layout)
    assert [(each.axes, each.group_size, each.count) for each in found] == [
        (("model",), 4, 2),
        (("data",), 2, 1),
        (("data", "model"), 8, 1),
    ]


@pytest.fixture
def plan_and_planner():
    planner = Planner(published("mixtral-8x7b"), Wanted(quantization="none", kv_cache_dtype="auto"))
    return planner.plan(parse_target("h100x8")), planner


def fake_compiler(monkeypatch, step):
    """A compiler whose programs cost what `step(needed bytes, num_tokens)` says."""
    configs = []

    class Compiler:
        def __init__(self, config, devices):
            configs.append((config, devices))
            self.reads = WeightReads(layers=100 * MIB, experts=800 * MIB, num_experts=8, experts_per_token=2, head=0)
            self.cache_bytes = [5 * MIB, 5 * MIB]

        def step(self, num_tokens):
            return step(self.reads.of_step(num_tokens), num_tokens)

    monkeypatch.setattr(compiled, "StepCompiler", Compiler)
    monkeypatch.setattr(Target, "devices", lambda self: list(range(self.num_devices)))
    return configs


def program(hbm_bytes, *, kernels=(), collectives=(), copies=(), aliased=0, temporaries=0):
    text = dataclasses.replace(
        ProgramText(0, 0, (), (), (), 0),
        hbm_bytes=hbm_bytes,
        kernels=list(kernels),
        collectives=list(collectives),
        copies=list(copies),
    )
    return CompiledProgram(ProgramMemory(0, 0, aliased, temporaries, 0), text)


def test_what_programs_move_replaces_the_arithmetic_and_what_depends_on_data_stays(monkeypatch, plan_and_planner):
    plan, planner = plan_and_planner

    def step(needed, num_tokens):
        forward = program(
            50_000 * MIB,
            kernels=[Kernel("grouped_matmul", needed, False), Kernel("paged_attention", 10**15, False)],
            collectives=[Collective("all-reduce", 8 * MIB, False)],
            copies=[Copy(3 * MIB, "bf16[3]", "", False)],
            aliased=10 * MIB,
            temporaries=7 * MIB,
        )
        return StepCosts(num_tokens, num_tokens, forward, program(MIB))

    configs = fake_compiler(monkeypatch, step)
    found = with_compiled_steps(plan, planner)
    [(config, devices)] = configs
    assert devices == list(range(8))
    assert config.scheduler_config.max_num_seqs == plan.chosen.max_requests
    assert config.cache_config.kv_cache_memory_bytes == 8 * plan.chosen.device_cache_bytes
    for before, after in zip(plan.chosen.steps, found.chosen.steps, strict=True):
        assert after.cost.context_bytes == before.cost.context_bytes
        assert after.cost.flops == before.cost.flops
        assert after.cost.sent_bytes == 2 * 8 * MIB * 7 / 8
        assert after.cost.weight_bytes > before.cost.weight_bytes
        assert after.cost.weight_bytes <= 50_001 * MIB + 900 * MIB, "what attention may read is not in it"
        assert (after.compiled.temporary_bytes, after.compiled.largest_copy_bytes) == (7 * MIB, 3 * MIB)
        assert after.compiled.caches_are_aliased
        assert after.tokens_per_second < before.tokens_per_second


def test_a_program_that_seems_to_read_less_than_its_weights_is_not_believed(monkeypatch, plan_and_planner):
    plan, planner = plan_and_planner
    fake_compiler(monkeypatch, lambda _, n: StepCosts(n, n, program(MIB), program(MIB)))
    found = with_compiled_steps(plan, planner)
    for before, after in zip(plan.chosen.steps, found.chosen.steps, strict=True):
        assert after.cost.weight_bytes == before.cost.weight_bytes
        assert not after.compiled.caches_are_aliased


def test_what_does_not_compile_is_one_line(monkeypatch, plan_and_planner):
    plan, planner = plan_and_planner

    def step(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: exceeds available HBM (15.75G)\nmore lines")

    fake_compiler(monkeypatch, step)
    with pytest.raises(EngineError, match=r"a step of 1 tokens does not compile for h100x8: .*\(15.75G\)$"):
        with_compiled_steps(plan, planner)


def test_what_does_not_fit_is_not_compiled():
    planner = Planner(published("mixtral-8x7b"), Wanted(quantization="none"))
    with pytest.raises(ConfigError, match="nothing to compile: the model does not fit"):
        with_compiled_steps(planner.plan(parse_target("h100x1")), planner)


@pytest.mark.compile_tpu
@pytest.mark.parametrize("layout", [Layout(8, 8, True), Layout(64, 1, True)], ids=str)
def test_a_compiled_step_over_64_chips_holds_and_exchanges_what_arithmetic_says(monkeypatch, layout):
    """DeepSeek V3 in its sizes, with one dense layer and two of experts."""
    compilers = []

    class Spy(compiled.StepCompiler):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            compilers.append(self)

    monkeypatch.setattr(compiled, "StepCompiler", Spy)
    source = published("deepseek-v3", num_hidden_layers=3, first_k_dense_replace=1)
    wanted = WantedLayout(layout.tensor_parallel_size, layout.data_parallel_size, layout.enable_expert_parallel)
    planner = Planner(source, Wanted(context_len=1024, kv_cache_dtype="auto", layout=wanted))
    target = parse_target("v5e-64")
    part = planner.device_model(target, layout)
    # Room for 24 requests of a rank: a step of thousands takes long to compile, and one of few exchanges otherwise.
    block = sum(part.bytes_per_block.values())
    usable = int((part.held_bytes + 24 * 1024 // part.block_size * block) / 0.9) + 1
    small = dataclasses.replace(target, accelerator=dataclasses.replace(target.accelerator, usable_bytes=usable))
    plan = planner.plan(small)
    [decode] = [step for step in plan.chosen.steps if step.name == "decode" and step.num_requests > 1]
    one = dataclasses.replace(plan, options=(dataclasses.replace(plan.chosen, steps=(decode,)), *plan.options[1:]))
    [compiled_decode] = with_compiled_steps(one, planner).chosen.steps

    def numbers(step):
        """(opcode, axes) -> number, of exchanges of hidden states: others are smaller than that of one token."""
        found = Counter()
        for each in step.cost.exchanges:
            if each.name != "logits" and each.nbytes >= 7168 * 2:
                found[each.opcode, each.axes] += each.count
        return found

    assert numbers(compiled_decode) == numbers(decode)
    assert compiled_decode.compiled.caches_are_aliased
    [compiler] = compilers
    assert bytes_per_device(compiler.runner.weights) == pytest.approx(part.held_bytes, rel=1e-3)


@pytest.mark.compile_tpu
def test_a_model_of_one_layer_compiled_for_a_tpu_costs_little_more_than_arithmetic():
    source = published("qwen3-8b", num_hidden_layers=1, vocab_size=32768)
    planner = Planner(source, Wanted(context_len=512, quantization="none", kv_cache_dtype="auto"))
    target = parse_target("v6e-1")
    # Room for one request, since a step of thousands takes long to compile.
    usable = int((planner.device_model(target).held_bytes + 3 * MIB) / 0.9)
    small = dataclasses.replace(target, accelerator=dataclasses.replace(target.accelerator, usable_bytes=usable))
    plan = planner.plan(small)
    assert plan.chosen.max_requests == 1
    found = with_compiled_steps(plan, planner)
    decode, compiled_decode = plan.chosen.steps[0], found.chosen.steps[0]
    assert compiled_decode.compiled is not None
    assert compiled_decode.compiled.caches_are_aliased
    assert 1 <= compiled_decode.cost.weight_bytes / decode.cost.weight_bytes < 1.1
