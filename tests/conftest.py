"""Fixtures shared by the tests that run a whole engine."""

from __future__ import annotations

import gc
import os
from importlib.metadata import version

import pytest
from hypothesis import settings

from tests.support.compilers import DEFAULT_GPU_TARGET, skip_without_compilers
from tests.support.leak_check import no_blocks_leaked
from tests.support.quick_rows import mark_rows_beyond_the_sample_as_slow
from tests.support.schedule import mark_nightly_as_slow
from tests.support.signals import sigint_as_usual
from tests.support.worker_memory import WorkerMemory


def pytest_addoption(parser):
    parser.addoption(
        "--gpu-target",
        default=DEFAULT_GPU_TARGET,
        help="the kind of GPU that tests marked compile_gpu compile for: a100, h100, h200 or b200",
    )


def pytest_configure(config):
    # Before anything imports JAX. Programs are kept between test runs, apart from the user's own.
    if config.pluginmanager.hasplugin("cacheprovider"):
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(config.cache.mkdir("programs"))
    # Without optimization, most compile as fast as they are read: only larger ones are kept.
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "0"
    # Tiny programs take far longer to optimize than they could ever save.
    flags = "--xla_backend_optimization_level=0"
    # Other workers use the other processors, and modules that are not split compile faster.
    flags += " --xla_cpu_parallel_codegen_split_count=1"
    if version("jaxlib").startswith("0.10."):  # later ones may not have the older emitters, which compile faster
        flags += " --xla_cpu_use_fusion_emitters=false"
    os.environ.setdefault("XLA_FLAGS", flags)
    # Processes that tests start would otherwise compile jaxis's sources each time.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # The same examples each time: whether a change passes is not a matter of luck.
    settings.register_profile("same-examples", derandomize=True)
    if config.getoption("hypothesis_profile", None) is None:
        settings.load_profile("same-examples")
    config.pluginmanager.register(WorkerMemory())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from tests.support.distribution import ByFileOrParameter

    if config.option.dist != "loadfile":
        return None
    config.option.loadscopereorder = False
    return ByFileOrParameter(config, log)


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by -m
def pytest_collection_modifyitems(config, items):
    mark_nightly_as_slow(items)
    mark_rows_beyond_the_sample_as_slow(items)
    skip_without_compilers(items)
    if config.pluginmanager.hasplugin("xdist"):
        from tests.support.distribution import rank

        items.sort(key=lambda item: rank(item.nodeid))


def pytest_collection_finish():
    # What was imported and collected stays: millions of objects that each collection of garbage would look at again.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Family name -> folder of its tiny checkpoint, made once."""
    from tests.support.tiny_checkpoints import write_checkpoint

    root = tmp_path_factory.mktemp("checkpoints")

    def folder(family="qwen3"):
        if not (root / family).exists():
            write_checkpoint(root / family, family)
        return root / family

    return folder


@pytest.fixture(scope="session")
def one_layer(tmp_path_factory):
    """The embedded model cut to its first layer, for tests of many programs that ask nothing of the answers."""
    from safetensors.numpy import load_file, save_file

    from jaxis.engine.opened_model import EMBEDDED_MODEL
    from tests.support.tiny_checkpoints import variant

    folder = tmp_path_factory.mktemp("one-layer") / "model"
    variant(folder, EMBEDDED_MODEL, files={"model.safetensors": None}, num_hidden_layers=1)
    tensors = load_file(EMBEDDED_MODEL / "model.safetensors")
    kept = {name: x for name, x in tensors.items() if ".layers." not in name or ".layers.0." in name}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def start_llm(checkpoint):
    """Starts an LLM on a tiny checkpoint, with small sizes unless told otherwise."""
    from jaxis import LLM

    def start(model=None, **arguments):
        sizes = {"max_num_batched_tokens": 64, "max_num_seqs": 1, "kv_cache_memory": "8MiB", "show_progress": False}
        return LLM(checkpoint() if model is None else model, **sizes | arguments)

    return start


@pytest.fixture(scope="session")
def shared_llm(start_llm):
    """The LLM of all tests that need nothing special; it runs one request at a time. Take `llm`."""
    with start_llm() as llm:
        yield llm


@pytest.fixture(scope="session")
def shared_batching_llm(start_llm):
    """The LLM of all tests that need several requests to run side by side. Take `batching_llm`."""
    with start_llm(max_num_seqs=8) as llm:
        yield llm


@pytest.fixture(scope="session")
def gpu_target(request):
    """Name of the one kind of GPU that this process compiles for, such as "h100"; see `parse_target`."""
    return request.config.getoption("--gpu-target")


@pytest.fixture
def ctrl_c():
    """SIGINT is Ctrl-C in this process and in those that the test starts, wherever pytest runs."""
    with sigint_as_usual():
        yield


@pytest.fixture
def llm(shared_llm):
    """One request at a time; the test must leave no block behind."""
    with no_blocks_leaked(shared_llm):
        yield shared_llm


@pytest.fixture
def batching_llm(shared_batching_llm):
    """Up to 8 requests at a time; the test must leave no block behind."""
    with no_blocks_leaked(shared_batching_llm):
        yield shared_batching_llm
