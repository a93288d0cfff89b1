"""Verifies a model against the reference: its layers, logits, every path of the engine, and generated tokens."""

from __future__ import annotations

import dataclasses
import gc
import importlib.metadata
import platform
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from jaxis.bringup.verify.cause import CauseCode
from jaxis.bringup.verify.check_layers import LayersCheck, check_layers
from jaxis.bringup.verify.compare import GATES, Gates, LogitsComparison, VerifyDType, compare_logits
from jaxis.bringup.verify.golden import Golden, PromptLogits, checkpoint_hashes
from jaxis.bringup.verify.images import ImageAnswer, ImagesCheck, ask_about_image, check_images
from jaxis.bringup.verify.paths import PathCheck, check_paths
from jaxis.bringup.verify.recording import Recording
from jaxis.bringup.verify.reference import Reference, complete_config
from jaxis.bringup.verify.shrink import tiny_twin
from jaxis.bringup.verify.source import Source, find_source
from jaxis.config.hf_config import HFConfig
from jaxis.errors import ConfigError
from jaxis.host.extras import missing_module
from jaxis.llm import LLM
from jaxis.loading.open_checkpoint import TensorListing
from jaxis.models.common.text_part import TextPart
from jaxis.models.registry import model_class_of
from jaxis.sampling_params import SamplingParams
from jaxis.version import __version__

PROMPT_LENGTHS = (1, 17, 500)
LONGEST_REACH = 4608  # tokens; caps prompts longer than a window: the reference's scores are quadratic
TWIN_LAYERS_LENGTH, LAYERS_LENGTH = 96, 32  # tokens; the inputs and outputs of every module are held
PATHS_LENGTH, OTHER_LENGTHS = 90, (61, 33, 5)
DECODE_LENGTH, DECODE_TOKENS = 40, 24
PATHS_TOKENS = 8
LOGITS_BYTES = 2**27  # per prompt; of longer ones, evenly spaced rows are compared
TWIN_CACHE = "16MiB"


@dataclass(frozen=True)
class LogitsCheck:
    """One prompt's logits, computed at once, compared with the reference's."""

    prompt_length: int
    comparison: LogitsComparison
    passed: bool


@dataclass(frozen=True)
class DecodeCheck:
    """Greedy tokens compared with the reference's.

    Attributes:
      num_tokens: Tokens that each side generated.
      num_equal: Equal tokens before the first difference.
      margin: Reference's logit of its own token minus that of jaxis's token at the first difference; None if none
        differs. Up to twice the general difference of the logits, it is a tie.
      passed: True if all are equal, or the first difference is a tie. False if the logits failed: nothing is then
        generated, since with wrong logits anything would be a tie.
      skipped: Reason why nothing was generated; empty if it was.
    """

    prompt_length: int
    num_tokens: int
    num_equal: int
    margin: float | None
    passed: bool
    skipped: str = ""


PARTS = ("layers", "images", "logits", "paths", "decode")
"""Parts that `verify` checks, in this order."""
SCHEMA = 1
"""Version of the JSON that `VerifyResult.to_dict` gives; incremented when a field changes its meaning or is removed."""


FindingCode = Literal["wrong_module", "wrong_images", "wrong_logits", "wrong_paths", "wrong_decode"]


@dataclass(frozen=True)
class WrongPart:
    """A difference in a sentence, or a cause of one, with the module that has it; "" for a whole check."""

    code: CauseCode | FindingCode
    module: str
    message: str


