"""Jobs that do not train: they ask a model, grade its responses, and say what that comes to."""
