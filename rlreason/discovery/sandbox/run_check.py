"""In the sandbox, too: the verifier of a problem, on the rows of a program. Trusted, but within limits of its own.

Started as `python -I -B run_check.py VERIFIER`; standard input is JSON, {"rows": text, "options": {...}}, the rows as
they came through the program's channel; the channel of this process gets what `verify` returns, as JSON.
"""

import importlib.util
import json
import os
import sys

CHANNEL = 3


def main() -> None:
    """Read, verify, answer."""
    sys.set_int_max_str_digits(0)
    asked = json.loads(sys.stdin.buffer.read())
    spec = importlib.util.spec_from_file_location("verify", sys.argv[1])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rows = [[int(word) for word in row.split()] for row in asked["rows"]]
    told = json.dumps(module.verify(rows, **asked["options"])).encode()
    while told:
        told = told[os.write(CHANNEL, told) :]


if __name__ == "__main__":
    main()
