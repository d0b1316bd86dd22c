"""Commands that read what runs left: cases, audits, gradients, comparisons. Nothing here changes a run's records."""
