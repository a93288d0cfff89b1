"""Builds a running engine from its arguments: reads the checkpoint, loads the model, allocates the caches."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from jaxis.config import VllmConfig
from jaxis.config.checkpoint_values import trained_context_length
from jaxis.config.hf_config import HFConfig
from jaxis.config.quantization import HoldsWeights
from jaxis.engine.argument_groups.devices import check_ranks_share
from jaxis.engine.arguments import EngineArgs
from jaxis.engine.connector_setup import make_connector
from jaxis.engine.draft_setup import read_draft_config
from jaxis.engine.engine import LLMEngine
from jaxis.engine.engine_config import check_quant_method
from jaxis.engine.execution.calls import Calls
from jaxis.engine.execution.executor import Executor
from jaxis.engine.execution.extra_memory import ExtraMemory
from jaxis.engine.execution.feature import RequestFeature
from jaxis.engine.execution.programs import Programs
from jaxis.engine.experts.feature import RoutedExpertsFeature
from jaxis.engine.extra_memory_setup import cache_bytes_beside, make_extra_memory
from jaxis.engine.fingerprint import engine_fingerprint
from jaxis.engine.generation_defaults import (
    end_of_turn,
    eos_token_ids_of,
    note_unapplied,
    sampling_defaults,
    suppressed_tokens,
)
from jaxis.engine.host_group import NO_OTHER_HOSTS, HostGroup
from jaxis.engine.loaded_model import LoadedModel
from jaxis.engine.memory_budget import MemoryBudget
from jaxis.engine.memory_plan import MemoryPlan, plan_memory
from jaxis.engine.opened_model import OpenedModel, facts_of_model, open_model
from jaxis.engine.weights.live_weights import LiveWeights
from jaxis.engine.weights.new_weights import Weights, read_weights
from jaxis.engine.weights.versions import WeightVersions
from jaxis.errors import ConfigError
from jaxis.host.extras import check_extra
from jaxis.host.progress import ProgressDisplay
from jaxis.layers.module import JaxModule
from jaxis.loading.gguf_files import gguf_file
from jaxis.loading.header_cache import headers_read_once
from jaxis.loading.open_checkpoint import ConfigValues, read_generation_defaults
from jaxis.models.draft_loader import construct_draft
from jaxis.sampling_params import SamplingParams
from jaxis.tokenizer import Tokenizer
from jaxis.tokenizer.template_choice import read_tokenizer, template_names
from jaxis.tokenizer.template_process import PROCESSES

if TYPE_CHECKING:
    from jaxis.engine.hosts.followers import Followers


@dataclass(frozen=True)
class BuiltEngine:
    """A running engine.

    Attributes:
      engine: The engine.
      default_sampling_params: Sampling parameters that its checkpoint recommends.
      hosts: The other hosts that run its model.
      weights: Weights of the engine, which can be replaced.
      left_out: Reason for which a feature of its checkpoint was left out; empty if none was.
    """

    engine: LLMEngine
    default_sampling_params: SamplingParams
    weights: LiveWeights
    hosts: HostGroup = NO_OTHER_HOSTS
    left_out: str = ""

    @property
    def fingerprint(self) -> str:
        return self.weights.fingerprint

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.engine.tokenizer

    @property
    def max_model_len(self) -> int:
        """Most tokens of a request, prompt and output together."""
        return self.engine.max_model_len

    @property
    def weight_bytes(self) -> int:
        """Size of the weights on all devices of all hosts together."""
        return self.engine.runner.weight_bytes + self.hosts.weight_bytes

    def close(self) -> None:
        """Frees the engine's memory."""
        self.engine.close()

    def __str__(self) -> str:
        return f"{type(self.engine.runner.model).__name__}, max_model_len={self.max_model_len}"

    @property
    def calls(self) -> Calls:
        """Functions for the server, by name."""
        return {**self.weights.calls, **self.engine.runner.features.calls}


