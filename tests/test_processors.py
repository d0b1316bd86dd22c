"""The default number of threads is what this process may use: affinity, and the quota of its control groups."""

import math

import pytest
import torch

from rlreason.runtime.machine import cgroup_quota, default_threads, usable_processors
from rlreason.training.build import set_threads
from tests.run_settings import settings

V1 = "12:pids:/docker/ab\n4:cpu,cpuacct:/docker/ab\n1:name=systemd:/docker/ab\n"


@pytest.mark.parametrize(
    ("memberships", "files", "quota"),
    [
        ("", {}, math.inf),
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2.0),  # in a container, which sees its own group as the root
        ("0::/\n", {"cpu.max": "max 100000\n"}, math.inf),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "50000 100000"}, 0.5),  # bound from above
        ("0::/../../host/path\n", {"cpu.max": "100000 100000"}, 1.0),
        (V1, {"cpu,cpuacct/docker/ab/cpu.cfs_quota_us": "150000\n",
              "cpu,cpuacct/docker/ab/cpu.cfs_period_us": "100000\n"}, 1.5),
        (V1, {"cpu/docker/ab/cpu.cfs_quota_us": "-1", "cpu/docker/ab/cpu.cfs_period_us": "100000"}, math.inf),
        (V1, {"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4.0),  # the host's path
    ],
)  # fmt: skip
def test_the_quota_is_the_smallest_of_a_group_and_all_above_it(memberships, files, quota):
    there = {f"/sys/fs/cgroup/{path}": text for path, text in files.items()} | {"/proc/self/cgroup": memberships}
    assert cgroup_quota(there.get) == quota


def test_the_default_is_bounded_and_an_explicit_number_wins(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {3}, raising=False)
    assert (usable_processors(), default_threads(8), default_threads(1)) == (1, 1, 1)
    try:
        set_threads(settings("threads=2"))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
