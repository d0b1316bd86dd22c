"""How much memory a run takes, planned from its settings and its model's shape before anything is loaded."""
