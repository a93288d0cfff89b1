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


def test_a_start_imports_no_formats_processors_grammars_or_adapters_that_it_does_not_use(checkpoint, tmp_path):
    packed = tmp_path / "packed"
    script = """
import sys
from jaxis import LLM

LLM(sys.argv[1], max_num_batched_tokens=64, max_num_seqs=1, kv_cache_memory="8MiB", show_progress=False)
rooms = ("quantization.checkpoints", "vision.processors.tiles", "parsing.tool_parsers", "engine.grammar.json_schema")
unused = [f"jaxis.{room}" for room in (*rooms, "lora.store", "image_encoder.encoder")]
print([name for name in (*unused, "llguidance") if name in sys.modules])
"""
    pack = "import sys; from jaxis.cli.main import main; sys.argv = ['jaxis', 'pack', *sys.argv[1:]]; main()"
    run(pack, checkpoint(), packed)
    assert run(script, packed).splitlines()[-1] == "[]"


def test_importing_jaxis_does_not_wait_for_jax():
    script = """
import sys
import jaxis
from jaxis import SamplingParams

print([name for name in ("jax", "flax", "numpy", "tokenizers", "rich") if name in sys.modules])
"""
    assert run(script) == "[]\n"


def test_the_server_is_imported_while_its_engine_starts():
    script = """
import sys
from jaxis.cli.serve import _import_server

_import_server()
before = set(sys.modules)
from jaxis.server.config import ServerConfig
from jaxis.server.protocol import protocols
from jaxis.server.run import make_server

protocols()
print(sorted(name for name in set(sys.modules) - before if name.startswith("jaxis")))
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
