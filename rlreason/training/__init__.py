"""Train: the loop, its learner and algorithms, the parts of a run and how they are built, ranks and checkpoints."""
