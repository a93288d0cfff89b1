"""The comparison's arithmetic and its report, from results that were made up."""

import json
import re

import pytest

from plots import series, sweeps
from report import BEGIN, END, markdown, tables, write_docs, write_report
from summary import ratio_to_best, ratio_to_width, summarize

MODEL = "qwen3-0.6b"


def row(engine, step_seconds, *, number=0, batch_size=1, input_len=128, model=MODEL, **more):
    return {
        "round": number,
        "model": model,
        "engine": engine,
        "batch_size": batch_size,
        "input_len": input_len,
        "output_len": 32,
        "start_seconds": 2.0,
        "start_peak_memory_bytes": 5_000_000,
        "prefill_seconds": 1.0,
        "step_seconds": step_seconds,
        "context_len": input_len + 16.0,
        "weight_bytes": 1_000_000,
        "kv_bytes_per_token": 100,
        "peak_memory_bytes": 6_000_000,
    } | more


@pytest.fixture
def results():
    """Three rounds of three engines on one load; the limits are 10 MB/s and 1 MFLOP/s, but for one noisy round."""
    steps = {"jaxis-int8": (0.2, 0.1, 0.9), "llama.cpp-q8_0": (0.4, 0.8, 0.3), "llama.cpp-q4_0": (0.1, 0.1, 0.1)}
    return {
        "machine": {"cpu": "a processor", "platform": "a system", "jaxis": "1", "jax": "2"},
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
            row(engine, step, number=number, **({"cold_start_seconds": 9.0} if (engine, number) == cold else {}))
            for cold in [("jaxis-int8", 0)]
            for number in range(3)
            for engine, step in ((engine, times[number]) for engine, times in steps.items())
        ],
        "failures": {f"transformers-bf16, {MODEL}, {load}": "not installed" for load in ("1 x 128 + 32", "2 x 8 + 4")},
    }


def test_figures_are_medians_over_the_rounds_beside_the_median_limit(results):
    [by_engine] = summarize(results).values()
    figures = by_engine["jaxis-int8"]
    assert figures.step_seconds == 0.2
    assert figures.decode_tokens_per_second == 5
    assert figures.decode_share_of_limit == pytest.approx((1_000_000 + 144 * 100) / 1e7 / 0.2)
    assert figures.prefill_tokens_per_second == 128
    assert figures.prefill_share_of_limit == pytest.approx(2 * 1000 * 128 / 1e6)
    assert figures.held_bytes == 1_000_000 + 160 * 100
    assert figures.cold_start_seconds == 9.0
    assert by_engine["llama.cpp-q8_0"].cold_start_seconds is None


def test_ratios_are_to_the_same_width_and_to_the_best(results):
    [by_engine] = summarize(results).values()
    assert ratio_to_width(by_engine, "jaxis-int8", "decode_tokens_per_second") == (2.0, "llama.cpp-q8_0")
    assert ratio_to_best(by_engine, "jaxis-int8", "decode_tokens_per_second") == (0.5, "llama.cpp-q4_0")
    alone = {"jaxis-int8": by_engine["jaxis-int8"]}
    assert ratio_to_best(alone, "jaxis-int8", "decode_tokens_per_second") is None


def test_tables_show_shares_ratios_and_starts(results):
    speed, start = tables(summarize(results))
    assert speed[2][0] == (
        "jaxis-int8",
        *("5.00", "51%", "2.00x llama.cpp-q8_0", "0.50x llama.cpp-q4_0"),
        *("128", "26%", "1.00x llama.cpp-q8_0", "1.00x llama.cpp-q8_0"),
    )
    assert speed[2][1][0] == "llama.cpp-q8_0"
    assert speed[2][1][3:5] == ("", "")
    assert start[2][0] == ("jaxis-int8", "2.0 s", "9.0 s", "5.0 MB", "6.0 MB", "1.0 MB")


def test_the_report_is_written_and_says_what_failed(results, tmp_path):
    text = write_report(results, tmp_path)
    written = (tmp_path / "results.md").read_text()
    for part in (text, written):
        assert "Failed: transformers-bf16 (qwen3-0.6b, 1 x 128 + 32; qwen3-0.6b, 2 x 8 + 4): not installed." in part
        assert "2.00x llama.cpp-q8_0" in part
    header, rule, *rows = re.findall(r"^\|.*\|$", written, re.MULTILINE)[:5]
    assert {line.count("|") for line in (header, rule, *rows)} == {10}


def test_a_page_keeps_what_stands_around_the_figures(results, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"# Before\n{BEGIN}\nold\n{END}\nafter\n")
    write_docs(results, page)
    text = page.read_text()
    assert text.startswith(f"# Before\n{BEGIN}\nModel: a model.")
    assert text.endswith(f"{END}\nafter\n")
    assert "old\n" not in text
    page.write_text("no marks\n")
    with pytest.raises(SystemExit, match="figures: begin"):
        write_docs(results, page)


def test_sweeps_are_plotted_where_there_are_points(results):
    results["rows"] += [row("jaxis-int8", 0.3, input_len=length) for length in (1024, 2048)]
    results["rows"] += [row("jaxis-int8", 0.4, batch_size=16)]
    figures = summarize(results)
    context, batch = sweeps(figures)
    assert series(context, figures) == {"jaxis-int8": [(1024, 300), (2048, 300)]}
    assert series(batch, figures)["jaxis-int8"] == [(1, 5), (16, 40)]
    assert series(batch, figures)["llama.cpp-q4_0"] == [(1, 10)]


def test_model_sizes_are_read_from_their_names(results):
    results["rows"].append(row("jaxis-int8", 0.5, model="qwen3-1.7b"))
    results["prefill_costs"]["qwen3-1.7b"] = results["prefill_costs"][MODEL]
    figures = summarize(results)
    [size] = sweeps(figures)
    assert series(size, figures)["jaxis-int8"] == [(0.6, 200), (1.7, 500)]


def test_plots_are_pngs(results, tmp_path):
    pytest.importorskip("matplotlib")
    results["rows"] += [row("jaxis-int8", 0.3, batch_size=16)]
    write_report(results, tmp_path)
    assert (tmp_path / "batch.png").read_bytes().startswith(b"\x89PNG")
    assert "![batch](batch.png)" in markdown(results, summarize(results), ["batch.png"])


def test_results_survive_json(results):
    assert summarize(json.loads(json.dumps(results))) == summarize(results)
