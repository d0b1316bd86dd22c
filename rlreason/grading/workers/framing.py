"""How messages travel between the pool and a worker: JSON with a 4-byte length in front.

A function that a worker cannot import travels once, ahead of them, as it was pickled.
"""

import json
import struct
from typing import Any

LENGTH = struct.Struct(">I")


def pack(message: Any) -> bytes:
    """The message as the bytes that travel."""
    return framed(json.dumps(message).encode("ascii"))


def framed(body: bytes) -> bytes:
    """Bytes with their length in front."""
    return LENGTH.pack(len(body)) + body
