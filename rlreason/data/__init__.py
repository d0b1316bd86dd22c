"""Problems: read from files or a hub, or generated; and the texts made of them, prompts and traces.

Depends on the settings of data and on the grader, which checks reference answers; loads no torch.
"""
