"""The settings of SFT, expert iteration, GRPO, and of the jobs that do not train."""

from dataclasses import dataclass
from typing import Any, ClassVar, TypeGuard

from rlreason.config import conflicts
from rlreason.config.run import AnyRunConfig, Asking, RunConfig
from rlreason.config.training import OnlineConfig, TrainingConfig
from rlreason.objectives.card import Card, objective_card
from rlreason.objectives.objective import Objective
from rlreason.objectives.published import check_objective
from rlreason.settings import LARGE, MADE, MISSING, MOST, choice, group, number, processors, source, text

DISCOVERY_BUDGETS = ("calls", "tokens", "cost", "hours")


@dataclass
class SFTConfig(TrainingConfig):
    """Supervised fine-tuning: -log p on the response tokens of given traces."""

    rules = conflicts.of_sft

    algorithm: str = "sft"
    n_steps: int | None = MISSING
    epochs: float | None = number(above=0, high=LARGE, doc="passes over the traces; one of n_steps and epochs is null")

    @property
    def reads_traces(self) -> bool:
        return True


@dataclass
class EIConfig(OnlineConfig):
    """Expert iteration: sample, keep what is correct, SFT on it, repeat. RFT and STaR are settings of it."""

    questions_by: ClassVar[str] = "question_batch_size"
    algorithm: str = "ei"
    question_batch_size: int = number(low=1, high=MADE, doc="different questions per step")
    sft_epochs: int = number(low=1, high=LARGE, doc="passes over the kept responses of a step")
    max_per_question: int | None = number(None, low=1, high=MADE, doc="kept responses per question at most; null: all")
    deduplicate: bool = text(False, doc="keep a response that says the same as another to its question only once (RFT)")
    restart: bool = text(False, doc="each step trains the model that the run started from (STaR), not the latest")

    @property
    def questions(self) -> int:
        return self.question_batch_size

    def describe_batch(self, n_steps: int) -> str:
        times = f"{self.sft_epochs} time{'s' if self.sft_epochs > 1 else ''}"
        learned = f"the correct ones learned {times} in steps of {self.train_batch_size}"
        return f"{self.questions} questions x {self.group_size} responses, {learned}"


