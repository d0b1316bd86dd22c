"""Measure accuracies with intervals, each by a protocol; pass@k, tables of an evaluation, and cases."""
