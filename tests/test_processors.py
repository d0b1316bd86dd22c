"""The default number of threads is what this process may use: affinity, and the quota of its control groups."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlreason.runtime.machine import cgroup_quota, usable_processors
from rlreason.training.build import set_threads
from tests.run_settings import settings


@pytest.mark.parametrize(
    ("memberships", "files", "quota"),
    [
        ("", {}, math.inf),
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2.0),  # in a container, which sees its own group as the root
        ("0::/\n", {"cpu.max": "max 100000\n"}, math.inf),
        ("0::/\n", {"cpu.max": "a mess of words"}, math.inf),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "50000 100000"}, 0.5),  # bound from above
        ("0::/a/b\n", {"a/b/cpu.max": "300000 100000", "a/cpu.max": "400000 100000"}, 3.0),
        ("0::/../../host/path\n", {"cpu.max": "100000 100000"}, 1.0),
    ],
)  # fmt: skip
def test_the_quota_is_the_smallest_of_a_group_and_all_above_it(memberships, files, quota):
    there = {f"/sys/fs/cgroup/{path}": text for path, text in files.items()} | {"/proc/self/cgroup": memberships}
    assert cgroup_quota(there.get) == quota


def test_affinity_bounds_the_default_and_an_explicit_number_wins():
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("no affinity here")
    text = (
        "import os, torch; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); torch.set_num_threads(8);"
        "from rlreason.runtime.machine import *;"
        "print(usable_processors())"
    )
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    told = subprocess.run([sys.executable, "-c", text], env=env, capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["1"]
    assert 1 <= usable_processors() <= (os.cpu_count() or 1)
    try:
        set_threads(settings("threads=2"))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