@headers_read_once()
def build_engine(
    args: EngineArgs,
    progress: ProgressDisplay,
    *,
    opened: OpenedModel | None = None,
    quant_method: str | None = None,
    needs_chat_template: bool = False,
    shared: MemoryBudget | None = None,
    admit: Callable[[int], None] | None = None,
    weights: Weights | None = None,
    tokenizer: Tokenizer | None = None,
) -> BuiltEngine:
    """Loads the model and allocates the caches; with several hosts, once the others have joined.

    Args:
      args: Arguments of the engine.
      progress: Display of progress.
      opened: Opened checkpoint; None finds it by the arguments.
      quant_method: Expected quantization format of the checkpoint; None is any.
      needs_chat_template: True to refuse a model without a chat template, before its weights are read.
      shared: Budget of host memory that other engines share; None is all that is free.
      admit: Callback with the bytes that the memory plan says the engine will take (0 without a plan), before its
        weights are read. It may wait, and may raise.
      weights: First weights; None: those of the checkpoint.
      tokenizer: Tokenizer; None: that of the checkpoint.

    Raises:
      ConfigError, CheckpointError, EngineError: The errors of `LLM`.
    """
    with _other_hosts(args, progress) as followers:
        check_ranks_share(args)
        opened = opened or open_model(args)
        path, hf_config = opened.path, opened.hf_config
        check_quant_method(quant_method, hf_config)
        is_given = args.chat_template is not None or tokenizer is not None
        tokenizer = tokenizer or read_tokenizer(path, args.chat_template, args.template_folder)
        if needs_chat_template and (tokenizer is None or not tokenizer.has_chat_template):
            raise ConfigError(_no_chat_template(args.model or "the embedded model", tokenizer))
        if tokenizer is not None and tokenizer.has_chat_template:
            # The template says which token ends an answer; its process starts while the weights are read.
            PROCESSES.start()
        generation = read_generation_defaults(path)
        default_sampling_params = sampling_defaults(generation, path)
        note_unapplied(path, progress)
        if args.fit_memory and followers is not None:
            # A plan for this host's memory need not fit into that of the others.
            args = dataclasses.replace(args, fit_memory=False)
        if followers is not None:
            followers.build(args, facts_of_model(path, args))
        meshes = opened.make_meshes(args)
        make_config = functools.partial(opened.make_config, meshes=meshes)
        extra_memory = make_extra_memory(args, opened, tokenizer, make_config)
        plan = _plan_memory(args, make_config, meshes, shared, extra_memory) if args.fit_memory else None
        if admit is not None:
            admit(0 if plan is None else plan.nbytes)
        if plan is not None:
            progress.note(plan.line)
            args = plan.apply(args)
        first = None if weights is None else read_weights(weights, args, opened, meshes, progress)
        loaded = opened.load(args, meshes, progress) if first is None else first.loaded
        is_loaded_here = not isinstance(weights, JaxModule)
        if is_loaded_here:
            _note_config(opened.config, hf_config, path, progress)
        if followers is None:
            executor = loaded.executor(cache_bytes_beside(extra_memory, args, loaded))
        else:
            executor = _leading_executor(args, loaded, followers)
        features = extra_memory.fill(executor, progress.note)
        _note_text_only(hf_config, features, progress)
        versions = WeightVersions()
        features += [
            RoutedExpertsFeature(loaded.models, executor.num_stages, loaded.vllm_config.model_config),
            versions,
        ]
        fingerprint = engine_fingerprint(path, args, executor.plan.max_model_len)
        programs = Programs(executor, progress.compiling)
        ends = end_of_turn(tokenizer, progress, is_given=is_given) | eos_token_ids_of(generation, hf_config, tokenizer)
        engine = LLMEngine(
            loaded.vllm_config,
            programs,
            tokenizer=tokenizer,
            eos_token_ids=ends,
            connector=make_connector(args, programs, loaded.vllm_config, path, fingerprint),
            features=features,
            suppressed=suppressed_tokens(path, hf_config.get_text_config()["vocab_size"], ends),
        )
        live = LiveWeights(engine, args, opened, meshes, first, fingerprint, versions)
        _note_context(args, hf_config, loaded.vllm_config.model_config.max_model_len, engine.max_model_len, progress)
        hosts, reason = followers or NO_OTHER_HOSTS, "" if (out := extra_memory.left_out) is None else out.reason
        return BuiltEngine(engine, default_sampling_params, live, hosts, reason)


