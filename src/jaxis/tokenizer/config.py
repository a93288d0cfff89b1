"""A checkpoint's tokenizer settings in tokenizer_config.json and the files beside it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from jaxis.errors import CheckpointError
from jaxis.host.json_object import MAX_JSON_BYTES
from jaxis.loading.git_lfs import check_not_lfs_pointer

DEFAULT_TEMPLATE = "default"
TEMPLATES = Path(__file__).parent.parent / "assets" / "chat_templates"
"""Folder of the chat templates that jaxis brings."""
# `model_type` in config.json -> name of the template of a model whose checkpoint brings a program instead.
_TEMPLATE_OF_MODEL = {"deepseek_v4": "deepseek-v4", "deepseek_v41": "deepseek-v4.1", "kimi_k3": "kimi-k3"}
MAX_TEMPLATE_BYTES = 1 << 20  # the longest published ones have some 50 KB
ADDED_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True)
class TokenizerConfig:
    """A checkpoint's tokenizer settings other than tokenizer.json.

    Attributes:
      special_tokens: Name, such as "bos_token" -> the token; chat templates see the strings under these names.
      extra_special_tokens: Special tokens without a name.
      added_tokens: Id -> token of `added_tokens_decoder`, by rising ids; their flags override tokenizer.json's.
      chat_templates: Name -> Jinja source; "default" is the one used unless another is asked for.
      clean_up_tokenization_spaces: True removes spaces before punctuation in decoding (never done for BPE).
      split_special_tokens: True encodes special tokens in a string as ordinary text.
      tokenizer_class: The class of transformers, without a "Fast" at the end; None if there is none.
      add_bos_token: True begins strings with the beginning-of-sequence token; None if the class decides.
      add_eos_token: True ends strings with the end-of-sequence token; None if the class decides.
      add_prefix_space: True begins strings with an added space; None if the class decides.
      legacy: True adds the space after a special token too; None if the class decides.
      stop_token_ids: Tokens that end an answer, where the tokenizer's own file names them.
    """

    special_tokens: dict[str, AddedToken] = field(default_factory=dict)
    extra_special_tokens: list[AddedToken] = field(default_factory=list)
    added_tokens: dict[int, AddedToken] = field(default_factory=dict)
    chat_templates: dict[str, str] = field(default_factory=dict)
    clean_up_tokenization_spaces: bool = False
    split_special_tokens: bool = False
    tokenizer_class: str | None = None
    add_bos_token: bool | None = None
    add_eos_token: bool | None = None
    add_prefix_space: bool | None = None
    legacy: bool | None = None
    stop_token_ids: frozenset[int] = frozenset()

    @classmethod
    def from_folder(cls, folder: Path) -> TokenizerConfig:
        """Reads the settings, or the defaults without any files. Raises CheckpointError if a file is invalid."""
        config_path = folder / "tokenizer_config.json"
        values = read_json_object(config_path)
        if "added_tokens_decoder" not in values:
            values |= read_json_object(folder / "special_tokens_map.json")
        try:
            special_tokens = {
                name: _special_token(value)
                for name, value in values.items()
                if name.endswith("_token") and isinstance(value, str | dict)
            }
            # The name of this list since transformers 5, and before.
            older = values.get("additional_special_tokens") or []
            extra = values.get("extra_special_tokens") or older
            if isinstance(extra, dict):
                special_tokens |= {name: _special_token(value) for name, value in extra.items()}
                extra = older
            added = {int(token_id): token for token_id, token in values.get("added_tokens_decoder", {}).items()}
            return cls(
                special_tokens=special_tokens,
                extra_special_tokens=[_special_token(value) for value in extra],
                added_tokens={token_id: _added_token(added[token_id]) for token_id in sorted(added)},
                chat_templates=_file_templates(folder)
                or _inline_templates(values.get("chat_template"))
                or _template_of_model(folder),
                clean_up_tokenization_spaces=bool(values.get("clean_up_tokenization_spaces", False)),
                split_special_tokens=bool(values.get("split_special_tokens", False)),
                tokenizer_class=(values.get("tokenizer_class") or "").removesuffix("Fast") or None,
                add_bos_token=_flag(values, "add_bos_token"),
                add_eos_token=_flag(values, "add_eos_token"),
                add_prefix_space=_flag(values, "add_prefix_space"),
                legacy=_flag(values, "legacy"),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{config_path} is not a tokenizer configuration ({type(error).__name__}: {error}); "
                "fetch the checkpoint's tokenizer files again"
            ) from error


TEMPLATE_FILES = (
    *("tokenizer_config.json", "special_tokens_map.json", "chat_template*"),
    *("additional_chat_templates", "additional_chat_templates/*"),
)
"""Names, and patterns of names, of a folder's files with chat templates."""


def read_json_object(path: Path) -> dict[str, Any]:
    """Reads a JSON file that must hold an object; a missing file reads as an empty one.

    Raises CheckpointError if the file is not valid JSON, or not an object.
    """
    if not path.is_file():
        return {}
    check_not_lfs_pointer(path)
    if (size := path.stat().st_size) > MAX_JSON_BYTES:
        raise CheckpointError(f"{path} has {size} bytes, expected at most {MAX_JSON_BYTES}; fetch the file again")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not readable JSON ({error}); fetch the file again") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(values).__name__}; fetch the file again")
    return values


def _flag(values: dict[str, Any], name: str) -> bool | None:
    return None if values.get(name) is None else bool(values[name])


def _special_token(value: str | dict[str, Any]) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, special=True, normalized=False)
    return _added_token({**value, "special": True})


def _added_token(value: dict[str, Any]) -> AddedToken:
    return AddedToken(value["content"], **{name: value[name] for name in ADDED_TOKEN_FLAGS if name in value})


def _template_of_model(folder: Path) -> dict[str, str]:
    name = _TEMPLATE_OF_MODEL.get(read_json_object(folder / "config.json").get("model_type", ""))
    return {} if name is None else {DEFAULT_TEMPLATE: (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")}


def _file_templates(folder: Path) -> dict[str, str]:
    templates = {}
    if (path := folder / "chat_template.jinja").is_file():
        templates[DEFAULT_TEMPLATE] = _read_template(path, folder)
    else:  # of processors, before they wrote the file above
        templates |= _inline_templates(read_json_object(folder / "chat_template.json").get("chat_template"))
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = _read_template(path, folder)
    return templates


def _read_template(path: Path, folder: Path) -> str:
    # What a template holds gets into prompts: a link could bring any file of the machine there.
    target, home = path.resolve(), folder.resolve()
    places = [home]
    if home.parent.name == "snapshots":  # the Hub's cache, whose files are links to a folder beside
        places.append((home.parent.parent / "blobs").resolve())
    if not any(target.is_relative_to(place) for place in places):
        raise CheckpointError(f"{path} is a link to {target}, which is not in the folder: copy the file there")
    if (size := target.stat().st_size) > MAX_TEMPLATE_BYTES:
        raise CheckpointError(f"{path} has {size} bytes, and a chat template at most {MAX_TEMPLATE_BYTES}")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not readable text ({error}); fetch the file again") from error


def _inline_templates(value: str | list[dict[str, str]] | dict[str, str] | None) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT_TEMPLATE: value}
    if isinstance(value, dict):
        return dict(value)
    return {entry["name"]: entry["template"] for entry in value}
