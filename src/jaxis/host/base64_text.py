"""base64 as common tools write it, also within data: URLs.

Source: https://infra.spec.whatwg.org/#forgiving-base64-decode, https://fetch.spec.whatwg.org/#data-urls
"""

from __future__ import annotations

import binascii
import re
from urllib.parse import unquote_to_bytes

_WHITE_SPACE = b" \t\n\f\r"
_SCHEME = re.compile(r"[\0- ]*data:", re.IGNORECASE)
_IN_BASE64 = re.compile(r"; *base64 *$", re.IGNORECASE)


def decode_base64(text: str | bytes) -> bytes:
    """Decodes base64; white space is skipped, and padding may be left out.

    Raises ValueError if the string has other characters, or is cut off.
    """
    data = (text.encode("ascii") if isinstance(text, str) else text).translate(None, _WHITE_SPACE)
    if len(data) % 4 == 0:
        data = data.removesuffix(b"=").removesuffix(b"=")
    if b"=" in data:
        raise ValueError("padding in the wrong place")
    return binascii.a2b_base64(data + b"=" * (-len(data) % 4), strict_mode=True)


def is_data_url(url: str) -> bool:
    """Returns whether the URL has the scheme data:, in capitals or not."""
    return _SCHEME.match(url) is not None


def body_of_data_url(url: str) -> bytes | None:
    """Returns a data: URL's base64 body, unchecked; None if the URL has another encoding."""
    head, comma, body = url.partition(",")
    head = re.sub(r"[\t\n\r]", "", head)
    if not comma or not is_data_url(head) or _IN_BASE64.search(head) is None:
        return None
    return unquote_to_bytes(body.partition("#")[0])
