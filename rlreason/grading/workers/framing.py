"""How messages travel between the pool and a worker: JSON with a 4-byte length in front."""

import json
import struct
from typing import Any

LENGTH = struct.Struct(">I")


def pack(message: Any) -> bytes:
    """The message as the bytes that travel."""
    body = json.dumps(message).encode("ascii")
    return LENGTH.pack(len(body)) + body
