"""The messages between the event loop and an engine, whichever process the engine runs in. No JAX here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from jaxis.engine.drafting.draft_counts import DraftCounts
from jaxis.engine.kv_connector import TierStats
from jaxis.engine.scheduling.places import PlaceUse
from jaxis.outputs import RequestOutput
from jaxis.prompts import TokenizedPrompt
from jaxis.sampling_params import RAW_LOGPROBS, SamplingParams

if TYPE_CHECKING:
    import asyncio

    from jaxis.engine.client.engine_change import EngineChange
    from jaxis.engine.execution.adapters import Adapters
    from jaxis.engine.grammar.compiler import GrammarCompiler
    from jaxis.engine.grammar.matcher import Grammar
    from jaxis.engine.setup import BuiltEngine
    from jaxis.tokenizer import Tokenizer


@dataclass(frozen=True)
class EngineInfo:
    """The facts about an engine that a server needs; they stay the same for the engine's life.

    Attributes:
      model_folder: The checkpoint's.
      model_type: As in config.json.
      default_sampling_params: What the checkpoint recommends.
      max_model_len: Most tokens of a sequence, prompt and output together.
      max_num_seqs: Most sequences that run at once, on all data ranks.
      num_cache_tokens: Tokens that the KV cache holds.
      vocab_size: V.
      eos_token_ids: Tokens that end a sequence.
      block_size: Tokens of a block of the KV cache.
      trained_len: Tokens of a sequence up to which config.json says that the model works; None if it does not say.
      num_parameters: The model's.
      weight_type: How most of its parameters are stored; see `model_size`.
      fingerprint: Names all that the engine's answers depend on; see `engine_fingerprint`. Empty if unknown.
      capabilities: What the model does, in the words of most APIs.
      adapters: Adapters of the model that it knew at its start; None if it can have none.
      logprobs_mode: What a log-probability is, to requests that do not say.
      num_devices: Devices that run the model.
      num_ranks: Data ranks, which share them.
      max_inputs: See `InputEncoder`; empty if it takes none.
      request_bytes: How large a request with these may have to be; 0 if it takes none.
      input_files: The folder or file that says how they are made from what users send; empty if it takes none.
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
    adapters: tuple[NamedAdapter, ...] | None = None
    logprobs_mode: str = RAW_LOGPROBS
    num_devices: int = 1
    num_ranks: int = 1
    max_inputs: dict[str, int] = field(default_factory=dict)
    request_bytes: int = 0
    input_files: str = ""

    @property
    def may_grow(self) -> bool:
        """Whether the model allows a longer context than it was started with, as far as is known."""
        return self.trained_len is None or self.max_model_len < self.trained_len

    @classmethod
    def of(cls, built: BuiltEngine) -> EngineInfo:
        """Describes an engine."""
        from jaxis.engine.execution.model_size import model_size  # imports JAX

        engine = built.engine
        config, blocks = engine.vllm_config, engine.scheduler.block_manager
        inputs = engine.runner.inputs
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
            adapters=None if built.adapters is None else _named(built.adapters),
            logprobs_mode=config.model_config.logprobs_mode,
            num_devices=config.parallel_config.tensor_parallel_size
            * engine.runner.num_ranks
            * engine.runner.num_stages,
            num_ranks=engine.runner.num_ranks,
            max_inputs={} if inputs is None else dict(inputs.max_inputs),
            request_bytes=0 if inputs is None else inputs.request_bytes,
            input_files="" if inputs is None else str(inputs.files),
        )


@dataclass(frozen=True)
class RankStats:
    """A data rank after the engine's last step.

    Attributes:
      num_requests_running: Sequences in the rank's running batch.
      kv_cache_usage: Share of the rank's KV cache blocks in use, 0 to 1.
    """

    num_requests_running: int
    kv_cache_usage: float


