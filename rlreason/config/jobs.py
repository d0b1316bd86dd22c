"""The settings of jobs that do not train: evaluate a model, and choose the best of several responses."""

from dataclasses import dataclass, field
from typing import ClassVar

from rlreason.config.choices import choice
from rlreason.config.groups import names_function
from rlreason.config.run import Asking, RunConfig


@dataclass
class EvalJobConfig(RunConfig):
    """Keys of every job that asks a fixed set of problems, `eval_problems` many."""

    split: str = choice("validation", "train", default="validation")  # whose first eval_problems are asked

    @property
    def uses_training_data(self) -> bool:
        return self.split == "train"

    @property
    def asks_training_data(self) -> bool:
        return self.split == "train"

    @property
    def asking(self) -> Asking:
        return self.evaluation

    @property
    def problems_at_the_end(self) -> int | None:
        return self.asked_at_most

    @property
    def problems_there(self) -> int | None:
        if self.split == "validation":
            return super().problems_there
        return getattr(self.data, "n_train", None) if self.data.limit is None else self.data.limit

    def problems(self) -> list[str]:
        bad = super().problems()
        if self.split == "train" and self.eval.data is not None:
            bad.append(
                f"split=train with eval.data={self.eval.data.name}: eval.data says whose validation problems are "
                f"asked: choose data={self.eval.data.name} instead, or split=validation"
            )
        return bad


@dataclass
class EvaluateConfig(EvalJobConfig):
    """Accuracy of a model as it is, and every response on disk."""

    algorithm: str = "evaluate"
    samples: int | None = None  # short for eval.samples: responses per problem; null: 1

    @property
    def answers(self) -> int:
        return super().answers if self.samples is None else self.samples

    @property
    def counted(self) -> tuple[str, str]:
        return super().counted if self.samples is None else (f"samples={self.samples}", "samples=1")


@dataclass
class BestOfNConfig(EvalJobConfig):
    """How much the best, the likeliest or the most frequent of N responses is worth."""

    reads_eval_samples: ClassVar[bool] = False

    algorithm: str = "best_of_n"
    # The numbers N of responses to choose from, all out of the same samples.
    n_list: list[int] = field(default_factory=lambda: [1, 4, 8, 16])
    samples: int | None = None  # responses per problem; null: the largest N; more make every smaller N more exact
    scorer: str | None = None  # module:function of one's own, (question, response) -> number: the highest is chosen

    @property
    def own_scorer(self) -> str | None:
        return self.scorer

    @property
    def answers(self) -> int:
        return max(self.n_list, default=1) if self.samples is None else self.samples

    @property
    def counted(self) -> tuple[str, str]:
        return f"n_list={list(self.n_list)}", "use algorithm=evaluate"

    def problems(self) -> list[str]:
        bad = super().problems()
        sound = [n for n in self.n_list if n >= 1]
        if sound != sorted(set(self.n_list)) or not sound:
            cure = f"[{','.join(map(str, sorted(set(sound)) or [1, 4, 8]))}]"
            rule = "must hold numbers from 1 on, in rising order, once each"
            bad.append(f"n_list={list(self.n_list)} {rule}: try n_list={cure}")
        elif self.samples is not None and 0 < self.samples < max(sound):
            most = max(sound)
            bad.append(
                f"n_list={list(self.n_list)} asks for the best of {most}, and samples={self.samples} gives fewer: "
                f"set samples={most} or null, or take {most} out of n_list"
            )
        if self.scorer is not None and not names_function(self.scorer):
            bad.append(f"scorer={self.scorer} must be module:function, as in scorer=my_scores:length, or null")
        return bad
