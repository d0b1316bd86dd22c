#!/usr/bin/env bash
# Every experiment of CS336 assignment 5 (2025) on the built-in task, four seeds each, then the write-up of them all.
# Two to three hours on two cores. What has finished is not run again: type it again after an interruption.
set -euo pipefail
seeds=${SEEDS:-0,1,2,3}
jobs=${JOBS:-2}

python -m rlreason -m algorithm=evaluate data=stories_long prompt=r1_zero sweep_name=zero_shot seed="$seeds" jobs="$jobs"
python -m rlreason -m sweep=grpo_assignment seed="$seeds" jobs="$jobs"
for sweep in expert_iteration sft_tuning sft_filtered sft_dataset_size leaderboard; do
  python -m rlreason -m sweep="$sweep" seed="$seeds" jobs="$jobs"
done
python -m rlreason report --assignment cs336_2025 runs                        # runs/writeup.md and runs/writeup.html
python tools/keep_write_up.py cs336_2025 runs docs/rehearsal      # the same, small enough for a repository
