"""`python -m rlreason.discovery.evaluate PROGRAM`: `rlreason score PROGRAM` under the name that courses look for."""

import runpy
import sys

if __name__ == "__main__":
    sys.argv[1:1] = ["score"]
    runpy.run_module("rlreason", run_name="__main__")
