"""Send a run's metrics to Weights & Biases, TensorBoard and Trackio as well. The run folder is the record.

base.py        the interface of a logger, the counter of each metric, and silencing a service's output
guarded.py     all loggers of a run: none of them can stop it, and a resumed run sends nothing twice
services.py    one logger for each service
"""
