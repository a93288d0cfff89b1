"""Writes the chat template of a checkpoint, and the token that ends its answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxis.host.json_object import read_json_object
from jaxis.loading.open_checkpoint import read_generation_defaults
from jaxis.tokenizer.template_choice import answer_end_token_ids, read_tokenizer

GENERATION_CONFIG = "generation_config.json"


def write_template(folder: Path, template: str | None = None) -> None:
    """Writes the chat template that a model was trained with, and declares its end token in the config files.

    None means the template in the folder, of a model or of an adapter, which has no config files.
    """
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    if not (folder / "config.json").exists():
        return
    tokenizer = read_tokenizer(folder, template)
    ends = answer_end_token_ids(tokenizer)
    config = read_json_object(folder / "config.json")
    sections = [config, *(section for section in [config.get("text_config")] if isinstance(section, dict))]
    said = [read_generation_defaults(folder), *sections, {"eos_token_id": tokenizer and tokenizer.eos_token_id}]
    before = next((each["eos_token_id"] for each in said if each.get("eos_token_id") is not None), [])
    known = before if isinstance(before, list) else [before]
    if ends <= set(known):
        return
    ids = [*known, *sorted(ends - set(known))]
    for section in sections:
        if section is config or "eos_token_id" in section:
            section["eos_token_id"] = ids
    _write(folder / "config.json", config)
    path = folder / GENERATION_CONFIG
    _write(path, (read_json_object(path) if path.exists() else {}) | {"eos_token_id": ids})


def _write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
