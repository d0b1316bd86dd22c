"""The loss laboratory: what every objective would have done with the responses of a finished run.

`python -m rlreason.lab RUN` scores saved responses under the saved policy; nothing is sampled again.
"""
