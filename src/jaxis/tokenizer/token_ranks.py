"""Byte-level vocabularies as tiktoken has them: bytes with ranks, and no merges.

Of all pairs of neighbours whose bytes together are a token, the one with the lowest rank is merged first, and a
word that is a token is that token. Source: https://github.com/openai/tiktoken (src/lib.rs).
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from pathlib import Path

from jaxis.errors import CheckpointError
from jaxis.tokenizer.byte_level import spell_bytes


def read_ranks(path: Path) -> list[bytes]:
    """Reads a file of lines with a token in base64 and its rank; returns the tokens by rank.

    Raises CheckpointError if the file cannot be read, or is not such a file.
    """
    try:
        lines = path.read_bytes().splitlines()
        pairs = [line.split() for line in lines if line]
        tokens = {int(rank): decode_token(token) for token, rank in pairs}
        return [tokens[rank] for rank in range(len(pairs))]
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except KeyError as error:
        raise CheckpointError(f"{path} has no token of rank {error.args[0]}; fetch the file again") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not a tiktoken vocabulary ({error}); fetch the file again") from error


def decode_token(token: bytes | str) -> bytes:
    """Decodes a token's bytes from base64. Raises ValueError for anything else."""
    try:
        return base64.b64decode(token, validate=True)
    except binascii.Error as error:
        raise ValueError(f"{token!r} is not base64") from error


def spell_ranks(tokens: Sequence[bytes]) -> tuple[list[str], list[tuple[str, str]]]:
    """Returns the tokens in GPT-2's alphabet, and the merges that lead to them: every way to cut a token into two.

    The lowest rank comes first; equal ones by the ranks of the parts.
    """
    ranks = {token: rank for rank, token in enumerate(tokens)}
    spelled = [spell_bytes(token) for token in tokens]
    merges = sorted(
        (rank, left, right)
        for token, rank in ranks.items()
        for end in range(1, len(token))
        if (left := ranks.get(token[:end])) is not None and (right := ranks.get(token[end:])) is not None
    )
    return spelled, [(spelled[left], spelled[right]) for _, left, right in merges]