@dataclass(frozen=True)
class VerifyResult:
    """Results of all checks.

    Attributes:
      reference: Name of the reference's precision and device, or the file that replaced it.
      images: None if stored logits replace the reference, or the model takes no images.
      logits, paths, decode: Results of the other parts; empty or None if `only` leaves them out.
      versions: Versions of the libraries that computed.
    """

    model: str
    architecture: str
    weights: str
    reference: str
    dtype: str
    gates: Gates
    layers: LayersCheck | None
    images: ImagesCheck | None
    logits: tuple[LogitsCheck, ...]
    paths: tuple[PathCheck, ...]
    decode: DecodeCheck | None
    versions: Mapping[str, str]
    hashes: Mapping[str, str]
    seconds: float

    @property
    def passed(self) -> bool:
        return not self.failing_checks

    @property
    def failing_checks(self) -> tuple[str, ...]:
        """The fields whose checks failed, in the order in which they run."""
        fields = {
            "layers": [self.layers],
            "images": [self.images],
            "logits": self.logits,
            "paths": self.paths,
            "decode": [self.decode],
        }
        failing = (any(check is not None and not check.passed for check in checks) for checks in fields.values())
        return tuple(name for name, fails in zip(fields, failing, strict=True) if fails)

    @property
    def findings(self) -> tuple[WrongPart, ...]:
        """The first wrong module, its causes, and the other checks that failed."""
        found = []
        if self.layers is not None and (divergence := self.layers.divergence) is not None:
            found.append(WrongPart("wrong_module", divergence.module, str(divergence)))
            found += [WrongPart(cause.code, divergence.module, cause.message) for cause in divergence.causes]
        codes: dict[str, FindingCode] = {
            **{"images": "wrong_images", "logits": "wrong_logits"},
            **{"paths": "wrong_paths", "decode": "wrong_decode"},
        }
        failing = [name for name in self.failing_checks if name in codes]
        return (*found, *(WrongPart(codes[name], "", f"the check of {name} failed") for name in failing))

    def notes(self) -> list[str]:
        """Describes differences that no figure shows, one line each."""
        notes = [] if self.layers is None else self.layers.notes()
        if self.failing_checks == ("layers",) and self.logits:
            notes.append(
                "logits agree: jaxis computes the same with other module borders; give its modules the reference's, so "
                "that each can be compared"
            )
        return notes

    def to_dict(self) -> dict[str, Any]:
        """Returns the result as JSON values, described in docs/bring-up.md."""
        found = {
            "schema": SCHEMA,
            "status": "verified" if self.passed else "differs",
            "passed": self.passed,
            "failing_checks": list(self.failing_checks),
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "notes": self.notes(),
            **dataclasses.asdict(self),
        }
        if self.layers is not None:
            found["layers"]["passed"] = self.layers.passed
        return found


def verify(
    model: str,
    *,
    dtype: VerifyDType = "float32",
    prompt_lengths: Sequence[int] = (),
    golden: Path | None = None,
    save_golden: Path | None = None,
    revision: str | None = None,
    only: Collection[str] = (),
    on_stage: Callable[[str], None] = lambda _: None,
) -> VerifyResult:
    """Compares a model with the reference; without weights, its tiny twin.

    Args:
      model: A folder, a config.json, or a Hub id.
      dtype: Type in which jaxis computes, "float32" or "bfloat16".
      prompt_lengths: Lengths of the prompts to compare; empty means PROMPT_LENGTHS and one longer than any window.
      golden: A file of the reference's logits to use instead of running it, so that torch is not needed.
      save_golden: Path of such a file to write.
      revision: Branch, tag or commit on the hub.
      only: Some of PARTS; empty means all that the model has. "decode" includes "logits", by which ties are told.
      on_stage: Called with a short description of each stage as it begins.

    Raises:
      ConfigError: An argument cannot be honoured, jaxis or transformers does not know the model, libraries are missing,
        or memory is too small for the reference.
      CheckpointError: The checkpoint or the stored logits cannot be read, or do not belong together.
    """
    start = time.monotonic()
    if dtype not in GATES:
        raise ConfigError(f"dtype={dtype!r} must be one of {', '.join(GATES)}")
    parts = _parts(only, golden)
    source = find_source(model, revision=revision)
    if source.folder is None and (golden is not None or save_golden is not None):
        raise ConfigError(f"{model} has no weights, and stored logits are those of weights: give a checkpoint's folder")
    model_class_of(HFConfig(source.config))  # before anything that takes time
    if "images" in parts and (golden is not None or not _sees(source)):
        if "images" in only:
            raise ConfigError(f"{model} has no images to check: that needs weights of a vision tower, and Pillow")
        parts.remove("images")
    hashes = {} if source.folder is None else checkpoint_hashes(source.folder)
    with ExitStack() as stack:
        if golden is not None:
            answers = Golden.load(golden)
            answers.check_made_from(hashes, golden)
            assert source.folder is not None
            asked = _Asked(source.folder, source.config, f"logits of {golden}", answers.versions, answers)
        else:
            on_stage("running the reference")
            asks = parts | {"logits"} if save_golden is not None else parts
            asked = _ask_reference(source, stack, asks, prompt_lengths, hashes)
            gc.collect()  # frees the reference's memory
            if save_golden is not None and asked.answers is not None:
                asked.answers.save(save_golden)
        on_stage("loading")
        cache = TWIN_CACHE if source.folder is None else None
        folder = asked.folder
        llm = stack.enter_context(LLM(folder, dtype=dtype, kv_cache_memory=cache, max_num_seqs=8, show_progress=False))
        checks = _run_checks(llm, asked, parts, GATES[dtype], on_stage)
    return VerifyResult(
        model=model,
        architecture=str((source.config.get("architectures") or ["unknown"])[0]),
        weights="tiny twin" if source.folder is None else "checkpoint",
        reference=asked.how,
        dtype=dtype,
        gates=GATES[dtype],
        **checks,
        versions={**_versions(), **asked.versions},
        hashes=hashes,
        seconds=time.monotonic() - start,
    )


