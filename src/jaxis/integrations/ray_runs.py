"""Runs of `jaxis infer` and `jaxis run-batch` on several replicas, with the same rows and journal as on one."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from jaxis.engine.arguments import EngineArgs
from jaxis.engine.engine import LLMEngine
from jaxis.engine.model_params import to_llm_arguments
from jaxis.engine.opened_model import open_model
from jaxis.engine.vllm_arguments import translate
from jaxis.host.progress import ProgressDisplay
from jaxis.inference.engine import conversations_key, identity_of
from jaxis.inference.inference_config import InferenceConfig
from jaxis.inference.journal import run_key
from jaxis.inference.openai_batch import BatchTask, served_model
from jaxis.inference.run import RowTask, RunSummary, model_identity, run_to_output
from jaxis.integrations.ray_data import OpenTask, answer_on_replicas, open_conversations
from jaxis.integrations.ray_replicas import use_reserved_cpus
from jaxis.jsonl.source import RowSource
from jaxis.llm import LLM


def run_conversations(
    config: InferenceConfig, num_replicas: int, source: RowSource, output: Path | BinaryIO, progress_path: Path | None
) -> RunSummary:
    """Answers a source's conversations, as `JAXInferenceEngine.run` does.

    Raises:
      ConfigError, CheckpointError: The model or a parameter cannot be honoured, or the cluster is too small.
      EngineError: A replica fails for every row.
    """
    args = _arguments(config.model.model_name, to_llm_arguments(config.model), config.model.model_revision)
    identity = identity_of(config.model, open_model(args).path)
    key = conversations_key(identity, config.generation, source)
    open_task = functools.partial(open_conversations, config.model, config.generation, key)
    return _run(open_task, args, num_replicas, source, output, key, progress_path)


def run_requests(
    model: str | None,
    arguments: Mapping[str, Any],
    names: Sequence[str],
    parsers: tuple[str, str],
    num_replicas: int,
    source: RowSource,
    output: Path | BinaryIO,
    progress_path: Path | None,
) -> RunSummary:
    """Answers a source's requests, as `jaxis run-batch` does.

    Args:
      model: Folder or Hub id; None: the embedded model.
      arguments: Arguments of `LLM`.
      names: Names of the model in requests.
      parsers: Names of the parsers of tool calls and of reasoning.
      num_replicas: Number of engines that share the rows.
      source: The requests.
      output: Destination of the responses.
      progress_path: A file for the progress.

    Raises:
      ConfigError, CheckpointError: The model or an argument cannot be honoured, or the cluster is too small.
      EngineError: A replica fails for every row.
    """
    args = _arguments(model, arguments)
    key = run_key("requests", model_identity(open_model(args).path, arguments), [*names, *parsers], source.digest)
    open_task = functools.partial(_open_requests, model, dict(arguments), names, parsers, key)
    return _run(open_task, args, num_replicas, source, output, key, progress_path)


def _open_requests(
    model: str | None, arguments: dict[str, Any], names: Sequence[str], parsers: tuple[str, str], key: str
) -> tuple[LLMEngine, RowTask]:
    use_reserved_cpus()
    llm = LLM(model, show_progress=False, **arguments)
    return llm.engine, BatchTask(served_model(llm, names, *parsers), key)


def _arguments(model: str | None, arguments: Mapping[str, Any], revision: str | None = None) -> EngineArgs:
    given = translate(model, {"revision": revision, **arguments}).arguments
    return EngineArgs(model=model, **given)


def _run(
    open_task: OpenTask,
    args: EngineArgs,
    num_replicas: int,
    source: RowSource,
    output: Path | BinaryIO,
    key: str,
    progress_path: Path | None,
) -> RunSummary:
    answers = functools.partial(answer_on_replicas, open_task, num_replicas, args.tensor_parallel_size, source.num_rows)
    return run_to_output(answers, source, output, key, display=ProgressDisplay(), progress_path=progress_path)
