"""Services that a run's metrics are also sent to: Weights & Biases, TensorBoard, Trackio. The run folder is the record.

base.py        what a logger is, and over which counter each metric is drawn
guarded.py     the loggers of a run together: none of them can fail or hold it
resumed.py     a run that goes on from a checkpoint: nothing is sent twice, and nothing is missing
silence.py     what the services say is kept from the terminal
*_logger.py    one service each
"""
