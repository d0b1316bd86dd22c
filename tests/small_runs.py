"""The overrides of a run as small as can be, for tests of how runs end."""

RUN = (
    "scale=embedded", "n_steps=3", "rollout_batch_size=16", "group_size=4", "eval_problems=8", "eval_every=0",
    "sampling.max_tokens=16", "data.n_train=64", "data.n_validation=16", "model.width=32", "model.warm_start.steps=4",
    "threads=1", "log_generations=0", "hydra.run.dir=run",
    "grading.timeout_s=60", "grading.start_timeout_s=600",
)  # fmt: skip


def words_of(*more: str) -> list[str]:
    """Return the overrides of a small run; of several with one key, the last."""
    return list({word.partition("=")[0]: word for word in (*RUN, *more)}.values())
