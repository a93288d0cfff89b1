"""Plans for a measured machine: their arithmetic, against counts by hand, and the file that keeps the machine."""

import dataclasses
import functools
import json
import re

import jsonschema
import numpy as np
import pytest
from typer.testing import CliRunner

from jaxis.bench.limits import Limits
from jaxis.bench.run import Load
from jaxis.bench.text import format_latency
from jaxis.bringup.analyze.source import open_source
from jaxis.cli.main import app
from jaxis.cli.options import EngineOptions
from jaxis.errors import ConfigError
from jaxis.planning import machine as machines
from jaxis.planning.local_plan import LocalWanted, plan_here
from jaxis.planning.machine import Machine, at, doubled, keep, kept_machine, limits_of, machine_file
from jaxis.planning.measure import LOADS, MODELS, Engine, solve, solve_constants
from jaxis.planning.planned_bench import planned_bench
from jaxis.planning.step_time import work_of
from jaxis.planning.trial import Timing, Trial
from jaxis.planning.widths import widths
from tests.support.places import REPOSITORY
from tests.support.plan_sources import published
from tools.json_schemas import FOLDER

TINY = str(REPOSITORY / "src" / "jaxis" / "assets" / "tiny")
GIB = 1 << 30
# Qwen3-8B with 2 layers, as in test_device_model.
SMALL = published("qwen3-8b", num_hidden_layers=2)
EMBEDDING = 151936 * 4096
LAYER = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 12288


