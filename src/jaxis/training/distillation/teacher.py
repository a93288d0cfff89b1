from __future__ import annotations

import dataclasses

import jax

from jaxis.errors import CheckpointError, ConfigError
from jaxis.host.byte_size import human_bytes
from jaxis.host.machine import free_host_bytes
from jaxis.host.progress import ProgressDisplay
from jaxis.layers.attention_metadata import ScratchCache
from jaxis.training.base_model import BaseModel, open_base_model
from jaxis.training.config import ENGINE, TrainConfig
from jaxis.training.forward_pass import BLOCK_SIZE
from jaxis.training.functional_model import FunctionalModel, Values, bytes_of, values_of
from jaxis.training.objectives import Forward, make_forward

_KEY = "training.distillation.teacher_model_name_or_path"


def open_teacher(config: TrainConfig, student: BaseModel) -> BaseModel | None:
    """Finds the teacher and reads all its files except the weights; None: the student itself is the teacher.

    Raises ConfigError if there is no such model, it has another vocabulary, or its weights do not fit into memory.
    """
    params = config.training.distillation
    if params.teacher_model_name_or_path is None:
        return None
    name = params.teacher_model_name_or_path
    if config.fsdp.enable_fsdp:
        raise ConfigError(f"fsdp.enable_fsdp cannot be honoured with {_KEY}: leave one of them out")
    model = dataclasses.replace(
        config.model,
        **{"model_name": name, "model_revision": params.teacher_model_revision, "model_max_length": None},
        **{"model_kwargs": {}, "load_pretrained_weights": True, "chat_template": None, "chat_template_kwargs": None},
    )
    try:
        teacher = open_base_model(dataclasses.replace(config, model=model))
    except (ConfigError, CheckpointError) as error:
        raise ConfigError(f"{_KEY}={name!r}: {error}") from None
    teacher = dataclasses.replace(teacher, quantization=None)
    _check_vocabulary(teacher, student)
    needed = bytes_of(values_of(teacher.abstract()))
    there = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit") or free_host_bytes()
    if needed > there:
        raise ConfigError(
            f"{_KEY}={name!r} needs {human_bytes(needed)} for its weights, and {human_bytes(there)} are free: give a "
            "smaller teacher, or a quantized one"
        )
    return teacher


def load_teacher(config: TrainConfig, teacher: BaseModel, progress: ProgressDisplay) -> tuple[Forward, Values]:
    """Loads the teacher; returns its forward pass, of the same kind as the student's, and its weights."""
    is_engine = config.training.forward_pass == ENGINE
    model = teacher.load(teacher.compute_dtype, progress, packed=is_engine)
    functional = FunctionalModel(model)
    scratch = ScratchCache(BLOCK_SIZE, jax.numpy.dtype(teacher.compute_dtype)) if is_engine else None
    return make_forward(functional, lambda values, _: functional.bind(values), scratch=scratch), values_of(model)


def vocabulary_size(model: BaseModel) -> int:
    """Returns the number of a model's logits; some, at the end, may belong to no token."""
    return int(model.hf_config.get_text_config().get("vocab_size") or len(model.tokenizer.vocabulary))


def _check_vocabulary(teacher: BaseModel, student: BaseModel) -> None:
    """Raises ConfigError unless every token has the same id for both, and a logit of both."""
    ours, theirs = student.tokenizer.vocabulary, teacher.tokenizer.vocabulary
    if ours != theirs:
        token = min(token for token, _ in ours.items() ^ theirs.items())
        raise ConfigError(
            f"{_KEY}={teacher.name!r} has another vocabulary than {student.name}: the id of token {token!r} is "
            f"{theirs.get(token)} for the teacher, and {ours.get(token)} for the student: give a teacher with the "
            "student's tokenizer"
        )
    sizes = vocabulary_size(student), vocabulary_size(teacher)
    if sizes[0] != sizes[1] and min(sizes) <= max(ours.values()):
        raise ConfigError(
            f"{_KEY}={teacher.name!r} has {sizes[1]} logits, and {student.name} {sizes[0]}, of a tokenizer with ids up "
            f"to {max(ours.values())}: give a teacher with a logit for each token"
        )
