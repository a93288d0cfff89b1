"""The table of quantization's costs, on the embedded model; and llama.cpp's files of importances."""

import struct
import sys

import numpy as np
import pytest

import quantization_quality
from jaxis.engine.opened_model import EMBEDDED_MODEL


def test_the_table_has_a_row_for_each_format_from_the_largest_on(monkeypatch, capsys, tmp_path):
    (tmp_path / "text.txt").write_text("The capital of Italy is Rome. " * 8)
    rules = tmp_path / "rules.yaml"
    rules.write_text('[{module_path: ".*", weight_qtype: int4, tile_size: 32, weight_calibration_method: mse}]')
    command = ["quality", "--model", EMBEDDED_MODEL, "--text", tmp_path / "text.txt"]
    command += ["--jaxis", f"{rules},none", "--llama-cpp", ""]
    monkeypatch.setattr(sys, "argv", [str(each) for each in command])
    quantization_quality.main()
    head, _, columns, _, *rows = capsys.readouterr().out.strip().split("\n")
    assert "the model itself: 6 MB" in head
    assert columns == "| format | engine | weights | perplexity | KL | KL, p99 | top-1 |"
    plain, quantized = ([cell.strip() for cell in row.strip("|").split("|")] for row in rows)
    assert plain[:3] == ["none", "jaxis", "6 MB"]
    assert plain[4:] == ["0.0000", "0.000", "100.0%"]
    assert quantized[:3] == [str(rules), "jaxis", "2 MB"]
    assert float(quantized[4]) > 0


def test_importances_are_read_as_llama_imatrix_writes_them(tmp_path):
    pytest.importorskip("llama_cpp")
    from gguf_file import read_importance

    names = {b"blk.0.ffn_up.weight": (3, [1.0, 2.0, 6.0]), b"output.weight": (1, [5.0])}
    data = struct.pack("<i", len(names))
    for name, (num_chunks, values) in names.items():
        data += struct.pack("<i", len(name)) + name + struct.pack("<ii", num_chunks, len(values))
        data += np.array(values, "<f4").tobytes()
    (tmp_path / "imatrix.dat").write_bytes(data + struct.pack("<i", 7))
    found = read_importance(tmp_path / "imatrix.dat")
    assert {name: values.tolist() for name, values in found.items()} == {
        b"blk.0.ffn_up.weight": [pytest.approx(1 / 3), pytest.approx(2 / 3), 2.0],
        b"output.weight": [5.0],
    }