@contextmanager
def _other_hosts(args: EngineArgs, progress: ProgressDisplay) -> Iterator[Followers | None]:
    """Waits for the other hosts that run the model, which are refused if the block fails; None if there are none."""
    if args.nnodes == 1:
        yield None
        return
    check_extra("server", f"LLM with nnodes={args.nnodes}")
    from jaxis.engine.hosts.followers import Followers
    from jaxis.engine.hosts.meeting import HostPlace, gather

    # Hosts must meet before anything asks JAX for devices.
    place = HostPlace(args.nnodes, 0, args.master_addr, args.master_port, args.distributed_timeout_seconds)
    progress.note(f"waiting for {args.nnodes - 1} more hosts at {place.address}:{place.port}")
    followers = Followers(gather(place))
    try:
        yield followers
    except BaseException as error:
        followers.refuse(str(error).partition("\n")[0] or type(error).__name__)
        raise


def _leading_executor(args: EngineArgs, loaded: LoadedModel, followers: Followers) -> Executor:
    from jaxis.engine.hosts import messages
    from jaxis.engine.hosts.leading_executor import LeadingExecutor

    least = followers.least_cache_bytes(loaded.most_cache_bytes)
    memory = args.kv_cache_memory_bytes or least
    followers.send(messages.AllocateCaches(memory))
    followers.watch()
    return LeadingExecutor(loaded.executor(memory), followers)


def _note_config(config: ConfigValues, hf_config: HFConfig, path: Path, progress: ProgressDisplay) -> None:
    """Notes the assumptions about config.json, and the keys that have no effect."""
    if config.assumptions:
        progress.note(f"assumed, since {path.name} does not say it: {', '.join(config.assumptions)}")
    if ignored := hf_config.ignored_keys():
        progress.note(f"ignored keys of config.json: {', '.join(ignored)}")


def _note_text_only(hf_config: HFConfig, features: Sequence[RequestFeature], progress: ProgressDisplay) -> None:
    """Notes that prompts have text only, though the checkpoint has more."""
    if not any(feature.extends_prompts for feature in features) and hf_config.get_text_config() is not hf_config:
        progress.note("only the text part of this model is served: prompts have text alone")


def _note_context(args: EngineArgs, hf_config: HFConfig, wanted: int, fitting: int, progress: ProgressDisplay) -> None:
    """Notes the reason if the context is shorter than the checkpoint's, or than requested."""
    trained = trained_context_length(hf_config)
    if args.max_model_len is None and trained is None:
        progress.note(f"max_model_len is {wanted}: config.json names no longest sequence; give max_model_len for more")
    elif args.max_model_len is None and trained is not None and wanted < trained:
        progress.note(
            f"max_model_len is {wanted}, up to which the model needs no long-context frequencies; for up to {trained}, "
            "which changes the answers to short prompts too, give max_model_len"
        )
    if fitting < wanted:
        progress.note(
            f"max_model_len is {fitting}, not {wanted}: that is what the KV cache has memory for; "
            "kv_cache_memory gives it more"
        )


def _plan_memory(
    args: EngineArgs,
    make_config: Callable[[EngineArgs], VllmConfig],
    meshes: Sequence[jax.sharding.Mesh],
    shared: MemoryBudget | None,
    extra_memory: ExtraMemory,
) -> MemoryPlan | None:
    def make_draft(args: EngineArgs) -> tuple[JaxModule, VllmConfig] | None:
        speculative = args.parsed_speculative_config
        if speculative is None or speculative.model is None:
            return None
        _, draft_config = read_draft_config(args, speculative, make_config(args))
        return construct_draft(draft_config, speculative.method), draft_config

    can_quantize = not _stays_as_stored(args, make_config(args))
    return plan_memory(args, make_config, meshes, make_draft, shared, extra_memory, can_quantize=can_quantize)


def _stays_as_stored(args: EngineArgs, config: VllmConfig) -> bool:
    """Returns whether a checkpoint is quantized already, so that its weights stay as they are."""
    path, hf_config = Path(config.model_config.model), config.model_config.hf_config
    if isinstance(config.quant_config, HoldsWeights):
        return True
    quantized = gguf_file(path) is not None or hf_config.read_object("quantization_config") is not None
    dequantized = args.requested_quantization is not None and args.requested_quantization.dequantize
    return quantized and not dequantized and args.load_format != "dummy"


def _no_chat_template(model: str, tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return f"{model} has no tokenizer, so it cannot chat: use `jaxis generate --token-ids`"
    return (
        f"{model} has no chat template, so it cannot chat: give one with --chat-template FILE or NAME "
        f"({', '.join(template_names())}), or use `jaxis generate`"
    )
