"""Small models with layers that draft, a runner for them, and a loop that asks for drafts after every step."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path

from jaxis.config import CacheConfig, LoadConfig, ModelConfig, SchedulerConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.engine.drafting.draft_layers import DraftLayers
from jaxis.engine.drafting.speculation import DraftRequest
from jaxis.engine.execution.executor import DeviceExecutor
from jaxis.engine.execution.kv_cache import plan_kv_caches
from jaxis.engine.execution.programs import Programs
from jaxis.engine.execution.runner import Runner
from jaxis.engine.execution.sequence_sampling import SequenceSampling
from jaxis.engine.scheduling.block_manager import BlockManager
from jaxis.engine.scheduling.scheduler import Scheduler
from jaxis.engine.scheduling.sequence import Sequence, SequenceId
from jaxis.kernels import native
from jaxis.models.common.interfaces import block_size_of
from jaxis.models.draft_loader import load_draft_model, load_eagle3
from jaxis.models.model_loader import load_model
from jaxis.parallel.mesh import make_mesh
from jaxis.quantization.wrappers import PackingConfig
from jaxis.sampling_params import SamplingParams
from tests.support.chain_checkpoints import write_chain_checkpoint, write_nemotron_checkpoint
from tests.support.dspark import WholeBlocks, write_dspark_checkpoint
from tests.support.eagle_checkpoints import write_head, write_target
from tests.support.prediction_checkpoints import WholeDrafts, family, write_prediction_checkpoint
from tests.support.stream_predictions import write_streams_checkpoint

NUM_DRAFTS = 3
MAX_MODEL_LEN = 128


def _write_prediction(name: str, num_layers: int = 1, **changes: int) -> Callable[[Path], Path]:
    return lambda folder: write_prediction_checkpoint(folder, family(name, **changes), num_layers)[0]


# Heads of 32 are of a size that the native kernels take.
MODELS: dict[str, Callable[[Path], Path]] = {
    # Of several layers, the first one drafts.
    "several": _write_prediction("GLM-4.5 MoE", 3, head_dim=32),
    "grouped": _write_prediction("GLM-4.5 MoE", head_dim=32),
    "latent": _write_prediction("DeepSeek V3"),
    "step": lambda folder: write_chain_checkpoint(folder, "Step 3.5", head_dim=32),
    "step 5": lambda folder: write_chain_checkpoint(folder, "Step 5", head_dim=32),
    "mimo": lambda folder: write_chain_checkpoint(folder, "MiMo V2 Flash", head_dim=32, v_head_dim=32),
    # One block of attention and experts, behind layers with states.
    "two layers": lambda folder: write_nemotron_checkpoint(folder)[0],
    # Tokens attend to some of those before them; layers share what is selected, the one that predicts does not.
    "indexed": _write_prediction("GLM-5.2"),
    # Tokens attend to groups of those before them, behind layers with residual streams and states.
    "groups": lambda folder: write_streams_checkpoint(folder, "GLM-5.3-Flash"),
    # The model hands its residual streams to the layer.
    "streams": lambda folder: write_streams_checkpoint(folder, "Qwen3.8-Flash-Next"),
    "compressed": lambda folder: write_streams_checkpoint(folder, "DeepSeek V4"),
    "gated": lambda folder: write_streams_checkpoint(folder, "Hy4"),
    # A block of tokens at once.
    "blocks": lambda folder: write_dspark_checkpoint(folder, "DeepSeek V4.1"),
    "windows": _write_prediction("Mellum 2", head_dim=32),
    # Of recurrent layers, and one of attention that predicts.
    "recurrent": _write_prediction("Qwen3.5"),
    "eagle3": write_target,
    "draft_model": write_target,
}
DRAFTERS: dict[str, Callable[[Path], Path]] = {
    "eagle3": lambda folder: write_head(folder, "SpecForge", layers=(1, 2, 5)),
    "draft_model": lambda folder: write_target(folder, num_layers=1, seed=1),
}


def folder_writer(new: Callable[[str], Path]) -> Callable[[str], tuple[Path, Path | None]]:
    """Folders of the model and of the layers of a kind, written at the first call; `new` makes folders."""

    @functools.cache
    def write(kind: str) -> tuple[Path, Path | None]:
        draft = DRAFTERS[kind](new("head" if kind == "eagle3" else "smaller")) if kind in DRAFTERS else None
        return MODELS[kind](new("model")), draft

    return write


def make_runner(
    folders: tuple[Path, Path | None], max_num_batched_tokens: int, num_blocks: int | None = None
) -> Runner:
    """A runner of a model and its layers, with so many KV blocks, by default as 4 MiB hold."""
    folder, draft_folder = folders
    mesh = make_mesh()

    def config_of(path):
        return VllmConfig(
            ModelConfig(str(path), HFConfig.from_folder(path), max_model_len=MAX_MODEL_LEN),
            cache_config=CacheConfig(kv_cache_memory_bytes=4 << 20),
            scheduler_config=SchedulerConfig(min(4, max_num_batched_tokens), max_num_batched_tokens),
            load_config=LoadConfig(prediction_layer=draft_folder is None),
            quant_config=PackingConfig(None) if native.usable() else None,
        )

    config = config_of(folder)
    model = load_model(config, mesh)
    if draft_folder is not None:
        load = load_eagle3 if draft_folder.name.startswith("head") else load_draft_model
        load(model, config_of(draft_folder), mesh)
    plan = plan_kv_caches(model, config, mesh, num_blocks=num_blocks)
    return Runner(config, Programs(DeviceExecutor(config, model, mesh, plan), lambda _: contextlib.nullcontext()))


def drafts_of_whole(runner: Runner) -> WholeDrafts | WholeBlocks:
    """Returns drafts by the runner's model without its caches."""
    return (WholeBlocks if block_size_of(runner.model.draft) else WholeDrafts)(runner.model)