@dataclass(frozen=True)
class EngineStats:
    """The engine after its last step; the queries, hits and preemptions count from its start.

    Attributes:
      num_requests_running: Sequences in the running batch.
      num_requests_waiting: Sequences that wait to be admitted, including preempted ones.
      kv_cache_usage: Share of the KV cache's blocks in use, 0 to 1.
      prefix_cache_queries: Prompt tokens looked up in the prefix cache.
      prefix_cache_hits: How many of those were found.
      num_preemptions: Times that a sequence lost its blocks to another.
      kv_tiers: What each tier of KV blocks beyond the devices has done, by its name.
      process_memory_bytes: Resident memory of the engine's process; 0 where the engine has no process of its own.
      drafts: What became of drafts; None if none are made.
      ranks: Each data rank's own; empty where there is one.
      places: Which adapters sequences have; None if it can have none.
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


@dataclass(frozen=True)
class Submission:
    """A request on its way to the engine.

    Attributes:
      request_id: Never used before.
      prompt: The prompt.
      params: How to sample and when to stop.
      priority: The lower value is served first.
      client: Whose request it is; see `LLMEngine.add_request`.
      final_only: Return everything in one output at the end.
      grammar: `params.structured_outputs`, compiled, with `params.thinking_token_budget`.
    """

    request_id: str
    prompt: TokenizedPrompt
    params: SamplingParams
    priority: int = 0
    client: str | None = None
    final_only: bool = False
    grammar: Grammar | None = None


class TokenDelta(NamedTuple):
    """The addition to a request with one completion that goes on, after its first output.

    Nearly every output is a TokenDelta, and a step may have a hundred of them: a server's throughput depends on their
    cost.

    Attributes:
      request_id: The request's.
      text: New text.
      token_ids: New tokens.
    """

    request_id: str
    text: str
    token_ids: list[int]


@dataclass(frozen=True)
class RequestState:
    """Where a request stands in the engine.

    Attributes:
      request_id: The request's.
      status: "waiting", "running" or "preempted": of its completions, the one that is furthest.
      num_prompt_tokens: Tokens of its prompt.
      num_cached_tokens: Those of them that the prefix cache held.
      num_computed_tokens: Tokens of prompt and completions whose keys and values are computed.
      num_generated_tokens: Tokens of its completions.
      first_scheduled_time: When its first step began, in seconds of `time.monotonic`; None before.
    """

    request_id: str
    status: Literal["waiting", "running", "preempted"]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    num_generated_tokens: int
    first_scheduled_time: float | None


def _named(adapters: Adapters) -> tuple[NamedAdapter, ...]:
    return tuple(
        NamedAdapter(name, source, digest, adapters.chat_template_of(source)) for name, source, digest in adapters.named
    )


@dataclass(frozen=True)
class NamedAdapter:
    """An adapter that requests ask for by name.

    Attributes:
      name: The name.
      source: Where it is kept.
      digest: What the engine knows it by.
      chat_template: Jinja source of the one that it brings; None: it has the model's.
    """

    name: str
    source: str
    digest: bytes
    chat_template: str | None = None


@dataclass(frozen=True)
class AdapterLoad:
    """What became of an adapter that was to be loaded.

    Attributes:
      call_id: Names the call.
      adapter: Its digest; b"" if it could not be loaded.
      error: Why it could not.
      chat_template: See `NamedAdapter`.
    """

    call_id: int
    adapter: bytes
    error: Exception | None = None
    chat_template: str | None = None


@dataclass(frozen=True)
class ChangeDone:
    """What became of an `EngineChange`.

    Attributes:
      call_id: Names the call.
      fingerprint: Of the engine now; see `EngineInfo`.
      version: Of its weights now.
      error: Why nothing was changed; None if it was.
    """

    call_id: int
    fingerprint: str
    version: str | int
    error: Exception | None = None


@dataclass(frozen=True)
class EngineOutputs:
    """The results of a step or a command.

    Attributes:
      outputs: The additions to requests, without their prompts; see `DeltaTracker.take`.
      deltas: The additions to requests where new text and tokens are all; see `DeltaTracker.take_tokens`.
      errors: (request id, error) for each request that failed.
      states: Of all requests, where `EngineClient.describe` asked for them.
      loads: Adapters of the model that were loaded, or could not be.
      changes: What became of changes of the engine.
    """

    outputs: list[RequestOutput] = field(default_factory=list)
    deltas: list[TokenDelta] = field(default_factory=list)
    errors: list[tuple[str, Exception]] = field(default_factory=list)
    states: list[RequestState] | None = None
    loads: list[AdapterLoad] = field(default_factory=list)
    changes: list[ChangeDone] = field(default_factory=list)


@dataclass(frozen=True)
class EngineCallbacks:
    """What an engine calls in the event loop.

    Attributes:
      deliver: With the outputs of a step: `EngineOutputs`, if the engine generates.
      interrupt: With an error, when every request was lost, and the engine is being started again.
      resume: When the engine has been started again.
      fail: With the error that ended the engine for good.
    """

    deliver: Callable[[Any], None]
    interrupt: Callable[[BaseException], None]
    resume: Callable[[], None]
    fail: Callable[[BaseException], None]


class WorkerClient(Protocol):
    """An engine of any kind as seen from an event loop.

    Attributes:
      info: Facts about the engine.
      tokenizer: The checkpoint's.
    """

    info: EngineInfo
    tokenizer: Tokenizer | None

    @property
    def stats(self) -> EngineStats:
        """The engine after a recent step."""
        ...

    def connect(self, loop: asyncio.AbstractEventLoop, callbacks: EngineCallbacks) -> None:
        """Starts delivering outputs. From here on, call the methods from the loop's thread only.

        Args:
          loop: Running.
          callbacks: Called in the loop.
        """
        ...

    def abort(self, request_id: str) -> None:
        """Ends a request if it is unfinished; what is delivered of it afterwards is the engine's to say."""
        ...

    def stop(self, timeout_seconds: float) -> bool:
        """Ends every request, and the engine's thread or process; returns whether that ended in time.

        May be called from another thread.
        """
        ...

    def is_making_progress(self, stall_seconds: float) -> bool:
        """Whether the engine is alive and, if it has work, has lately completed a step; see `EngineThread`."""
        ...


class EngineClient(WorkerClient, Protocol):
    """An engine that generates.

    Attributes:
      grammar_compiler: Compiles `structured_outputs`; may be used from other threads.
    """

    grammar_compiler: GrammarCompiler

    def add(self, submission: Submission) -> None:
        """Queues a request; if it cannot be honoured, its error is delivered."""
        ...

    def abort(self, request_id: str) -> None:
        """Ends a request if it is unfinished; its last output is delivered, with finish_reason "abort"."""
        ...

    def describe(self) -> None:
        """Has the states of all requests delivered."""
        ...

    def reset_prefix_cache(self) -> None:
        """Makes requests that are added from now on find nothing that was computed before."""
        ...

    def load_adapter(self, call_id: int, source: str) -> None:
        """Loads an adapter; a `AdapterLoad` with this id is delivered.

        Args:
          call_id: Any number.
          source: Where it is kept.
        """
        ...

    def unload_adapter(self, adapter: bytes) -> None:
        """Forgets an adapter once no request uses it."""
        ...

    def change(self, call_id: int, change: EngineChange) -> None:
        """Changes the engine between two steps; a `ChangeDone` with this id is delivered.

        Args:
          call_id: Any number.
          change: What to do.
        """
        ...
