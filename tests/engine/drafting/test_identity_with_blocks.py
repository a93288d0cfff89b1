"""Blocks that a DFlash head drafts change no answer, and follow their context through all that the engine does."""

from __future__ import annotations

import json
import sys

import pytest

from jaxis import LLM, SamplingParams
from jaxis.engine.drafting.draft_layers import DraftLayers
from jaxis.engine.drafting.layer_speculation import LayerSpeculation
from tests.support.dflash_checkpoints import ReferenceDrafts, write_dflash_head, write_qwen3_target
from tests.support.drafters import AllLayerDrafts
from tests.support.parity import prompt
from tests.support.simulated_devices import run_on_devices

BLOCK_SIZE = 8
NUM_TOKENS = 16
# Prompts that end before, at and behind the edges of blocks of the cache, of 16 tokens.
LENGTHS = (1, 16, 17, 31, 62)
REQUESTS = [
    (
        {"prompt_token_ids": prompt(length)},
        SamplingParams(
            temperature=temperature, seed=i, max_tokens=NUM_TOKENS, logprobs=1, num_speculative_tokens=(None, 3)[i % 2]
        ),
    )
    for i, (length, temperature) in enumerate((length, t) for t in (0.0, 0.7, 2.0) for length in LENGTHS)
]


class Recorder(DraftLayers):
    """Notes what was drafted behind which tokens."""

    def __init__(self, *args):
        super().__init__(*args)
        self.found = {}

    def propose(self, requests):
        drafts = super().propose(requests)
        for request, token_ids in zip(requests, drafts, strict=True):
            tokens = request.sequence.token_ids(0, request.sequence.num_tokens)
            self.found[tuple(tokens)] = list(token_ids)
        return drafts


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    new = tmp_path_factory.mktemp
    return write_qwen3_target(new("target")), write_dflash_head(new("dflash_head"), block_size=BLOCK_SIZE)


@pytest.fixture(scope="module")
def llm(folders):
    """With memory for some of the requests' sequences, and prompts in chunks."""
    target, head = folders
    with LLM(
        target,
        speculative_config={"method": "dflash", "model": str(head)},
        max_num_seqs=3,
        max_num_batched_tokens=32,
        max_model_len=80,
        kv_cache_memory="480KiB",
        show_progress=False,
    ) as llm:
        yield llm


def answers(llm):
    """The bits of each request's answer, all at once."""
    outputs = llm.generate([request for request, _ in REQUESTS], [params for _, params in REQUESTS])
    return [
        (o.outputs[0].token_ids, [{t: v.logprob.hex() for t, v in each.items()} for each in o.outputs[0].logprobs])
        for o in outputs
    ]


def test_answers_and_drafts_in_company_after_preemptions_and_prefix_hits(folders, llm):
    engine = llm.engine
    assert engine.speculation.drafter._num_drafts == BLOCK_SIZE - 1, "15 by default, and no more than a block has"
    engine.speculation, own = None, engine.speculation
    plain = answers(llm)
    num_preemptions = engine.num_preemptions
    drafter = Recorder(engine.runner, BLOCK_SIZE - 1, lambda *of: engine.scheduler.block_manager.extend(*of))
    engine.speculation = LayerSpeculation(drafter, AllLayerDrafts(), max_drafts=BLOCK_SIZE - 1)
    engine.reset_prefix_cache()
    assert answers(llm) == plain
    assert engine.num_preemptions > num_preemptions
    first, drafter.found = drafter.found, {}
    assert answers(llm) == plain, "with prefixes that are found"
    engine.speculation = own
    reference = ReferenceDrafts(*folders)
    # The same tokens, drafted behind in other company.
    assert sum(tokens in first for tokens in drafter.found) > 20
    for tokens, token_ids in [*list(first.items())[::7], *list(drafter.found.items())[::7]]:
        assert token_ids == reference(tokens)[: len(token_ids)]
    assert engine.scheduler.block_manager.num_free_blocks == engine.scheduler.block_manager.num_blocks


def print_drafts(target: str, head: str, num_devices: int) -> None:
    """Prints, as JSON, what is drafted on so many devices, and behind which tokens."""
    with LLM(
        target,
        speculative_config={"method": "dflash", "model": head},
        tensor_parallel_size=num_devices,
        max_num_seqs=2,
        max_num_batched_tokens=64,
        max_model_len=128,
        kv_cache_memory="8MiB",
        show_progress=False,
    ) as llm:
        engine = llm.engine
        drafter = Recorder(engine.runner, BLOCK_SIZE - 1, lambda *of: engine.scheduler.block_manager.extend(*of))
        engine.speculation = LayerSpeculation(drafter, AllLayerDrafts(), max_drafts=BLOCK_SIZE - 1)
        llm.generate([prompt(70), prompt(33)], SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS))
        print(json.dumps(list(drafter.found.items())))


@pytest.mark.multi_device
@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [2, 4])  # as many as the head has heads of keys and values, and more
def test_devices_that_share_the_heads_draft_the_same(folders, num_devices):
    target, head = folders
    reference = ReferenceDrafts(target, head)
    found = json.loads(run_on_devices("-m", __name__, str(target), str(head), str(num_devices)).splitlines()[-1])
    assert len(found) > 20
    for tokens, token_ids in found:
        assert token_ids == reference(tokens)[: len(token_ids)]


if __name__ == "__main__":
    print_drafts(sys.argv[1], sys.argv[2], int(sys.argv[3]))
