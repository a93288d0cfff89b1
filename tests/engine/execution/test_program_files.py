"""Programs kept on disk: found without a trace, equal to traced ones, and never those of other code or settings."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxis
from jaxis import LLM, SamplingParams
from jaxis.bench.process_facts import compile_stats
from jaxis.engine.execution import program_files, trace_inputs
from jaxis.engine.execution.step_programs import ForwardKey
from jaxis.kernels import native, norms
from jaxis.layers.mapped_table import MappedTable
from jaxis.layers.norm import JaxRmsNorm

pytestmark = pytest.mark.skipif(not native.usable(), reason="only programs of native kernels are kept")

PROMPTS = [[5, 6, 7, 8, 9], [11, 12, 13]]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Returns the folder of kept programs, which is on."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", str(program_files.default_cache_dir()))
    program_files.default_cache_dir().mkdir(parents=True)
    yield program_files.default_cache_dir() / program_files.FOLDER
    jax.config.update("jax_compilation_cache_dir", before)


def answers(**arguments):
    """Returns tokens and log-probabilities, and the number of programs that came from disk."""
    with compile_stats() as stats, LLM(max_model_len=64, max_num_seqs=2, kv_cache_memory="8MiB", **arguments) as llm:
        caches = jax.tree.leaves(llm.engine.runner.executor.stages[0].state.caches)
        outputs = [output.outputs[0] for output in llm.generate(PROMPTS, GREEDY)]
        assert all(cache.is_deleted() for cache in caches)  # donated
    return [(output.token_ids, output.logprobs) for output in outputs], stats.num_loaded


def test_kept_programs_compute_what_traced_ones_do(folder):
    traced, none_loaded = answers()
    files = set(folder.iterdir())
    again, loaded = answers()
    assert again == traced
    assert none_loaded == 0 < loaded == len(files)
    assert set(folder.iterdir()) == files


@pytest.mark.parametrize(
    "change",
    [{"hf_overrides": {"rms_norm_eps": 1.0}}, {"quantization": "int8"}],
    ids=str,
)
def test_other_values_of_a_configuration_are_other_programs(folder, change):
    fresh, _ = answers(**change)
    shutil.rmtree(folder)
    answers()
    changed, _ = answers(**change)
    assert changed == fresh


def test_a_damaged_file_is_compiled_again(folder):
    right, _ = answers()
    for i, file in enumerate(sorted(folder.iterdir())):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes([content, content[:100], b""][i % 3])
    assert answers() == (right, 0)
    again, loaded = answers()
    assert again == right
    assert loaded > 0


def test_the_folder_is_bounded_and_loses_what_was_used_last_first(folder, monkeypatch):
    folder.mkdir()
    for i in range(5):
        (folder / str(i)).write_bytes(bytes(100))
        os.utime(folder / str(i), (1000 - i, 1000 - i))
    monkeypatch.setattr(program_files, "MAX_BYTES", 250)
    program_files._trim(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["0", "1"]


def test_programs_are_kept_in_the_folder_of_jaxis_only(folder):
    jax.config.update("jax_compilation_cache_dir", str(folder.parent / "others"))
    answers()
    assert not folder.exists()


def test_jaxs_cache_is_on_again_after_a_program_was_compiled(folder):
    answers()
    assert jax.config.values["jax_enable_compilation_cache"]


def test_a_file_that_changed_after_the_process_began_means_no_digest(tmp_path, monkeypatch):
    monkeypatch.setattr(native, "package_folders", lambda: [str(tmp_path)])
    before = trace_inputs.sources()
    assert before is not None
    (tmp_path / "model.py").write_text("SCALE = 1")
    assert trace_inputs.sources() is None


@pytest.mark.parametrize("value", [3, native.usable])
def test_what_is_put_into_modules_is_an_input(monkeypatch, value):
    inputs = trace_inputs.ModelInputs("", trace_inputs.held_by_modules())
    assert inputs.agree_with(trace_inputs.held_by_modules())
    monkeypatch.setattr(norms, "rms_norm", value)
    assert not inputs.agree_with(trace_inputs.held_by_modules())


def test_a_table_that_stays_in_files_is_an_operand_which_no_digest_reads():
    digests = []
    for value in range(2):
        table = MappedTable(num_rows=3, width=2)
        table.take(0, np.full((3, 2), value, np.float32))
        table.finish()
        inputs = trace_inputs.model_inputs(table)
        assert inputs is not None
        digests.append(inputs.digest)
    assert digests[0] == digests[1]


def test_functions_from_elsewhere_in_modules_have_no_digest(monkeypatch):
    monkeypatch.setattr(norms, "rms_norm", lambda *_, **__: None)
    with pytest.raises(trace_inputs.UnknownInputError, match="lambda"):
        trace_inputs.held_by_modules()


def test_a_changed_method_is_traced_and_its_programs_are_not_kept(folder, monkeypatch):
    right, _ = answers()
    call = JaxRmsNorm.__call__
    monkeypatch.setattr(JaxRmsNorm, "__call__", lambda self, x: 1.5 * call(self, x))
    changed, loaded = answers()
    assert loaded == 0
    assert changed != right
    monkeypatch.undo()
    assert answers()[0] == right


def test_flags_and_settings_are_inputs(folder, monkeypatch):
    with LLM(max_model_len=64, kv_cache_memory="8MiB") as llm:
        runner = llm.engine.runner

        def name():
            key = ForwardKey(runner.step_shape(4))
            [executor] = runner.executor.stages
            assert executor._inputs is not None
            return trace_inputs.digest(executor._inputs, key, executor.context)

        plain = name()
        assert name() == plain
        with monkeypatch.context() as patched:
            patched.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
            assert name() != plain
        with monkeypatch.context() as patched:
            patched.setenv("JAXIS_CPU_ISA", "avx2")
            assert name() != plain
        with monkeypatch.context() as patched:
            patched.setattr(sys, "argv", [*sys.argv, "--xla_cpu_enable_fast_math=true"])
            assert name() != plain
        jax.config.update("jax_numpy_rank_promotion", "warn")
        try:
            assert name() != plain
        finally:
            jax.config.update("jax_numpy_rank_promotion", "allow")
        assert name() == plain


SCRIPT = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("_editable")]
sys.path.insert(0, sys.argv[1])
import jaxis, jax.monitoring
assert jaxis.__file__.startswith(sys.argv[1])
loaded = []
jax.monitoring.register_event_listener(lambda event, **_: loaded.append(event) if "cache_hits" in event else None)
llm = jaxis.LLM(max_model_len=64, kv_cache_memory="8MiB")
output = llm.generate([[5, 6, 7, 8, 9]], jaxis.SamplingParams(temperature=0, max_tokens=4, logprobs=0))[0].outputs[0]
print(len(loaded), output.token_ids, output.cumulative_logprob)
"""


def test_an_edited_model_is_traced_again(tmp_path):
    package = tmp_path / "jaxis"
    for source in map(Path, reversed(native.package_folders())):  # sources last: they are the newest
        shutil.copytree(source, package, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "static"))
    variables = {key: value for key, value in os.environ.items() if not key.startswith("JAX_COMPILATION")}
    variables |= {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}

    def run():
        command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True, timeout=120)
        loaded, _, answer = done.stdout.partition(" ")
        return int(loaded), answer

    _, first = run()
    loaded, again = run()
    assert loaded > 0
    assert again == first
    edited = package / "layers" / "norm.py"
    status, text = edited.stat(), edited.read_text()
    old, new = "rms_norm(x, self.scale, epsilon=self.epsilon)", "rms_norm(x, self.scale, epsilon=9.0         )"
    edited.write_text(text.replace(old, new))  # as long, and as old, as it was
    os.utime(edited, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert edited.stat().st_size == status.st_size
    _, changed = run()
    assert changed != first
    assert Path(jaxis.__file__).parent != package
