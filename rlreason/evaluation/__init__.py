"""Evaluation: accuracies with intervals, the protocol behind each, pass@k, tables and cases."""
