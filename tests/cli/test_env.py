"""`jaxis env`: facts that can be had elsewhere too."""

import importlib.metadata
import json
import os
import platform

import jax
import psutil
import pytest

from jaxis.cli.env import _memory_nodes, _to_text
from jaxis.version import __version__


def test_json_states_versions_and_devices(invoke):
    result = invoke("env", "--json")
    facts = json.loads(result.stdout)
    assert facts["jaxis"] == __version__
    assert facts["python"].startswith(platform.python_version())
    for package in ("jax", "jaxlib", "flax", "numpy"):
        assert facts[package] == importlib.metadata.version(package)
    assert len(facts["devices"]) == jax.local_device_count()
    assert facts["memory_bytes"]["total"] == psutil.virtual_memory().total
    assert f"{os.cpu_count()} logical" in facts["cores"]
    assert "test" in facts["extras"]


def test_the_program_cache_is_measured(run_jaxis, cli_environment, monkeypatch, tmp_path):
    monkeypatch.setitem(cli_environment, "JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    (tmp_path / "a").write_bytes(b"x" * 1000)
    (tmp_path / "b").write_bytes(b"x" * 24)
    result = run_jaxis("env", "--json")
    assert json.loads(result.stdout)["program_cache"] == {"folder": str(tmp_path), "files": 2, "size_bytes": 1024}
    assert result.stderr == ""


def test_memory_nodes_are_named_where_there_are_several(tmp_path):
    def add(name, cores):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(f"{cores}\n")

    assert _memory_nodes(tmp_path) == {}
    add("node0", "0-31,64-95")
    assert _memory_nodes(tmp_path) == {}
    add("node1", "")  # memory without cores is no place for weights
    assert _memory_nodes(tmp_path) == {"memory_nodes": {"node0": "cores 0-31,64-95", "node1": "cores none"}}
    add("node2", "32-63")
    facts = _memory_nodes(tmp_path)
    assert _to_text("memory_nodes", facts["memory_nodes"]) == (
        "node0 cores 0-31,64-95, node1 cores none, node2 cores 32-63, "
        "start numactl --interleave=0,2 jaxis serve, or a server a node: numactl -N 0 -m 0"
    )


def test_text_has_a_line_a_fact(invoke):
    result = invoke("env")
    assert result.exit_code == 0
    lines = dict(line.split(":", 1) for line in result.stdout.splitlines())
    assert lines["jax"].strip() == jax.__version__
    assert lines["memory"].strip().startswith(f"total {psutil.virtual_memory().total / 2**30:.1f} GiB")


def test_a_platform_that_does_not_start_is_stated(run_jaxis, cli_environment, monkeypatch):
    monkeypatch.setitem(cli_environment, "JAX_PLATFORMS", "nonsense")
    result = run_jaxis("env", "--json")
    assert result.returncode == 0
    assert json.loads(result.stdout)["devices"].startswith("none: ")


@pytest.mark.parametrize("name", ["avx2", "fma"])
def test_simd_flags_are_the_kernels(invoke, name):
    if not os.path.exists("/proc/cpuinfo"):
        pytest.skip("no /proc/cpuinfo")
    with open("/proc/cpuinfo") as info:
        expected = f" {name} " in info.read()
    assert (name in json.loads(invoke("env", "--json").stdout)["simd"]) == expected


def test_native_kernels_are_stated(run_jaxis, cli_environment, monkeypatch):
    line = json.loads(run_jaxis("env", "--json").stdout)["native_kernels"]
    if line.startswith("none: "):  # not built here
        assert line.endswith("install jaxis again")
        return
    used, names = line.removesuffix(")").split(" (of ")
    names = names.split(", ")
    assert used == names[0]
    monkeypatch.setitem(cli_environment, "JAXIS_CPU_ISA", names[-1])
    assert json.loads(run_jaxis("env", "--json").stdout)["native_kernels"].startswith(f"{names[-1]} (of ")


@pytest.mark.parametrize(("isa", "expected"), [("none", "none: JAXIS_CPU_ISA=none"), ("sse9", "cannot run here")])
def test_why_there_are_no_native_kernels_is_stated(run_jaxis, cli_environment, monkeypatch, isa, expected):
    monkeypatch.setitem(cli_environment, "JAXIS_CPU_ISA", isa)
    line = json.loads(run_jaxis("env", "--json").stdout)["native_kernels"]
    assert expected in line or line.endswith("install jaxis again")