@dataclass
class GRPOConfig(Objective, OnlineConfig):
    """Group-relative policy optimisation: sample a group per question, compare, learn, repeat."""

    rules = conflicts.of_grpo
    samples_ahead: ClassVar[bool] = True
    longest_without_evaluation: ClassVar[int | None] = 10  # a rollout step is long, and rewards can collapse in a few
    questions_by: ClassVar[str] = "rollout_batch_size"

    algorithm: str = "grpo"
    rollout_batch_size: int = number(low=1, high=MADE, doc="responses per step, over all questions")
    epochs_per_rollout: int = MISSING

    @property
    def questions(self) -> int:
        return self.rollout_batch_size // self.group_size

    @property
    def learning_temperature(self) -> float:
        """That of the samples, which are compared with each other."""
        return self.sampling.temperature

    @property
    def updates_per_rollout(self) -> int:
        return self.epochs_per_rollout * (self.rollout_batch_size // self.train_batch_size)

    @property
    def ratio_is_one(self) -> bool:
        """Whether each update learns from samples of the policy that it updates."""
        return self.updates_per_rollout <= 1 and not self.rollout.async_level

    @property
    def old_from_engine(self) -> bool:
        """Sampled ahead for a loss with a ratio: the engine's log-probabilities are the old ones."""
        return self.rollout.async_level > 0 and self.has_ratio

    @property
    def longest_response(self) -> int:
        return self.sampling.max_tokens

    @property
    def has_mismatch_weights(self) -> bool:
        """False if the old log-probabilities are the engine's: every weight would be 1."""
        return not self.old_from_engine and super().has_mismatch_weights

    def objective(self) -> Objective:
        """Return these settings, which are an objective."""
        return self

    @property
    def own_loss(self) -> str | None:
        """The user's loss, `module:function`."""
        return self.loss.loss_type if ":" in self.loss.loss_type else None

    def describe_batch(self, n_steps: int) -> str:
        updates = self.updates_per_rollout
        steps = f"{updates} optimizer step{'s' if updates > 1 else ''} of {self.train_batch_size}"
        return f"{self.questions} questions x {self.group_size} responses, {steps}"

    def card(self) -> Card:
        return objective_card(self)

    def problems(self) -> list[str]:
        return super().problems() or check_objective(self)  # whose rules need valid numbers

    def warnings(self) -> dict[str, str]:
        if self.kl_placement != "reward" or self.std_norm == "none":
            return {}
        return {
            "kl_in_reward": (
                f"kl_placement=reward with std_norm={self.std_norm}: in groups of equal rewards the KL term is "
                "divided by its own small spread, whatever kl_coef says; std_norm=none keeps kl_coef's meaning"
            )
        }


def has_ratio_of_one(run: AnyRunConfig) -> TypeGuard[GRPOConfig]:
    """Whether a run has a loss whose ratio is 1 in every update."""
    return getattr(run, "ratio_is_one", False)


@dataclass
class EvalJobConfig(RunConfig):
    """Keys of every job that asks a fixed set of problems, `eval_problems` many."""

    rules = conflicts.of_eval_job

    split: str = choice("validation | train", doc="whose first eval_problems are asked")

    @property
    def uses_training_data(self) -> bool:
        return self.split == "train"

    @property
    def asking(self) -> Asking:
        return self.evaluation

    @property
    def problems_there(self) -> int | None:
        if self.split == "validation":
            return super().problems_there
        return getattr(self.data, "n_train", None) if self.data.limit is None else self.data.limit


@dataclass
class EvaluateConfig(EvalJobConfig):
    """Accuracy of a model as it is, and every response on disk."""

    algorithm: str = "evaluate"
    samples: int | None = number(None, low=1, high=MADE, doc="short for eval.samples: responses per problem; null: 1")


@dataclass
class BestOfNConfig(EvalJobConfig):
    """How much the best, the likeliest or the most frequent of N responses is worth."""

    rules = conflicts.of_best_of_n

    algorithm: str = "best_of_n"
    n_list: list[int] = number([1, 4, 8, 16], low=1, high=MADE, doc="numbers N of responses to choose from")
    samples: int | None = number(None, low=1, high=MADE, doc="responses per problem; null: the largest N")
    scorer: str | None = text(None, doc="module:function, (question, response) -> number: the highest is chosen")

    @property
    def answers(self) -> int:
        return max(self.n_list, default=1) if self.samples is None else self.samples


@dataclass
class ClientConfig:
    """Which model gets the requests, and how: any endpoint for OpenAI's chat completions."""

    base_url: str | None = text(None, doc="as in http://127.0.0.1:8000/v1; null: OPENAI_BASE_URL of the environment")
    model: str | None = text(None, doc="its name at the endpoint; null: the only one listed there")
    env_variable: str = text("OPENAI_API_KEY", doc="the environment variable with the key; none is sent without it")
    temperature: float | None = number(None, high=10, doc="null: the endpoint's")
    max_tokens: int = number(16384, low=16, doc="of one reply, thinking included")
    thinking: bool | None = text(None, doc="of models with this switch; null leaves it to the endpoint")
    timeout_s: float = number(600.0, low=0.1, high=86400, doc="seconds for one whole call")
    retries: int = number(4, high=100, doc="more calls after an error, a time-out, or a reply without a program")
    pause_s: float = number(2.0, high=600, doc="most seconds before the first, then doubled")
    system: str | None = text(None, doc="the system message; null: none")
    prompt_price: float | None = number(None, high=LARGE, doc="of a million prompt tokens, in budget.cost's currency")
    completion_price: float | None = number(None, high=LARGE, doc="of a million tokens of replies")
    extra: Any = text(None, takes="mapping or null", doc="more of the body, as {top_p: 0.95}; nulls are left out")


@dataclass
class PromptFilesConfig:
    """The model's prompts: files in the problem's folder, in prompts/, or anywhere by their paths."""

    first: str | None = source(None, doc="the task, with {starter}, {score}, {hints}; null: the problem's own")
    error: str = source(
        "discover_error.prompt", doc="after an invalid set: {error}, {raw_points}, {best}", only_if="converses"
    )
    extend: str = source(
        "discover_extend.prompt", doc="after a valid set: {score}, {best}, {max_squared_norm}", only_if="converses"
    )
    no_code: str = source("discover_no_code.prompt", doc="after a reply without a whole program", only_if="converses")
    hints: bool = text(False, doc="whether the first one contains the problem's hints")


@dataclass
class ScoreConfig:
    """The limits of every program, and of the check of its set."""

    timeout_s: float = number(600.0, low=0.1, high=7 * 86400, doc="seconds for the program")
    check_timeout_s: float = number(120.0, low=0.1, high=7 * 86400, doc="seconds for the check")
    memory_mb: int = number(2048, low=64, high=2**20, doc="megabytes of memory, all processes of the program together")
    workers: int = processors(2, doc="programs that run at the same time, each in its own folder")
    cpus: int = number(2, low=1, high=1024, doc="processors that each may use, if there are as many")


@dataclass
class DiscoverBudgetConfig:
    """What a run may spend, all its parts and every retry included; null: no limit. None of them is ever exceeded."""

    calls: int | None = number(20, low=1, high=MADE, doc="requests sent", cure="try 20, or null for no limit")
    tokens: int | None = number(None, low=1, high=MOST * MOST, doc="of prompts, replies; an unanswered call: in full")
    cost: float | None = number(None, above=0, high=LARGE, doc="by the client's prices")
    hours: float | None = number(None, above=0, high=LARGE, doc="wall clock, of calls and programs")


@dataclass
class DiscoverConfig(AnyRunConfig):
    """A model and a verifier in a loop, on a problem whose answers can be checked but not looked up."""

    rules = conflicts.of_discovery

    algorithm: str = "discover"
    problem: str = source("kissing_11", doc="one that comes with the package, or a folder with a problem.yaml")
    strategy: str = choice(
        "simple | refine | best_of_n | hybrid",
        MISSING,
        doc="simple: the same question anew, every time; refine: one conversation, each verdict the next question; "
        "best_of_n: several replies at a time, the verifier chooses; hybrid: the same within a conversation",
    )
    replies: int = number(4, low=1, high=256, doc="requested at the same time", only_if="asks_side_by_side")
    start: str | None = source(None, doc="a program to begin with; null: the problem's starter")
    history: int = number(4, high=MADE, doc="previous turns kept, besides the first and the best", only_if="converses")
    restart_after: int | None = number(
        None, low=1, high=MADE, doc="turns without progress until it starts over; null: never", only_if="converses"
    )
    client: ClientConfig = group(ClientConfig)
    prompts: PromptFilesConfig = group(PromptFilesConfig)
    score: ScoreConfig = group(ScoreConfig)
    budget: DiscoverBudgetConfig = group(DiscoverBudgetConfig)

    @property
    def asks_side_by_side(self) -> bool:
        """Whether it requests several replies at once."""
        return self.strategy in ("best_of_n", "hybrid")

    @property
    def side_by_side(self) -> int:
        """Number of replies requested at the same time."""
        return self.replies if self.asks_side_by_side else 1

    @property
    def most_spent(self) -> str:
        """What a run may spend at most, as overrides."""
        bounds = {name: getattr(self.budget, name) for name in DISCOVERY_BUDGETS}
        return ", ".join(f"budget.{name}={bound:g}" for name, bound in bounds.items() if bound is not None)

    @property
    def converses(self) -> bool:
        """Whether the model learns what its programs scored."""
        return self.strategy in ("refine", "hybrid")
