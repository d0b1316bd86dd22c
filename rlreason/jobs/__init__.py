"""The start of any run (`run.py`), and jobs that do not train: they ask a model and say what its grades come to."""