def machine(**changes):
    figures = {
        "facts": machines.facts(),
        "limits": (Limits(1, 12e9, 20e9, 1.6e11, 0.0), Limits(2, 20e9, 30e9, 3e11, 1e-6)),
        "disk_bytes_per_second": 1e9,
        "step": (1e-4, 2e-4, 4e-4, 1e-3, 2e-3),
        "step_barriers": 5.0,
        "layer_barriers": 6.0,
        "layer": (1e-5, 2e-5, 4e-5, 1e-4, 4e-4),
        "products": {
            "float32": (2e-10, 2e-10, 2e-10, 1e-9, 4e-9),
            "bfloat16": (1e-10, 1e-10, 2e-10, 8e-10, 2e-9),
            "int8": (5e-11, 6e-11, 9e-11, 2e-10, 8e-10),
            "int4": (3e-11, 4e-11, 9e-11, 2e-10, 8e-10),
        },
        "state": (1e-10, 4e-10, 2e-9, 1e-9, 4e-9),
        "context_byte": 1e-10,
        "attention_flop": 1e-11,
        "ready": 1.5,
        "layer_ready": 0.02,
        "element_ready": {"float32": 1e-9, "bfloat16": 8e-10, "int8": 9e-10, "int4": 1e-9},
        "base_bytes": 300 << 20,
        "layer_bytes": 2 << 20,
    }
    return Machine(**(figures | changes))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_steps_of_a_dense_model_are_elements_layers_and_context():
    [width] = widths(SMALL, "none")
    work, there = work_of(width), machine()
    cache_bytes = 2 * 2 * 8 * 128 * 2  # of a token in both layers
    expected = 4e-4 + 2 * 4e-5 + (2 * LAYER + EMBEDDING) * 2e-10 + 16 * 500 * cache_bytes * 1e-10
    assert work.decode_seconds(there, 16, 500) == pytest.approx(expected)
    # A prompt of 640 tokens is a step of 512 and one of 128, of each of which one token meets the head.
    flops = 2 * (640 * 641 // 2) * 4 * 32 * 128
    expected = 3e-3 + 2 * 5e-4 + 2 * LAYER * 2.8e-9 + 2 * EMBEDDING * 1e-10 + flops * 1e-11
    assert work.prefill_seconds(there, 640) == pytest.approx(expected)
    ready = 1.5 + 2 * 0.02 + (2 * LAYER + 2 * EMBEDDING) * 8e-10
    assert work.start_seconds(there, 640) == pytest.approx(ready + expected)


def test_int4_reads_its_head_as_int8():
    [width] = widths(SMALL, "int4")
    work = work_of(width)
    assert work.layers == {"int4": 2 * LAYER}
    assert work.head == {"int8": EMBEDDING}


def test_experts_are_those_that_tokens_hit_with_the_rows_of_each():
    sizes = {"num_hidden_layers": 1, "num_experts": 8, "num_experts_per_tok": 2}
    source = published("qwen3-30b-a3b", **sizes)
    work, there = work_of(widths(source, "none")[0]), machine()
    experts = 8 * 3 * source.config["moe_intermediate_size"] * source.config["hidden_size"]
    assert sum(work.experts.values()) == experts
    dense = dataclasses.replace(work, experts={})
    hit = 1 - 0.75**16
    added = work.decode_seconds(there, 16, 100) - dense.decode_seconds(there, 16, 100)
    assert added == pytest.approx(hit * experts * at(there.products["bfloat16"], 16 * 0.25 / hit))


def test_solving_finds_the_constants_that_times_were_made_of(tmp_path):
    there, engines = machine(attention_flop=1e-12, base_bytes=1 << 20), {}
    for name, (config, quantization) in MODELS.items():
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps(config))
        work = work_of(widths(open_source(file), quantization or "none")[0])
        timings = [
            Timing(
                work.prefill_seconds(there, load.input_len),
                work.decode_seconds(there, load.batch_size, load.input_len + load.output_len // 2 + 1),
            )
            for load in (LOADS if name == "many" else LOADS[:-1])
        ]
        held = work.part.held_bytes
        peak = work.process_bytes(there) + held
        trial = Trial(work.start_seconds(there, LOADS[0].input_len), peak, 5 + 6 * work.part.num_layers, tuple(timings))
        engines[name] = Engine(work, trial, held)
    found = solve(engines, there.limits, there.disk_bytes_per_second)
    for field in dataclasses.fields(Machine):
        expected, actual = getattr(there, field.name), getattr(found, field.name)
        if field.name in ("products", "element_ready"):
            expected, actual = list(expected.values()), [actual[name] for name in expected]
        assert (
            actual == expected
            if field.name in ("facts", "limits")
            else np.allclose(actual, expected, rtol=1e-6, atol=0)
        ), field


def test_a_core_less_has_its_part_of_reads_products_and_barriers():
    [width] = widths(SMALL, "int8")
    work, there = work_of(width), machine()
    one = there.with_cores(1)
    assert there.with_cores(2) == dataclasses.replace(there, limits=there.limits[-1:])
    # Of an element's 5e-11 s, its byte takes them all at 20 GB/s; of 8e-10 s of a prompt, that many.
    assert one.products["int8"][0] == pytest.approx(5e-11 * 20 / 12)
    assert one.products["int8"][-1] == pytest.approx(5e-11 * 20 / 12 + 7.5e-10 * 3 / 1.6)
    assert one.step[0] == pytest.approx(1e-4 - 5e-6)
    assert one.layer[0] == pytest.approx(1e-5 - 6e-6)
    assert work.decode_seconds(one, 1, 128) > work.decode_seconds(there, 1, 128)
    assert one.context_byte == pytest.approx(1e-10 * 20 / 12)
    assert one.attention_flop == pytest.approx(1e-11 * 3 / 1.6)


def test_more_cores_than_measured_follow_amdahls_law():
    found = limits_of(machine().limits, 4)
    # What one does alone, a: 1 / 20 = 1 / 12 * (a + (1 - a) / 2).
    alone = 2 * 12 / 20 - 1
    assert found.read_bytes_per_second == pytest.approx(12e9 / (alone + (1 - alone) / 4))
    assert found.barrier_seconds == pytest.approx(3e-6)
    measured = (Limits(1, 1.0, 1.0, 1.0), Limits(2, 2.0, 2.0, 2.0), Limits(4, 3.0, 3.0, 3.0))
    assert limits_of(measured, 3).flops_per_second == 2.5
    assert limits_of(measured[:2], 64).flops_per_second == 64
    assert limits_of(measured[:1], 3).flops_per_second == 3
    assert doubled(6) == [1, 2, 4]


def test_more_rows_than_measured_take_as_long_each():
    assert at((1.0, 2.0, 3.0, 4.0, 8.0), 1024) == 16.0
    assert at((1.0, 4.0, 3.0, 4.0, 8.0), 2.5) == 2.5


def test_the_widest_weights_that_meet_the_request_are_chosen():
    there = machine()
    plan = plan_here(SMALL, there, 64 * GIB, LocalWanted())
    assert [option.quantization for option in plan.options] == [None, "int8", "int4"]
    assert plan.chosen == 0
    rates = [option.tokens_per_second[1] for option in plan.options]
    assert plan_here(SMALL, there, 64 * GIB, LocalWanted(tokens_per_second=rates[1])).chosen == 1
    assert plan_here(SMALL, there, 64 * GIB, LocalWanted(tokens_per_second=2 * rates[2])).chosen is None
    least = plan.options[2].memory_bytes
    assert plan_here(SMALL, there, 64 * GIB, LocalWanted(memory_bytes=least)).chosen == 2
    none = plan_here(SMALL, there, GIB, LocalWanted())
    assert none.chosen is None
    assert not any(option.fits for option in none.options)


def test_a_kept_machine_is_used_until_facts_change(monkeypatch):
    assert kept_machine() is None
    keep(machine())
    assert kept_machine() == machine()
    monkeypatch.setattr(machines, "__version__", "0.0.0")
    assert kept_machine() is None


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", "null", "NaN", "\x00"],
)
def test_a_broken_file_is_one_line(text):
    machine_file().parent.mkdir(parents=True)
    machine_file().write_text(text)
    with pytest.raises(ConfigError, match="--on this --again"):
        kept_machine()


@pytest.mark.parametrize(
    "change",
    [
        {"step": [1.0]},
        {"layer": [1, 2, 3, 4, -5]},
        {"products": {}},
        {"products": {"int8": 3}},
        {"ready": "soon"},
        {"ready": float("nan")},
        {"odd": 1},
        {"state": None},
        {"disk_bytes_per_second": 0},
    ],
)
def test_a_file_with_other_figures_is_one_line(change):
    keep(machine())
    machine_file().write_text(json.dumps(json.loads(machine_file().read_text()) | change))
    with pytest.raises(ConfigError, match="--on this --again"):
        kept_machine()


