"""What can go wrong in a run without an error: each monitor is one pure function of the metrics that are recorded."""
