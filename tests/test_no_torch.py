"""Imports of a process that used jaxis."""

import os
import subprocess
import sys

# Imported by no way of running a model; the names of modules.
FORBIDDEN = ("torch", "transformers", "vllm")


def run(script, *arguments):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_serving_a_model_loads_no_torch(checkpoint):
    script = f"""
import sys
from jaxis import LLM, SamplingParams

llm = LLM(sys.argv[1], max_num_batched_tokens=64, max_num_seqs=1, kv_cache_memory="8MiB", show_progress=False)
params = SamplingParams(max_tokens=3, logprobs=1)
print(len(llm.generate("the cat", params)[0].outputs[0].token_ids))
llm.chat([{{"role": "user", "content": "the cat"}}], params)
list(llm.stream("the cat", params))
llm.compute_logits([1, 2])
print([name for name in {FORBIDDEN!r} if name in sys.modules])
"""
    assert run(script, checkpoint()).split("\n", 1)[1] == "[]\n"


def test_importing_jaxis_does_not_wait_for_jax():
    script = """
import sys
import jaxis
from jaxis import SamplingParams

print([name for name in ("jax", "flax", "numpy", "tokenizers", "rich") if name in sys.modules])
"""
    assert run(script) == "[]\n"


def test_the_servers_process_imports_no_jax(tmp_path):
    rules = tmp_path / "rules.yaml"
    rules.write_text("- {module_path: '.*', weight_qtype: int8}\n")
    script = """
import sys
import jaxis.cli.serve
import jaxis.server.app
import jaxis.server.run
from jaxis.cli.options import EngineOptions
from jaxis.engine.arguments import EngineArgs
from jaxis.engine.client.async_llm_engine import AsyncLLMEngine
from jaxis.engine.client.engine_process import EngineProcess
from jaxis.engine.grammar.compiler import GrammarCompiler
from jaxis.host.logs import set_up_logs
from jaxis.pooling.async_pooling import AsyncPoolingEngine
from jaxis.runners import kind_of
from jaxis.tokenizer import Tokenizer

options = EngineOptions(quantization=sys.argv[1], kv_cache_memory="8MiB")
print(EngineArgs(**options.llm_arguments()).requested_quantization.rules[0].weight_qtype)
print(sorted(name for name in sys.modules if name.partition(".")[0] in ("jax", "jaxlib", "flax")))
"""
    assert run(script, rules) == "int8\n[]\n"
