"""The kissing problem in dimension 11: its settings, its starter program and its verifier."""
