"""`rlreason rerun RUN`: start a run again (`verb.py`), and whether it came out the same (`same_runs.py`)."""
