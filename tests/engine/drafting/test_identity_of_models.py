"""With native kernels drafts change no bit of any family's answers, at any width of weights or of the cache; and what
was sampled is what `prompt_logprobs` scores. In processes of their own, with XLA's usual optimizations."""

import json
import os
import subprocess
import sys

import pytest

from jaxis.kernels import native

pytestmark = [
    pytest.mark.production_xla,
    pytest.mark.skipif(not native.usable(), reason="needs the native kernels"),
]

MAX_DRAFTS = 6
NUM_TOKENS = 20


def main(families: list[str], options: dict[str, object]) -> None:
    """Prints, as JSON, each family's answers by the drafter that was used, and how many drafts were right."""
    import jax

    from jaxis import LLM, SamplingParams
    from tests.support import parity
    from tests.support.drafters import drafters, drafting
    from tests.support.parity import prompt

    prompts = [{"prompt_token_ids": prompt(length)} for length in (3, 40, 61)]
    requests = [
        SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=4, temperature=temperature, seed=7)
        for temperature in (0.0, 0.7, 2.0)
    ]
    found = {}
    for family in [each for each in parity.FAMILIES if each.name in families]:
        with LLM(
            parity.checkpoint_folder(family),
            **{
                "dtype": "float32",
                "kv_cache_memory": "4MiB",
                "max_num_batched_tokens": 64,
                "max_model_len": 128,
                "enable_prefix_caching": False,
                **options,
            },
            show_progress=False,
        ) as llm:
            plain = [llm.generate(prompts, params) for params in requests]
            answers = {}
            for output in (output for outputs in plain for output in outputs):
                answers.setdefault(tuple(output.prompt_token_ids), []).append(output.outputs[0].token_ids)
            runs = {"plain": [_answer(output) for outputs in plain for output in outputs]}
            num_right = {}
            for name in ("right", "changing", "random"):
                with drafting(llm.engine, drafters(answers, 131)[name], MAX_DRAFTS) as speculation:
                    outputs = [output for params in requests for output in llm.generate(prompts, params)]
                runs[name] = [_answer(output) for output in outputs]
                num_right[name] = speculation.counts.num_accepted_tokens
            texts = [{"prompt_token_ids": [*o.prompt_token_ids, *o.outputs[0].token_ids]} for o in outputs]
            scored = llm.generate(texts, SamplingParams(max_tokens=1, prompt_logprobs=4))
            runs["scored"] = [
                [_entries(output.prompt_logprobs[-NUM_TOKENS:]), *runs["plain"][i][1:]]
                for i, output in enumerate(scored)
            ]
            runner = llm.engine.runner
            # The caches of native attention have one axis for all of a block and a head.
            num_blocks = set(runner.num_blocks.values())
            caches = [cache for cache in jax.tree.leaves(runner.executor.state.caches) if cache.shape[0] in num_blocks]
            is_native = all(cache.ndim == 3 for cache in caches)
        found[family.name] = {"runs": runs, "num_right": num_right, "is_native": is_native}
    print(json.dumps(found))


def _entries(entries: list[dict]) -> list[dict[str, str]]:
    return [{str(token): value.logprob.hex() for token, value in entry.items()} for entry in entries]


def _answer(output: object) -> list[object]:
    completion = output.outputs[0]
    return [_entries(completion.logprobs), list(completion.token_ids), completion.finish_reason]


def answers_of(families: list[str], options: dict[str, object]) -> dict:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "XLA_FLAGS": ""}
    script = "import json, sys; from tests.engine.drafting.test_identity_of_models import main; "
    script += "main(*map(json.loads, sys.argv[1:]))"
    process = subprocess.run(
        [sys.executable, "-c", script, json.dumps(families), json.dumps(options)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    return json.loads(process.stdout.splitlines()[-1])


def check(families: list[str], options: dict[str, object]) -> None:
    found = answers_of(families, options)
    assert set(found) == set(families)
    for family, result in found.items():
        plain = result["runs"]["plain"]
        # Where logits are nearly even, one seed draws the same tokens at two temperatures.
        assert len({str(answer) for answer in plain}) > 6
        assert result["is_native"], f"{family}: native attention does not compute heads of this size"
        differing = [name for name, answers in result["runs"].items() if answers != plain]
        assert not differing, f"{family}: {differing}"
        assert result["num_right"]["right"] > 40, family
        assert result["num_right"]["random"] < 10, family


WIDTHS = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "int8 cache": {"kv_cache_dtype": "int8"},
    "int4, int8 cache": {"quantization": "int4", "kv_cache_dtype": "int8"},
    "bfloat16, int8": {"dtype": "bfloat16", "quantization": "int8"},
    "bfloat16, int4, int8 cache": {"dtype": "bfloat16", "quantization": "int4", "kv_cache_dtype": "int8"},
}


def test_of_recurrent_states() -> None:
    check(["Bamba"], {})


@pytest.mark.parametrize("width", WIDTHS)
def test_at_every_width(width: str) -> None:
    check(["Qwen3"], {**WIDTHS[width]})


NUM_PARTS = 8
WITHOUT_INT8_CACHE = {"BLOOM", "MPT", "Falcon RW"}


@pytest.mark.parametrize("part", range(NUM_PARTS))
@pytest.mark.parametrize("width", ["float32", "int8", "int4", "int8 cache", "bfloat16"])
def test_every_family(width: str, part: int) -> None:
    from tests.support import parity

    # An int8 cache cannot hold keys with ALiBi, which is an error.
    others = WITHOUT_INT8_CACHE if width == "int8 cache" else set()
    names = [family.name for family in parity.FAMILIES if family.name not in others]
    check(names[part::NUM_PARTS], WIDTHS[width])