def _parts(only: Collection[str], golden: Path | None) -> set[str]:
    for part in only:
        if part not in PARTS:
            raise ConfigError(f"only={part!r} must be of {', '.join(PARTS)}")
    if golden is not None and {"layers", "images"} & set(only):
        raise ConfigError("layers and images need the reference, and stored logits replace it: leave golden out")
    return {*(only or PARTS), *(["logits"] if "decode" in only else ())}


@dataclass(frozen=True)
class _Asked:
    """Answers of the reference, and the folder and config.json of the model that they are of."""

    folder: Path
    config: Mapping[str, Any]
    how: str
    versions: Mapping[str, str]
    answers: Golden | None = None
    layers_prompt: Sequence[int] = ()
    recording: Recording | None = None
    image_answer: ImageAnswer | None = None


def _ask_reference(
    source: Source, stack: ExitStack, parts: Collection[str], lengths: Sequence[int], hashes: Mapping[str, str]
) -> _Asked:
    reference, folder, config = _reference(source, stack)
    answers = recording = image_answer = None
    layers_prompt = _prompt(config, TWIN_LAYERS_LENGTH if source.folder is None else LAYERS_LENGTH)
    if "logits" in parts:
        answers = _ask(reference, config, _prompt_lengths(config, lengths), hashes)
    if "layers" in parts:
        recording = reference.record(layers_prompt)
    if "images" in parts:
        image_answer = ask_about_image(reference, folder, config)
    return _Asked(folder, config, reference.how, reference.versions, answers, layers_prompt, recording, image_answer)


def _run_checks(
    llm: LLM, asked: _Asked, parts: Collection[str], gates: Gates, on_stage: Callable[[str], None]
) -> dict[str, Any]:
    """Runs the checks in `parts`; returns the `VerifyResult` fields of all PARTS, of which others are None or ()."""
    found: dict[str, Any] = {"layers": None, "images": None, "logits": (), "paths": (), "decode": None}
    if asked.recording is not None:
        on_stage("comparing layers")
        runner = llm.engine.runner
        with jax.set_mesh(runner.executor.stages[-1].context.mesh):
            found["layers"] = check_layers(runner.model, asked.layers_prompt, asked.recording, gates)
    if asked.image_answer is not None:
        on_stage("comparing what it sees")
        found["images"] = check_images(llm, asked.image_answer, gates)
    if asked.answers is not None and "logits" in parts:
        on_stage("comparing logits")
        found["logits"] = tuple(_check_logits(llm, asked.answers, gates))
    if "paths" in parts:
        on_stage("comparing paths")
        longest, vocab_size = llm.max_model_len - PATHS_TOKENS, _text(asked.config)["vocab_size"]
        others = [_random_tokens(vocab_size, length) for length in OTHER_LENGTHS]
        prompt = _random_tokens(vocab_size, min(PATHS_LENGTH, longest))
        found["paths"] = tuple(check_paths(llm, prompt, others, PATHS_TOKENS, gates))
    if asked.answers is not None and "decode" in parts:
        on_stage("comparing what is generated")
        found["decode"] = _check_decode(llm, asked.answers, found["logits"])
    return found


def _sees(source: Source) -> bool:
    """Returns whether the checkpoint has a vision tower that is loaded, which needs Pillow."""
    model_class = model_class_of(HFConfig(source.config))
    tower = model_class.tower if issubclass(model_class, TextPart) else None
    if tower is None or source.folder is None or missing_module("vision") is not None:
        return False
    return any(map(tower.has_tensor, TensorListing(source.folder)))