def invoke(*arguments):
    return CliRunner().invoke(app, ["plan", TINY, "--on", "this", *arguments])


def test_the_command_prints_a_table_and_one_object(monkeypatch):
    monkeypatch.setattr("jaxis.host.machine.free_host_bytes", lambda: 8 * GIB)
    keep(machine())
    found = invoke()
    assert found.exit_code == 0, found.output
    lines = found.stdout.splitlines()
    assert max(len(line) for line in lines if "jaxis serve" not in line) <= 100
    assert any(line.startswith("fits: jaxis serve ") for line in lines)
    assert any(re.fullmatch(r"cores, modelled: 1: \S+, 2: \S+, 4: \S+, 8: \S+ tok/s of .*", line) for line in lines)
    answer = json.loads(invoke("--json").stdout)
    jsonschema.validate(answer, json.loads((FOLDER / "plan-this.json").read_text()))
    assert answer["status"] == "fits"
    failed = invoke("--json", "--memory", "1MiB")
    assert (failed.exit_code, json.loads(failed.stdout)["status"]) == (1, "does_not_fit")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--on", "v6e-1"), "leave the other targets out"),
        (("--dtype", "float32"), "--dtype cannot be honoured with --on this"),
        (("--memory", "much"), "--memory"),
        (("--max-model-len", "99999999"), "is more than the model's"),
    ],
)
def test_a_mistake_is_one_line(arguments, words):
    keep(machine())
    found = invoke(*arguments, "--json")
    assert found.exit_code == 3
    assert words in json.loads(found.stdout)["error"]["message"]
    assert len(found.stderr.splitlines()) == 1


def test_a_benchmark_is_planned_unless_an_argument_changes_what_an_engine_computes():
    keep(machine())
    plan = functools.partial(planned_bench, None, loads=[Load(1, 128, 16)])
    given = EngineOptions().llm_arguments()  # what the command gives: every argument that has a default
    assert plan(given) == plan({}) is not None
    assert plan(given | {"enable_prefix_caching": False}) is None


def test_a_planned_start_ends_with_the_first_token_of_its_prompt():
    keep(machine())
    short, long = (planned_bench(None, {}, [Load(1, length, 2)]) for length in (128, 256))
    assert short is not None
    assert long is not None
    prefills = [plan["loads"][0]["prefill_seconds"] for plan in (short, long)]
    assert long["start_seconds"] - short["start_seconds"] == pytest.approx(prefills[1] - prefills[0])
    [width] = widths(open_source(TINY), "none")
    work = work_of(width)
    cache_bytes = sum(128 // work.part.block_size * each for each in work.part.bytes_per_block.values())
    assert long["start_bytes"] - short["start_bytes"] == cache_bytes
    layers = work.part.num_layers * (2 << 20)
    assert short["start_bytes"] == (300 << 20) + layers + work.part.held_bytes + cache_bytes


def test_a_constant_that_times_would_make_negative_is_zero():
    units = [{"step": 1.0, "layer": 4.0}, {"step": 1.0, "layer": 24.0}]
    # By line: -0.1 + 0.1 a layer. By layers alone, the constant with the least squares of relative errors.
    found = solve_constants(units, [0.3, 2.3])
    ratios = np.array([4 / 0.3, 24 / 2.3])
    assert found == {"step": 0.0, "layer": pytest.approx(ratios.sum() / (ratios**2).sum())}


def test_planned_figures_stand_beside_measured_ones():
    report = {
        "model": "m",
        "dtype": "float32",
        "machine": {"cpu": "c", "cores": 2, "device": "cpu"},
        "limits": {"num_threads": 2, "read_bytes_per_second": 1e9, "copy_bytes_per_second": 1e9, "flops_per_second": 1},
        "start": dict.fromkeys(("seconds_to_first_token", "compile_seconds"), 2.0)
        | {"peak_memory_bytes": 10**9, "num_programs": 1, "num_programs_from_disk": 1},
        "peak_memory_bytes": 10**9,
        "results": [
            {"batch_size": 4, "input_len": 128, "output_len": 1, "prefill_seconds": 0.5}
            | dict.fromkeys(("time_to_first_token_seconds", "prefill_tokens_per_second", "prefill_share_of_limit"), 1.0)
            | dict.fromkeys(("decode_step_seconds", "decode_tokens_per_second", "decode_share_of_limit"))
            | {"decode_steps_per_second": None}
        ],
        "planned": {
            "start_seconds": 1.0,
            "start_bytes": 10**9,
            "loads": [{"prefill_seconds": 0.55, "decode_tokens_per_second": 7.0}],
        },
    }
    lines = format_latency(report).splitlines()
    assert lines[-1].split() == ["4", "x", "128", "+", "1:", "prefill,", "s", "0.55", "0.50", "1.10x"]
    assert lines[-3].endswith("0.50x")
