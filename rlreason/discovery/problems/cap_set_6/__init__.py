"""Cap sets in dimension 6: its settings, its starter program and its verifier."""
