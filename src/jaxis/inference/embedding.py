"""Implementation of `jaxis embed`: vectors of a file's texts, as JSONL or as one array."""

from __future__ import annotations

import base64
import functools
import io
import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxis.engine.arguments import EngineArgs
from jaxis.engine.client.engine_client import GENERATION
from jaxis.engine.opened_model import open_model
from jaxis.errors import ConfigError, RequestError
from jaxis.host.progress import ProgressDisplay
from jaxis.inference.journal import RowResult, run_key, scratch_files, scratch_path
from jaxis.inference.run import Answered, RunSummary, model_identity, run_to_output
from jaxis.jsonl.source import JSONLSource, Row
from jaxis.pooling.embedder import Embedder, open_embedder
from jaxis.pooling.inputs import PoolingInput
from jaxis.prompts import Prompt
from jaxis.runners import Runner, check_runner, kind_of_checkpoint

TEXT_KEYS = ("text", "input")
_ANSWER_KEY = "embedding"
# Number of steps whose results are saved together, and lost if the process is killed before that.
_STEPS_KEPT_TOGETHER = 4
# Parts of a run's key, in order.
_KEY_PARTS = ("input", "model or its options", "prompt_name, truncate_prompt_tokens or dimensions")


@dataclass(frozen=True)
class EmbedOptions:
    """Options for reading texts and cutting vectors.

    Attributes:
      prompt_name: Kind of the texts, such as "query", for which the checkpoint has a prompt; None: the checkpoint's
        default.
      truncate_prompt_tokens: Number of tokens to keep of a longer text; -1 is as many as the model takes; None: a
        longer text is an error.
      dimensions: Size that vectors are cut to, for models trained for it; None: no cut.
    """

    prompt_name: str | None = None
    truncate_prompt_tokens: int | None = None
    dimensions: int | None = None


def open_texts(path: Path, output: Path | BinaryIO) -> JSONLSource:
    """Opens a JSONL file of strings, or of objects with a `text` or `input`, and checks that each row has one.

    Raises ConfigError if the file cannot be read, or is also the output, and RequestError, with file and line, if a row
    is broken.
    """
    source = JSONLSource(path, None, output=output, string_key=TEXT_KEYS[0])
    for row in source.rows(lambda _: True):
        _text(row, path)
    return source


def embed_file(
    model: str,
    arguments: Mapping[str, Any],
    source: JSONLSource,
    output: Path | BinaryIO,
    options: EmbedOptions,
    *,
    runner: Runner = "auto",
    display: ProgressDisplay,
) -> RunSummary:
    """Writes the vector of each text, resuming where an earlier process stopped.

    A file whose name ends in .npy gets one array float32 [rows, E]. Any other output gets the rows of the input, with
    `embedding` in place of the text.

    The output file appears complete at the end. The source is from `open_texts`. The runner "pooling" also accepts a
    model that was made to generate text.

    Raises:
      ConfigError: An unfinished run with the same output had another input, model or options; or opening the model
        fails.
      RequestError: An input is empty or too long, or an option cannot be honoured; nothing was computed.
      CheckpointError, EngineError: The model cannot be loaded, as in `LLM`.
    """
    check_runner(runner)
    args = EngineArgs(model=model, **arguments)
    opened = open_model(args)
    if kind_of_checkpoint(opened.path, opened.hf_config, runner) is GENERATION:
        raise ConfigError(f"{model} was made to generate text: --runner pooling makes vectors with it")
    parts = (
        source.digest,
        model_identity(opened.path, arguments),
        [options.prompt_name, options.truncate_prompt_tokens, options.dimensions],
    )
    key = "-".join(run_key("embed", part) for part in parts)
    if isinstance(output, Path):
        _refuse_other_runs(output, key)
    embedder = open_embedder(args, opened, display)
    try:
        if embedder.classifier is not None:
            raise RequestError(f"{model} makes scores and no vectors")
        embedder.dimensions.check(options.dimensions)
        read = functools.partial(_read, embedder, options, source.path)
        for row in source.rows(lambda _: True):
            read(row)
        as_array = isinstance(output, Path) and output.suffix == ".npy"
        size = options.dimensions or embedder.dimensions.size
        return run_to_output(
            functools.partial(_embed_rows, embedder, read, options.dimensions, _packed if as_array else _listed),
            source,
            output,
            key,
            display=display,
            progress_path=None,
            formatted=functools.partial(_npy_file, source.num_rows, size) if as_array else None,
        )
    finally:
        embedder.close()


