"""A chat template that the user chooses: one of those that jaxis brings, a file, or Jinja source.

Base models have no template, and some instruction-tuned checkpoints lost theirs on the way.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxis.errors import ConfigError, RequestError
from jaxis.tokenizer.chat_messages import with_template_arguments
from jaxis.tokenizer.chat_template import render_chat_template
from jaxis.tokenizer.config import DEFAULT_TEMPLATE, TEMPLATES, TokenizerConfig
from jaxis.tokenizer.template_process import TemplateSyntaxError
from jaxis.tokenizer.tokenizer import Tokenizer

MAX_TEMPLATE_BYTES = 1 << 20
_PROBE_ANSWER = "jaxis-turn-end-probe"
_PROBES = ("jaxis-reasoning-probe", _PROBE_ANSWER, "jaxis_probe_call_1", "jaxis_probe_call_2")
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")  # names of reasoning in chat templates


def template_names() -> list[str]:
    return sorted(path.stem for path in TEMPLATES.glob("*.jinja"))


def read_tokenizer(
    path: Path,
    chat_template: str | os.PathLike[str] | None = None,
    adapter: str | os.PathLike[str] | None = None,
) -> Tokenizer | None:
    """Reads a checkpoint's tokenizer, with another chat template in place of its own.

    The template is the user's, see `chat_template_source`, or that of the adapter, whose folder is merged into the
    checkpoint, or the checkpoint's.

    Raises:
      CheckpointError: A file is broken, or the tokenizer is not supported.
      ConfigError: The template cannot be read, or there is no tokenizer to use it with.
    """
    tokenizer = Tokenizer.from_path(path)
    if chat_template is None and adapter is not None:
        chat_template = adapter_template(Path(adapter))
    if chat_template is None:
        return tokenizer
    if tokenizer is None:
        raise ConfigError(f"chat_template: {path.name} has no tokenizer, so it can have no chat template: leave it out")
    return with_template(tokenizer, chat_template_source(chat_template, tokenizer.chat_templates))


def with_template(tokenizer: Tokenizer, source: str) -> Tokenizer:
    changed = copy.copy(tokenizer)
    changed.chat_templates = {DEFAULT_TEMPLATE: source}
    return changed


def adapter_template(folder: Path) -> str | None:
    """Returns the chat template in an adapter's folder; None if it has none.

    Raises CheckpointError if a file is invalid, and ConfigError if the template is not Jinja.
    """
    source = TokenizerConfig.from_folder(folder).chat_templates.get(DEFAULT_TEMPLATE)
    if source is not None:
        _check_syntax(source, f"the chat template in {folder}")
    return source


def chat_template_source(asked: str | os.PathLike[str], own: Mapping[str, str] | None = None) -> str:
    """Returns the Jinja source of a template.

    `asked` is the name of one of the checkpoint's own templates or of one that jaxis brings, the path of a file, or
    source. Raises ConfigError if there is no such template, its file cannot be read, or it is not Jinja.
    """
    text = os.fspath(asked)
    own = own or {}
    if "{{" in text or "{%" in text:
        source, where = text, "chat_template"
    elif text in own:
        source, where = own[text], f"chat_template {text}"
    elif text in template_names():
        source, where = (TEMPLATES / f"{text}.jinja").read_text(encoding="utf-8"), f"chat_template {text}"
    else:
        path = Path(text).expanduser()
        if not path.is_file():  # not a pipe or a device, which may never end
            names = ", ".join([*own, *template_names()])
            raise ConfigError(f"chat_template={text!r} is neither a file nor a template's name: choose from {names}")
        source, where = _read(path), f"chat_template {text}"
    _check_syntax(source, where)
    return source


def answer_end_token_ids(tokenizer: Tokenizer | None) -> frozenset[int]:
    """Returns the token that ends answers in the default template, if there is one and it does nothing else.

    A template may also write it within an answer, between reasoning, text and calls: other tokens then end the answer.
    """
    if tokenizer is None or not tokenizer.has_chat_template or (end := turn_end_token_id(tokenizer)) is None:
        return frozenset()
    source = tokenizer.choose_chat_template(None, None)
    for answer in _probe_answers():
        messages = with_template_arguments([{"role": "user", "content": "a"}, {"role": "assistant", **answer}], source)
        try:
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
        except RequestError:
            continue
        found = [place for mark in _PROBES if (place := text.find(mark)) >= 0]
        within = text[min(found, default=0) : max(found, default=0)]
        if end in tokenizer.encode(within, add_special_tokens=False):
            return frozenset()
    return frozenset({end})


def _probe_answers() -> Iterator[dict[str, Any]]:
    """Yields answers of all kinds; a template may refuse some of them."""
    calls = [
        {"type": "function", "id": f"jaxisid0{name[-1]}", "function": {"name": name, "arguments": {"a": "b"}}}
        for name in _PROBES[2:]
    ]
    reasoning = dict.fromkeys(_REASONING_KEYS, _PROBES[0])
    yield {**reasoning, "content": _PROBE_ANSWER}
    for count in (1, 2):
        yield {"content": _PROBE_ANSWER, "tool_calls": calls[:count]}
        yield {**reasoning, "content": "", "tool_calls": calls[:count]}


def turn_end_token_id(tokenizer: Tokenizer) -> int | None:
    """Returns the special token that ends an answer in the default template; None if text ends it.

    A base model's own end-of-sequence token is often another one: with ChatML, Qwen's base models end a turn by
    `<|im_end|>` and a document by `<|endoftext|>`.
    """
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _PROBE_ANSWER}]
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    except RequestError:
        return None
    _, _, after = text.rpartition(_PROBE_ANSWER)
    ids = tokenizer.encode(after.strip(), add_special_tokens=False)
    return ids[0] if ids and ids[0] in tokenizer.special_token_ids else None


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TEMPLATE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"chat_template: {path} cannot be read: {error.strerror}") from None
    if len(data) > MAX_TEMPLATE_BYTES:
        raise ConfigError(f"chat_template: {path} has more than {MAX_TEMPLATE_BYTES >> 20} MiB: give a Jinja template")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"chat_template: {path} is not UTF-8 text: give a Jinja template") from None


def _check_syntax(source: str, where: str) -> None:
    if not source.strip():
        raise ConfigError(f"{where} is empty: give a Jinja template")
    try:
        render_chat_template(source, [{"role": "user", "content": "a"}])
    except TemplateSyntaxError as error:
        raise ConfigError(f"{where}: {error}") from None
    except RequestError:
        pass  # it may refuse this conversation only
