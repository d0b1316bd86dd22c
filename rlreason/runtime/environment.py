"""Variables of the environment by which processes of this program tell each other something."""

SWEEP_VARIABLE = "RLREASON_JOB_OF_SWEEP"  # the sweep's name, for the processes that a sweep starts
STACKS_VARIABLE = "RLREASON_STACKS"  # the file for a process's stacks on SIGUSR1 (stacks.py)
FORKS_VARIABLE = "RLREASON_FORKS"  # 0: every run of a sweep loads its libraries itself (sweeps/forks.py)
GPUS_VARIABLE = "RLREASON_GPUS"  # GPUs that sweeps hand out, instead of those that are found (sweeps/gpus.py)
