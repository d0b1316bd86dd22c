"""The overrides of a run as small as can be, for tests of how runs end."""

from tests.starts import SMALL

RUN = (
    *SMALL, "scale=embedded", "n_steps=3", "eval_every=0", "data.n_train=64", "data.n_validation=16", "threads=1",
    "log_generations=0", "hydra.run.dir=run",
)  # fmt: skip


def words_of(*more: str) -> list[str]:
    """Return the overrides of a small run; of several with one key, the last."""
    return list({word.partition("=")[0]: word for word in (*RUN, *more)}.values())
