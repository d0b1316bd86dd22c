"""Jobs that do not train: they ask a model, grade its responses, and say what that comes to.

One room per job (`evaluate`, `best_of_n`) over shared ones: `respond` (ask, so that an interruption loses nothing),
`store` (responses on disk as they finish), `selection` (the estimators), `tables`, `plot`.
"""
