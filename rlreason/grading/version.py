"""The version of the grading rules: raised whenever a response would be judged otherwise, and for nothing else."""

#: Stands in the protocol of every accuracy; accuracies of different versions are not compared. `tests/test_grading.py`
#: holds it to the verdicts on all cases and says what to do when one changes.
GRADER_VERSION = 2