def _embed_rows(
    embedder: Embedder,
    read: Callable[[Row], PoolingInput],
    dimensions: int | None,
    answer: Callable[[Row, np.ndarray], dict[str, Any]],
    rows: Iterator[Row],
) -> Generator[Answered, None, None]:
    for group in _groups(((row, read(row)) for row in rows), embedder):
        vectors = embedder.dimensions.cut(embedder.compute([text for _, text in group]), dimensions)
        results = [
            RowResult(row.index, "completed", answer(row, vector))
            for (row, _), vector in zip(group, vectors, strict=True)
        ]
        yield Answered(results, sum(len(text.token_ids) for _, text in group))


def _groups(rows: Iterable[tuple[Row, PoolingInput]], embedder: Embedder) -> Iterator[list[tuple[Row, PoolingInput]]]:
    """Yields rows for a few steps at a time; each step then combines texts of similar length."""
    max_tokens = _STEPS_KEPT_TOGETHER * embedder.model.max_step_tokens
    max_rows = _STEPS_KEPT_TOGETHER * embedder.model.max_step_texts
    group: list[tuple[Row, PoolingInput]] = []
    num_tokens = 0
    for row, text in rows:
        if group and (num_tokens + len(text.token_ids) > max_tokens or len(group) == max_rows):
            yield group
            group, num_tokens = [], 0
        group.append((row, text))
        num_tokens += len(text.token_ids)
    if group:
        yield group


def _read(embedder: Embedder, options: EmbedOptions, path: Path, row: Row) -> PoolingInput:
    [read] = embedder.reader.read(
        [_text(row, path)],
        truncate_tokens=options.truncate_prompt_tokens,
        kind=options.prompt_name,
        name=lambda _: _place(row, path),
    )
    return read


def _text(row: Row, path: Path) -> Prompt:
    where = _place(row, path)
    if row.error is not None:
        raise RequestError(f"{path}, {row.error}: correct it")
    given = [key for key in TEXT_KEYS if key in row.value]
    if len(given) != 1:
        raise RequestError(f'{where} needs either "text" or "input": correct it')
    if _ANSWER_KEY in row.value:
        raise RequestError(f'{where} already has "{_ANSWER_KEY}", which is the name of the answer: rename it')
    text = row.value[given[0]]
    if isinstance(text, str) or (isinstance(text, list) and all(type(token_id) is int for token_id in text)):
        return text
    raise RequestError(f'{where} has no string, and no list of token ids, as its "{given[0]}": correct it')


def _place(row: Row, path: Path) -> str:
    return f"{path}, line {row.line},"


def _listed(row: Row, vector: np.ndarray) -> dict[str, Any]:
    kept = {key: value for key, value in row.value.items() if key not in TEXT_KEYS}
    return {**kept, _ANSWER_KEY: vector.tolist()}


def _packed(_row: Row, vector: np.ndarray) -> dict[str, Any]:
    return {_ANSWER_KEY: base64.b64encode(vector.astype("<f4").tobytes()).decode()}


def _npy_file(num_rows: int, size: int, lines: Iterator[bytes]) -> Iterator[bytes]:
    """Yields the bytes of an .npy file of an array float32 [num_rows, size], row by row."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (num_rows, size)})
    yield header.getvalue()
    for line in lines:
        yield base64.b64decode(json.loads(line)[_ANSWER_KEY])


def _refuse_other_runs(output: Path, key: str) -> None:
    """Raises ConfigError if an unfinished run with this output had another key. Its rows are kept, but not used."""
    for path in scratch_files(output):
        if path == scratch_path(output, key):
            continue
        theirs = path.name.removeprefix(f"{output.name}.").removesuffix(".scratch").split("-")
        ours = key.split("-")
        changed = [name for name, a, b in zip(_KEY_PARTS, theirs, ours, strict=False) if a != b]
        raise ConfigError(
            f"{path} holds the finished rows of a run towards {output} with another {', another '.join(changed)}: "
            "finish that run as it was started, remove the file, or give another output"
        )
