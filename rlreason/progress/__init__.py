"""How far a training run has come: the step in hand, and all that a run needs to go on exactly where it was."""
