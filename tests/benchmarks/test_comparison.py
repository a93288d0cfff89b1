"""The comparison's arithmetic and its report, from results that were made up."""

import json
import re

import pytest

from engines import ENGINES, engine_of
from loads import TABLE, groups
from plots import series, sweeps
from report import BEGIN, END, markdown, tables, write_docs, write_report
from summary import LoadKey, opponents, ratio, spread, summarize, summarize_starts

MODEL = "qwen3-0.6b"
LOAD = LoadKey(TABLE, MODEL, 1, 128)


def row(engine, step_seconds, *, number=0, group=TABLE, batch_size=1, input_len=128, model=MODEL):
    return {
        "round": number,
        "group": group,
        "model": model,
        "engine": engine,
        "batch_size": batch_size,
        "input_len": input_len,
        "output_len": 32,
        "prefill_seconds": 1.0,
        "step_seconds": step_seconds,
        "context_len": input_len + 16.0,
    }


def start(engine, seconds, *, number=0, group=TABLE, model=MODEL, **more):
    return {
        "round": number,
        "group": group,
        "model": model,
        "engine": engine,
        "start_seconds": seconds,
        "start_peak_memory_bytes": 5_000_000,
        "weight_bytes": 1_000_000,
        "kv_bytes_per_token": 100,
        "peak_memory_bytes": 6_000_000,
    } | more


def add(results, *rows):
    """Adds rows, and the processes that they are of."""
    results["rows"] += rows
    results["starts"] += [start(row["engine"], 2.0, group=row["group"], model=row["model"]) for row in rows]


@pytest.fixture
def results():
    """Three rounds of three engines on one load; the limits are 10 MB/s and 1 MFLOP/s, but for one noisy round."""
    steps = {"jaxis-int8": (0.2, 0.1, 0.9), "llama.cpp-q8_0": (0.4, 0.8, 0.3), "llama.cpp-q4_0": (0.1, 0.1, 0.1)}
    return {
        "machine": {"cpu": "a processor", "platform": "a system", "jaxis": "1", "jax": "2", "native_kernels": "fast"},
        "versions": {"llama-cpp-python": "3"},
        "date": "2030-01-02",
        "model": "a model",
        "prefill_costs": {MODEL: {"layer_params": 1000, "head_params": 0, "attention_flops_per_key": 0}},
        "threads": 4,
        "rounds": 3,
        "engines": list(steps),
        "limits": [
            {"read_bytes_per_second": read, "copy_bytes_per_second": 2e7, "flops_per_second": 1e6}
            for read in (1e7, 1e7, 1e3)
        ],
        "rows": [
            row(engine, step, number=number)
            for number in range(3)
            for engine, step in ((engine, times[number]) for engine, times in steps.items())
        ],
        "starts": [
            start(engine, 2.0 + number, number=number, **({"cold_start_seconds": 9.0} if engine == cold else {}))
            for cold in ("jaxis-int8",)
            for number in range(3)
            for engine in steps
        ],
        "failures": {f"transformers-bf16, {MODEL}, {group}": "not installed" for group in (TABLE, "batch")},
    }


def test_figures_are_medians_over_the_rounds_beside_the_median_limit(results):
    figures = summarize(results)[LOAD]["jaxis-int8"]
    assert spread(figures.step_seconds.values()) == (0.2, 0.1, 0.9)
    assert spread(figures.decode_tokens_per_second.values()) == (5, 1 / 0.9, 10)
    assert figures.decode_share_of_limit == pytest.approx((1_000_000 + 144 * 100) / 1e7 / 0.2)
    assert figures.prefill_tokens_per_second == {0: 128, 1: 128, 2: 128}
    assert figures.prefill_share_of_limit == pytest.approx(2 * 1000 * 128 / 1e6)


def test_starts_have_the_cold_one_apart(results):
    by_engine = summarize_starts(results)[TABLE, MODEL]
    assert spread(by_engine["jaxis-int8"].seconds.values()) == (3.0, 2.0, 4.0)
    assert by_engine["jaxis-int8"].cold_seconds == 9.0
    assert by_engine["llama.cpp-q8_0"].cold_seconds is None
    assert by_engine["jaxis-int8"].weight_bytes == 1_000_000


def test_ratios_are_taken_within_a_round(results):
    by_engine = summarize(results)[LOAD]
    ours, theirs = (by_engine[name].decode_tokens_per_second for name in ("jaxis-int8", "llama.cpp-q8_0"))
    # Of the medians it would be 0.4 / 0.2.
    assert ratio(ours, theirs) == pytest.approx((2.0, 0.3 / 0.9, 8.0))
    del theirs[0]
    assert ratio(ours, theirs) == pytest.approx(((0.3 / 0.9 + 8) / 2, 0.3 / 0.9, 8.0))
    assert ratio(ours, {}) is None


def test_engines_are_compared_on_the_same_weights_or_the_same_width():
    peers = ["llama.cpp-bf16", "llama.cpp-q4_0", "llama.cpp-q4_k_m", "ik_llama.cpp-q4_k_m", "transformers-bf16"]
    peers += ["jaxis-int8", "baseline:jaxis-int4", "baseline:jaxis-q4_k_m.gguf"]
    assert opponents("jaxis-q4_k_m.gguf-int8-activations", peers) == ["llama.cpp-q4_k_m", "ik_llama.cpp-q4_k_m"]
    four_bits = ["llama.cpp-q4_0", "llama.cpp-q4_k_m", "ik_llama.cpp-q4_k_m"]
    assert opponents("jaxis-int4", peers) == [*four_bits, "baseline:jaxis-int4"]
    assert opponents("jaxis-bf16", peers) == ["llama.cpp-bf16", "transformers-bf16"]
    assert opponents("jaxis-float32", peers) == []


