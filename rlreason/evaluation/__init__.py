"""Evaluation: accuracies with intervals, the protocol of each, pass@k, tables and cases."""
