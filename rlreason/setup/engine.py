"""The rollout engine of a run, from its `rollout` settings."""

from rlreason.config.run import Run
from rlreason.engines.base import Engine
from rlreason.engines.hf import HFEngine
from rlreason.policy import Policy


def make_engine(run: Run, policy: Policy) -> Engine:
    return HFEngine(policy, run.rollout.max_rows)
