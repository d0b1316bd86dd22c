"""`python -m rlreason.inspect RUN`: read real responses, with a guess in plain words at what went wrong in each.

It knows the files of a run and the grader's rules; it imports no torch.
"""
