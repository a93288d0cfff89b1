"""`speculative_config` with methods that draft by layers: what is loaded, and what is refused."""

from __future__ import annotations

import json
import time

import pytest

from jaxis import LLM, SamplingParams
from jaxis.config.speculative import parse_speculative_config
from jaxis.engine.arguments import EngineArgs
from jaxis.engine.speculation import DraftCounts
from jaxis.errors import ConfigError
from tests.support import tiny_checkpoints
from tests.support.drafters import AllDrafts
from tests.support.parity import prompt

SMALL = {"max_model_len": 128, "kv_cache_memory": "8MiB", "max_num_seqs": 4, "show_progress": False}


def speculative(folders, kind):
    folder = folders(kind)[1]
    method = kind if folder is not None else "mtp"
    return {"method": method, "num_speculative_tokens": 2, **({"model": str(folder)} if folder else {})}


@pytest.mark.parametrize(
    ("kind", "quantization"),
    [
        *[("eagle3", "int8"), ("eagle3", None), ("grouped", "int8"), ("grouped", None)],
        *[("latent", "int4"), ("draft_model", "int8"), pytest.param("blocks", "int8", marks=pytest.mark.slow)],
    ],
)
def test_answers_stay_and_drafts_are_made(folders, kind, quantization):
    request = SamplingParams(max_tokens=12, temperature=0.7, seed=3, logprobs=1)
    prompts = [prompt(20), prompt(33)]
    found = []
    for config in (None, speculative(folders, kind)):
        with LLM(folders(kind)[0], quantization=quantization, speculative_config=config, **SMALL) as llm:
            if config is not None:
                assert drafts_are_tried(llm)
                llm.engine.speculation.chooser = AllDrafts()
                llm.engine.speculation.counts = DraftCounts()
            outputs = llm.generate(prompts, request)
            found.append(
                [
                    (
                        list(o.outputs[0].token_ids),
                        [{t: v.logprob.hex() for t, v in e.items()} for e in o.outputs[0].logprobs],
                    )
                    for o in outputs
                ]
            )
            if config is not None:
                # The layers that draft blocks give those of the second prompt chances of some percent, and cut them.
                assert llm.engine.speculation.counts.num_draft_tokens > (10 if kind == "blocks" else 20)
    assert found[0] == found[1]


def drafts_are_tried(llm):
    """Whether some are made once it is known what steps without them take, and their programs are compiled."""
    started = time.monotonic()
    while llm.engine.speculation.counts.num_draft_tokens == 0 and time.monotonic() < started + 60:
        llm.generate([prompt(4)], SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True))
    return llm.engine.speculation.counts.num_draft_tokens > 0


@pytest.mark.slow
def test_more_drafts_than_the_layers_make_at_once_are_refused(folders):
    with pytest.raises(ConfigError, match="num_speculative_tokens=6 is more than the 5 tokens that the checkpoint's"):
        LLM(folders("blocks")[0], speculative_config={"method": "dspark", "num_speculative_tokens": 6}, **SMALL)


def test_vllms_names_of_families_stand_for_mtp():
    config = parse_speculative_config({"method": "glm4_moe_mtp"})
    assert (config.method, config.num_speculative_tokens) == ("mtp", 3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "eagle3"}, 'needs "model"'),
        ({"method": "mtp", "model": "x"}, "model='x' has no use for method='mtp'"),
        ({"method": "ngram", "quantization": "int8"}, "quantization='int8' has no use for method='ngram'"),
        ({"method": "draft_model", "model": 3}, "model=3 must be a string"),
        ({"method": "eagle", "model": "x"}, "method='eagle' is not implemented"),
        ({"method": "dflash", "model": "x"}, "method='dflash' is not implemented: give ngram or "),
    ],
)
def test_what_does_not_fit_the_method_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        parse_speculative_config(given)


def test_several_hosts_are_refused():
    with pytest.raises(ConfigError, match="method='mtp' does not combine with nnodes=2"):
        EngineArgs(tensor_parallel_size=2, nnodes=2, speculative_config={"method": "mtp"})


def test_a_model_without_such_a_layer_is_refused(folders):
    with pytest.raises(ConfigError, match="without layers that predict later tokens"):
        LLM(folders("eagle3")[0], speculative_config={"method": "mtp"}, **SMALL)


def test_a_draft_model_with_recurrent_layers_is_refused(folders):
    recurrent, _ = folders("recurrent")
    with pytest.raises(ConfigError, match="what is to draft has recurrent layers"):
        LLM(recurrent, speculative_config={"method": "draft_model", "model": str(recurrent)}, **SMALL)


def test_a_draft_model_that_is_no_head_is_refused_as_one(folders):
    target, smaller = folders("draft_model")
    with pytest.raises(ConfigError, match="is not of an EAGLE-3 head"):
        LLM(target, speculative_config={"method": "eagle3", "model": str(smaller)}, **SMALL)


def test_a_draft_model_of_another_vocabulary_is_refused_by_name(folders, tmp_path):
    target = folders("draft_model")[0]
    other = tiny_checkpoints.write_checkpoint(tmp_path / "other", tokenizer=False)
    vocab_size = json.loads((other / "config.json").read_text())["vocab_size"]
    with pytest.raises(ConfigError, match=f"other has another vocabulary than .*they have 131 and {vocab_size} tokens"):
        LLM(target, speculative_config={"method": "draft_model", "model": str(other)}, **SMALL)


def test_the_layer_takes_no_memory_unless_it_is_asked_for(folders):
    names = []
    for config in (None, speculative(folders, "grouped")):
        with LLM(folders("grouped")[0], speculative_config=config, **SMALL) as llm:
            names.append({name for name in llm.engine.runner.bytes_by_weight() if name.startswith("draft.")})
    assert not names[0]
    assert names[1]