def run(
    runner: Runner, prompts: list[list[int]], num_tokens: int, expected: list[list[int]] | None = None
) -> tuple[list[list[int]], list[dict[int, list[int]]]]:
    """Decodes greedily; for each sequence, its tokens and {length: drafts behind so many tokens}.

    Args:
      runner: The model's.
      prompts: Prompts of the sequences.
      num_tokens: To generate.
      expected: The tokens that come out; steps then compute these as drafts, with one that is wrong now and then.
    """
    limits = runner.vllm_config.scheduler_config
    block_size = runner.vllm_config.cache_config.block_size
    blocks = BlockManager(runner.num_blocks, block_size, True, runner.num_state_slots)
    scheduler = Scheduler(
        blocks,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=MAX_MODEL_LEN,
    )
    drafter = DraftLayers(runner, NUM_DRAFTS, blocks.extend)
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens)
    sequences = [
        Sequence(SequenceId(str(i)), list(ids), params, frozenset(), len(ids) + num_tokens, arrival=i)
        for i, ids in enumerate(prompts)
    ]
    for each in sequences:
        scheduler.add_sequence(each)
    sampling = {
        each.seq_id: SequenceSampling(
            params,
            prompt_token_ids=each.prompt_token_ids,
            output_token_ids=each.output_token_ids,
            vocab_size=runner.vocab_size,
            seed=0,
        )
        for each in sequences
    }
    drafts = [{} for _ in sequences]
    guesses = {}
    while (output := scheduler.schedule(guesses)) is not None:
        sampled = runner.dispatch(output, sampling).token_ids()
        accepted = [entry.accepted(token_ids) for entry, token_ids in zip(output.scheduled, sampled, strict=True)]
        for _ in scheduler.update(output, accepted):
            pass
        known = [i for i, each in enumerate(sequences) if each.output_token_ids and not each.status.finished]
        proposed = drafter.propose([DraftRequest(sequences[i], NUM_DRAFTS) for i in known])
        for i, proposed_ids in zip(known, proposed, strict=True):
            if proposed_ids:  # none behind a step that read prompts
                drafts[i][sequences[i].num_tokens] = list(proposed_ids)
        if expected is not None:
            guesses = {sequences[i].seq_id: _one_wrong(expected[i], sequences[i].num_tokens) for i in known}
    return [[*each.prompt_token_ids, *each.output_token_ids] for each in sequences], drafts


def _one_wrong(tokens: list[int], length: int) -> list[int]:
    """Drafts after so many tokens, the first, the second or so wrong, or none of it."""
    guesses = tokens[length : length + NUM_DRAFTS]
    place = length % (NUM_DRAFTS + 1)
    return [token + (i == place) for i, token in enumerate(guesses)]