def _reference(source: Source, stack: ExitStack) -> tuple[Reference, Path, Mapping[str, Any]]:
    """Returns the reference, the folder for jaxis to load, and its config.json."""
    if source.folder is not None:
        return Reference.from_folder(source.folder), source.folder, source.config
    twin = tiny_twin(source.config, complete_config(source.config))
    reference = Reference.random(twin)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jaxis_twin_")))
    reference.save(folder, twin)
    return reference, folder, twin


def _ask(reference: Reference, config: Mapping[str, Any], lengths: Sequence[int], hashes: Mapping[str, str]) -> Golden:
    prompts = []
    for length in lengths:
        token_ids = _prompt(config, length)
        rows = _compared_rows(length, _text(config)["vocab_size"])
        prompts.append(PromptLogits(np.asarray(token_ids, np.int32), rows, reference.logits(token_ids, rows)))
    decode_prompt = _prompt(config, DECODE_LENGTH)
    continuation = reference.generate(decode_prompt, DECODE_TOKENS)
    return Golden(
        prompts=tuple(prompts),
        decode_prompt=np.asarray(decode_prompt, np.int32),
        continuation=np.asarray(continuation.token_ids, np.int32),
        continuation_logits=continuation.logits,
        versions=reference.versions,
        hashes=hashes,
    )


def _check_logits(llm: LLM, answers: Golden, gates: Gates) -> list[LogitsCheck]:
    checks = []
    for prompt in answers.prompts:
        # Not limited by the engine's max_model_len, which a RoPE that changes with length can make short.
        actual = llm.engine.runner.whole_logits(prompt.token_ids.tolist(), prompt.rows)
        comparison = compare_logits(actual, prompt.logits)
        checks.append(LogitsCheck(len(prompt.token_ids), comparison, comparison.passes(gates)))
    return checks


def _check_decode(llm: LLM, answers: Golden, logits: Sequence[LogitsCheck]) -> DecodeCheck:
    expected = answers.continuation.tolist()
    if not all(check.passed for check in logits):
        return DecodeCheck(len(answers.decode_prompt), len(expected), 0, None, False, skipped="logits failed")
    tolerance = 2 * max(check.comparison.max_abs_difference for check in logits)
    params = SamplingParams(temperature=0.0, max_tokens=len(expected), ignore_eos=True)
    [output] = llm.generate([answers.decode_prompt.tolist()], params, progress=False)
    tokens = output.outputs[0].token_ids
    num_equal = next(
        (i for i, pair in enumerate(zip(tokens, expected, strict=True)) if pair[0] != pair[1]), len(expected)
    )
    margin = None
    if num_equal < len(expected):
        logits = answers.continuation_logits[num_equal]
        margin = float(logits[expected[num_equal]] - logits[tokens[num_equal]])
    passed = margin is None or margin <= tolerance
    return DecodeCheck(len(answers.decode_prompt), len(expected), num_equal, margin, passed)


def _prompt_lengths(config: Mapping[str, Any], wanted: Sequence[int]) -> list[int]:
    text = _text(config)
    most = text.get("max_position_embeddings") or max(PROMPT_LENGTHS)
    if wanted:
        return sorted(set(wanted))
    reaches = [text.get(key) for key in ("sliding_window", "attention_chunk_size")]
    past = [reach + 16 for reach in reaches if isinstance(reach, int) and reach <= LONGEST_REACH]
    lengths = {*PROMPT_LENGTHS, *(length for length in past if length > max(PROMPT_LENGTHS))}
    return sorted(length for length in lengths if length <= max(most, max(PROMPT_LENGTHS)))


def _compared_rows(length: int, vocab_size: int) -> np.ndarray:
    most = max(LOGITS_BYTES // (4 * vocab_size), 1)
    return np.unique(np.linspace(0, length - 1, min(length, most)).round().astype(np.int32))


def _prompt(config: Mapping[str, Any], length: int) -> list[int]:
    return _random_tokens(_text(config)["vocab_size"], length)


def _random_tokens(vocab_size: int, length: int) -> list[int]:
    return np.random.default_rng([0, length]).integers(0, vocab_size, length).tolist()


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("text_config") or config


def _versions() -> dict[str, str]:
    versions = {name: importlib.metadata.version(name) for name in ("jax", "flax", "numpy")}
    return {"jaxis": __version__, "python": platform.python_version(), **versions}