def test_a_baseline_is_an_engine_of_jaxis_in_another_tree():
    engine = engine_of("baseline:jaxis-int8")
    assert engine.library == "baseline"
    assert engine.arguments == ENGINES["jaxis-int8"].arguments
    for unknown in ("baseline:llama.cpp-bf16", "other:jaxis-int8", "baseline:nothing", "nothing"):
        with pytest.raises(KeyError):
            engine_of(unknown)


def test_a_sweep_is_one_group_of_loads_for_each_model():
    table, context, *sizes = groups(MODEL, ["1x128", "16x128"], ["context", "size"])
    assert (table.name, [(load.batch_size, load.input_len) for load in table.loads]) == (TABLE, [(1, 128), (16, 128)])
    assert [load.input_len for load in context.loads] == [1024, 2048, 4096, 8192, 16384]
    assert {group.name for group in sizes} == {"size"}
    assert len({group.model for group in sizes}) == len(sizes) > 1
    assert groups(MODEL, [], []) == []


def test_tables_show_spreads_shares_ratios_and_starts(results):
    speed, decode, prefill, starts = tables(results)
    assert speed[2][0] == ("jaxis-int8", "5.00 (1.11 to 10.0)", "51%", "128", "26%")
    assert decode[2] == [("jaxis-int8", "llama.cpp-q8_0", "2.00x (0.33 to 8.00)")]
    assert prefill[2] == [("jaxis-int8", "llama.cpp-q8_0", "1.00x (1.00 to 1.00)")]
    assert starts[2][0] == ("jaxis-int8", "3.00 (2.00 to 4.00) s", "9.0 s", "5.0 MB", "6.0 MB", "1.0 MB")
    assert starts[2][1][2] == "-"


def test_the_report_is_written_and_says_what_failed(results, tmp_path):
    text = write_report(results, tmp_path)
    written = (tmp_path / "results.md").read_text()
    for part in (text, written):
        assert "Failed: transformers-bf16 (qwen3-0.6b, table; qwen3-0.6b, batch): not installed." in part
        assert "2.00x (0.33 to 8.00)" in part
        assert "3 rounds, medians (least to greatest)." in part
        assert "jaxis 1, jax 2, llama-cpp-python 3." in part
    header, rule, *rows = re.findall(r"^\|.*\|$", written, re.MULTILINE)[:5]
    assert {line.count("|") for line in (header, rule, *rows)} == {6}


def test_a_page_keeps_what_stands_around_the_figures(results, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"# Before\n{BEGIN}\nold\n{END}\nafter\n")
    write_docs([results, results | {"model": "another"}], page)
    text = page.read_text()
    assert text.startswith(f"# Before\n{BEGIN}\nModel: a model.")
    assert "\n\nModel: another." in text
    assert text.endswith(f"{END}\nafter\n")
    assert "old\n" not in text
    page.write_text("no marks\n")
    with pytest.raises(SystemExit, match="figures: begin"):
        write_docs([results], page)


def test_sweeps_are_plotted_and_tabled_where_there_are_points(results):
    for number, step in enumerate((0.3, 0.5, 0.4)):
        add(results, row("jaxis-int8", step, number=number, group="context", input_len=1024))
    add(results, row("jaxis-int8", 0.3, group="context", input_len=2048))
    add(results, row("llama.cpp-q4_0", 0.5, group="context", input_len=2048))
    add(results, *(row("jaxis-int8", 0.4, group="batch", batch_size=size) for size in (1, 16)))
    add(results, row("jaxis-int8", 0.4, group="size"))  # one model alone
    figures = summarize(results)
    context, batch = sweeps(figures)
    [(x, steps), (last, _)] = series(context, figures)["jaxis-int8"]
    assert (x, last) == (1024, 2048)
    assert steps == pytest.approx((400, 300, 500))
    assert series(batch, figures) == {"jaxis-int8": [(1, (2.5, 2.5, 2.5)), (16, (40, 40, 40))]}
    by_title = {title: (header, rows) for title, header, rows in tables(results)}
    header, rows = by_title["Sweep over context: decode, tokens/s"]
    assert header == ("engine", "1 x 1024", "1 x 2048")
    assert rows == [("jaxis-int8", "2.50 (2.00 to 3.33)", "3.33"), ("llama.cpp-q4_0", "-", "2.00")]


def test_model_sizes_are_read_from_their_names(results):
    results["prefill_costs"]["qwen3-1.7b"] = results["prefill_costs"][MODEL]
    add(results, *(row("jaxis-int8", 0.5, group="size", model=model) for model in ("qwen3-1.7b", MODEL)))
    figures = summarize(results)
    [size] = sweeps(figures)
    assert [x for x, _ in series(size, figures)["jaxis-int8"]] == [0.6, 1.7]


def test_plots_are_pngs(results, tmp_path):
    pytest.importorskip("matplotlib")
    add(results, *(row("jaxis-int8", 0.3, group="batch", batch_size=size) for size in (1, 16)))
    write_report(results, tmp_path)
    assert (tmp_path / "batch.png").read_bytes().startswith(b"\x89PNG")
    assert "![batch](batch.png)" in markdown(results, ["batch.png"])


def test_results_survive_json(results):
    again = json.loads(json.dumps(results))
    assert summarize(again) == summarize(results)
    assert summarize_starts(again) == summarize_starts(results)
