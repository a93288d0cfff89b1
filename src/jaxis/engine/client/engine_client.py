"""Facts about an engine and the progress of its requests, for the server's process. Imports no JAX."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from jaxis.engine.kv_connector import TierStats
from jaxis.engine.scheduling.places import PlaceUse
from jaxis.engine.speculation import DraftCounts
from jaxis.sampling_params import RAW_LOGPROBS, SamplingParams

if TYPE_CHECKING:
    from jaxis.engine.setup import BuiltEngine


@dataclass(frozen=True)
class EngineInfo:
    """Facts about an engine that a server needs. They do not change during the engine's life.

    Attributes:
      model_folder: Folder or file of the checkpoint.
      model_type: The `model_type` in config.json.
      default_sampling_params: Sampling parameters that the checkpoint recommends.
      max_model_len: Most tokens of a sequence, prompt and output together.
      max_num_seqs: Most sequences that run at once, on all data ranks.
      num_cache_tokens: Tokens that the KV cache holds.
      vocab_size: V.
      eos_token_ids: Tokens that end a sequence.
      block_size: Tokens of a block of the KV cache.
      trained_len: Longest sequence for which the model works according to config.json; None if that is not stated.
      num_parameters: Number of the model's parameters.
      weight_type: Storage type of most parameters, as in `model_size`.
      fingerprint: Digest of all that the engine's answers depend on, as in `engine_fingerprint`; empty if unknown.
      capabilities: Capabilities of the model, in the words of most APIs.
      logprobs_mode: Meaning of a log-probability for requests that do not choose one.
      num_devices: Devices that run the model.
      num_ranks: Data ranks, which share the devices.
      features: Facts of the engine's features by their names, of the types that MessagePack has.
      left_out: Reason for which a feature of the checkpoint was left out; empty if none was.
    """

    model_folder: str
    model_type: str | None
    default_sampling_params: SamplingParams
    max_model_len: int
    max_num_seqs: int
    num_cache_tokens: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    block_size: int = 16
    trained_len: int | None = None
    num_parameters: int = 0
    weight_type: str = ""
    fingerprint: str = ""
    capabilities: tuple[str, ...] = ("completion",)
    logprobs_mode: str = RAW_LOGPROBS
    num_devices: int = 1
    num_ranks: int = 1
    features: dict[str, Any] = field(default_factory=dict)
    left_out: str = ""

    @property
    def may_grow(self) -> bool:
        """True if the model is not known to forbid a longer context than it was started with."""
        return self.trained_len is None or self.max_model_len < self.trained_len

    @classmethod
    def of(cls, built: BuiltEngine) -> EngineInfo:
        from jaxis.engine.execution.model_size import model_size  # imports JAX

        engine = built.engine
        config, blocks = engine.vllm_config, engine.scheduler.block_manager
        num_parameters, weight_type = model_size(*engine.runner.models)
        trained_len = config.model_config.hf_config.get("max_position_embeddings")
        return cls(
            model_folder=str(config.model_config.model),
            model_type=config.model_config.hf_config.get("model_type"),
            default_sampling_params=built.default_sampling_params,
            max_model_len=engine.max_model_len,
            max_num_seqs=config.scheduler_config.max_num_seqs * engine.runner.num_ranks,
            num_cache_tokens=blocks.num_blocks * blocks.block_size,
            vocab_size=engine.runner.vocab_size,
            eos_token_ids=engine.eos_token_ids,
            block_size=blocks.block_size,
            trained_len=trained_len if isinstance(trained_len, int) else None,
            num_parameters=num_parameters + built.hosts.num_parameters,
            weight_type=weight_type,
            fingerprint=built.fingerprint,
            logprobs_mode=config.model_config.logprobs_mode,
            num_devices=config.parallel_config.tensor_parallel_size
            * engine.runner.num_ranks
            * engine.runner.num_stages,
            num_ranks=engine.runner.num_ranks,
            features=engine.runner.features.facts,
            left_out=built.left_out,
        )


class EngineKind(NamedTuple):
    """A kind of engines.

    Attributes:
      module: Module with the function `build(args, progress, *, shared, admit)`, which builds an engine of `EngineArgs`
        and returns its info and its `EngineCore`. `shared` is a `MemoryBudget` that other engines share, or None;
        `admit` a callback with the bytes of memory that the engine will take, before it reads its weights, or None.
      info: Type of the facts about the engine.
    """

    module: str
    info: type[EngineInfo]


GENERATION = EngineKind("jaxis.engine.client.generation_core", EngineInfo)


@dataclass(frozen=True)
class RankStats:
    """A data rank after the last step: running sequences, and the share of its KV cache blocks in use, 0 to 1."""

    num_requests_running: int
    kv_cache_usage: float


@dataclass(frozen=True)
class EngineStats:
    """The engine after its last step. Queries, hits and preemptions are counted since its start.

    Attributes:
      num_requests_running: Sequences in the running batch.
      num_requests_waiting: Sequences that wait to be admitted, including preempted ones.
      kv_cache_usage: Share of the KV cache's blocks in use, 0 to 1.
      prefix_cache_queries: Prompt tokens looked up in the prefix cache.
      prefix_cache_hits: Prompt tokens found in the prefix cache.
      num_preemptions: Times that a sequence lost its blocks to another.
      kv_tiers: Counters of each tier of KV blocks beyond the devices, by its name.
      process_memory_bytes: Resident memory of the engine's process; 0 if the engine has no process of its own.
      drafts: Counters of drafts; None if none are made.
      ranks: State of each data rank; empty if there is only one.
      places: Places that sequences need to run (see `Places`); None if they need none.
    """

    num_requests_running: int = 0
    num_requests_waiting: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    kv_tiers: dict[str, TierStats] = field(default_factory=dict)
    process_memory_bytes: int = 0
    drafts: DraftCounts | None = None
    ranks: tuple[RankStats, ...] = ()
    places: PlaceUse | None = None


class TokenDelta(NamedTuple):
    """New text and tokens of an unfinished request with one completion, after its first output.

    Nearly every output is a TokenDelta, and a step may have a hundred of them: a server's throughput depends on their
    cost.
    """

    request_id: str
    text: str
    token_ids: list[int]


@dataclass(frozen=True)
class RequestState:
    """The progress of a request in the engine.

    Attributes:
      request_id: Id of the request.
      status: "waiting", "running" or "preempted", as its completion that is furthest.
      num_prompt_tokens: Tokens of its prompt.
      num_cached_tokens: Tokens of its prompt that the prefix cache held.
      num_computed_tokens: Tokens of prompt and completions whose keys and values are computed.
      num_generated_tokens: Tokens of its completions.
      first_scheduled_time: Start of its first step, in seconds of `time.monotonic`; None before.
    """

    request_id: str
    status: Literal["waiting", "running", "preempted"]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    num_generated_tokens: int
    first_scheduled_time: float | None
