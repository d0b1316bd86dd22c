"""Training on several ranks: processes with a GPU each, which deal the micro-batches of a step among themselves."""
