"""The settings of SFT, expert iteration, GRPO, and of the jobs that do not train."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rlreason.config.run import AnyRunConfig, Asking, RunConfig
from rlreason.config.training import OnlineConfig, TrainingConfig
from rlreason.objectives.card import Card, objective_card
from rlreason.objectives.objective import Objective
from rlreason.objectives.published import check_objective
from rlreason.runtime.plugins import names_function
from rlreason.settings import LARGE, MADE, MISSING, MOST, choice, count, group, number, processors, text

OF_THE_RUN = ("model", "messages", "n", "max_tokens")  # parts of a request that the run decides itself
SIDE_BY_SIDE = "strategy in ('best_of_n', 'hybrid')"


@dataclass
class SFTConfig(TrainingConfig):
    """Supervised fine-tuning: -log p on the response tokens of given traces."""

    algorithm: str = "sft"
    n_steps: int | None = MISSING
    epochs: float | None = number(above=0, high=LARGE, doc="passes over the traces; one of n_steps and epochs is null")

    def rules(self) -> Iterator[str]:
        """Check that the length of the run is given once."""
        if (self.n_steps is None) == (self.epochs is None):
            yield f"n_steps={self.n_steps} and epochs={self.epochs}: one must be null, as in epochs=3 n_steps=null"

    @property
    def reads_traces(self) -> bool:
        return True


@dataclass
class EIConfig(OnlineConfig):
    """Expert iteration: sample, keep what is correct, SFT on it, repeat. RFT and STaR are settings of it."""

    questions_by = "question_batch_size"
    algorithm: str = "ei"
    question_batch_size: int = count(most=MADE, doc="different questions per step")
    sft_epochs: int = count(most=LARGE, doc="passes over the kept responses of a step")
    max_per_question: int | None = count(None, "kept responses per question at most; null: all", MADE)
    deduplicate: bool = text(False, "keep a response that says the same as another to its question only once (RFT)")
    restart: bool = text(False, "each step trains the model that the run started from (STaR), not the latest")

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

    longest_without_evaluation = 10  # a rollout step is long, and rewards can collapse in a few
    questions_by = "rollout_batch_size"

    algorithm: str = "grpo"
    rollout_batch_size: int = count(most=MADE, doc="responses per step, over all questions")
    epochs_per_rollout: int = MISSING

    def rules(self) -> Iterator[str]:
        """Check the sizes of batch and group, and what the objective needs from samples."""
        batch = self.rollout_batch_size
        for key, size in (("group_size", self.group_size), ("train_batch_size", self.train_batch_size)):
            if size <= 0 or batch < size or batch % size:
                yield f"rollout_batch_size={batch} must be a positive multiple of {key}={size}: change one of them"
        if self.group_size < 2 and self.baseline != "none":
            yield f"group_size=1 with baseline={self.baseline} has advantage 0: use group_size=8, or loss=no_baseline"
        if self.max_resampling_rounds and self.baseline == "none":
            rounds = self.max_resampling_rounds
            yield f"max_resampling_rounds={rounds} with baseline=none, where groups of equal rewards count: set it to 0"
        if self.rollout.async_level and self.mismatch == "none" and not self.has_ratio:
            stale = f"rollout.async_level=1 with loss={self.loss.loss_type}, which takes its samples for fresh"
            yield f"{stale}: set mismatch=truncate mismatch_cap=2, or choose loss=grpo_clip"
        if self.rollout.async_level and self.kl_placement == "reward":
            moved = "the sampler's weights have moved"
            yield f"rollout.async_level=1 with kl_placement=reward: {moved}: set kl_placement=loss"
        cache, longest = self.overlong_cache, self.sampling.max_tokens
        if cache is not None and cache > longest:
            yield f"overlong_cache={cache} is more than sampling.max_tokens={longest}: try null"

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
    def samples_ahead(self) -> bool:
        return self.rollout.async_level > 0

    @property
    def longest_response(self) -> int:
        return self.sampling.max_tokens

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
            return super().warnings()
        return super().warnings() | {
            "kl_in_reward": (
                f"kl_placement=reward with std_norm={self.std_norm}: in groups of equal rewards the KL term is "
                "divided by its own small spread, whatever kl_coef says; std_norm=none keeps kl_coef's meaning"
            )
        }


@dataclass
class EvalJobConfig(RunConfig):
    """Keys of every job that asks a fixed set of problems, `eval_problems` many."""

    split: str = choice("validation | train", "the split of which a fixed draw of eval_problems is asked")

    def rules(self) -> Iterator[str]:
        """Check that the asked split is that of one data set."""
        if self.split == "train" and self.eval.data is not None:
            yield f"split=train with eval.data, whose validation problems are asked: choose data={self.eval.data.name}"

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
    samples: int | None = count(None, "short for eval.samples: responses per problem; null: 1", MADE)


@dataclass
class BestOfNConfig(EvalJobConfig):
    """How much the best, the likeliest or the most frequent of N responses is worth."""

    algorithm: str = "best_of_n"
    n_list: list[int] = count([1, 4, 8, 16], "numbers N of responses to choose from", MADE)
    samples: int | None = count(None, "responses per problem; null: the largest N", MADE)
    scorer: str | None = text(None, "module:function, (question, response) -> number: the highest is chosen")

    def rules(self) -> Iterator[str]:
        """Check the numbers N, the number of responses and the scorer."""
        numbers, samples = list(self.n_list), self.samples
        if not numbers or numbers != sorted(set(numbers)):
            yield f"n_list={numbers} must hold numbers in rising order, once each: try [1,4,8]"
        elif samples is not None and 0 < samples < max(numbers):
            yield f"samples={samples} is less than the best of {max(numbers)} in n_list={numbers} needs: set it to null"
        if self.eval.sets:
            sets = f"eval.sets=[{','.join(self.eval.sets)}]"
            yield f"{sets} with algorithm=best_of_n, which asks one set of problems: choose algorithm=evaluate"
        if self.scorer is not None and not names_function(self.scorer):
            yield f"scorer={self.scorer} must be module:function, as in scorer=my_scores:length, or null"

    @property
    def answers(self) -> int:
        return max(self.n_list, default=1) if self.samples is None else self.samples


@dataclass
class ClientConfig:
    """Which model gets the requests, and how: any endpoint for OpenAI's chat completions."""

    base_url: str | None = text(None, "as in http://127.0.0.1:8000/v1; null: OPENAI_BASE_URL of the environment")
    model: str | None = text(None, "its name at the endpoint; null: the only one listed there")
    env_variable: str = text("OPENAI_API_KEY", "the environment variable with the key; none is sent without it")
    temperature: float | None = number(None, "null: the endpoint's", high=10)
    max_tokens: int = number(16384, "of one reply, thinking included", low=16)
    thinking: bool | None = text(None, "of models with this switch; null leaves it to the endpoint")
    timeout_s: float = number(600.0, "seconds for one whole call", low=0.1, high=86400)
    retries: int = number(4, "more calls after an error, a time-out, or a reply without a program", high=100)
    pause_s: float = number(2.0, "most seconds before the first, then doubled", high=600)
    system: str | None = text(None, "the system message; null: none")
    prompt_price: float | None = number(None, "of a million prompt tokens, in budget.cost's currency", high=LARGE)
    completion_price: float | None = number(None, "of a million tokens of replies", high=LARGE)
    extra: Any = text(None, "more of the body, as {top_p: 0.95}; nulls are left out", takes="mapping or null")


@dataclass
class PromptFilesConfig:
    """The model's prompts: files in the problem's folder, in prompts/, or anywhere by their paths."""

    first: str | None = text(None, "the task, with {starter}, {score}, {hints}; null: the problem's own")
    error: str = text(
        "discover_error.prompt", "after an invalid set: {error}, {raw_points}, {best}", only_if="converses"
    )
    extend: str = text(
        "discover_extend.prompt", "after a valid set: {score}, {best}, {max_squared_norm}", only_if="converses"
    )
    no_code: str = text("discover_no_code.prompt", "after a reply without a whole program", only_if="converses")
    hints: bool = text(False, "whether the first one contains the problem's hints")


@dataclass
class ScoreConfig:
    """The limits of every program, and of the check of its set."""

    timeout_s: float = number(600.0, "seconds for the program", low=0.1, high=7 * 86400)
    check_timeout_s: float = number(120.0, "seconds for the check", low=0.1, high=7 * 86400)
    memory_mb: int = number(2048, "megabytes of memory, all processes of the program together", low=64, high=2**20)
    workers: int = processors(2, "programs that run at the same time, each in its own folder")
    cpus: int = count(2, "processors that each may use, if there are as many", 1024)


@dataclass
class DiscoverBudgetConfig:
    """What a run may spend, all its parts and every retry included; null: no limit. None of them is ever exceeded."""

    calls: int | None = count(20, "requests sent", MADE, cure="try 20, or null for no limit")
    tokens: int | None = count(None, "of prompts, replies; an unanswered call: in full", MOST * MOST)
    cost: float | None = number(None, "by the client's prices", above=0, high=LARGE)
    hours: float | None = number(None, "wall clock, of calls and programs", above=0, high=LARGE)


@dataclass
class DiscoverConfig(AnyRunConfig):
    """A model and a verifier in a loop, on a problem whose answers can be checked but not looked up."""

    algorithm: str = "discover"
    problem: str = text("kissing_11", "one that comes with the package, or a folder with a problem.yaml")
    strategy: str = choice(
        "simple | refine | best_of_n | hybrid",
        "simple: the same question anew, every time; refine: one conversation, each verdict the next question; "
        "best_of_n: several replies at a time, the verifier chooses; hybrid: the same within a conversation",
        MISSING,
    )
    replies: int = count(4, "requested at the same time", 256, only_if=SIDE_BY_SIDE)
    start: str | None = text(None, "a program to begin with; null: the problem's starter")
    history: int = number(4, "previous turns kept, besides the first and the best", high=MADE, only_if="converses")
    restart_after: int | None = count(
        None, "turns without progress until it starts over; null: never", MADE, only_if="converses"
    )
    client: ClientConfig = group(ClientConfig)
    prompts: PromptFilesConfig = group(PromptFilesConfig)
    score: ScoreConfig = group(ScoreConfig)
    budget: DiscoverBudgetConfig = group(DiscoverBudgetConfig)

    def rules(self) -> Iterator[str]:
        """Check the budgets, their prices and the client's request."""
        budget, client = self.budget, self.client
        if all(bound is None for bound in vars(budget).values()):
            yield "budget.calls=null, and no other budget is set: a run needs an end: try budget.calls=20"
        if budget.cost is not None and (client.prompt_price is None or client.completion_price is None):
            yield f"budget.cost={budget.cost:g} needs client.prompt_price and client.completion_price: set both"
        if budget.tokens is not None and budget.tokens <= client.max_tokens:
            longest = f"client.max_tokens={client.max_tokens}, one reply's"
            yield f"budget.tokens={budget.tokens} is not above {longest}: raise it"
        extra = client.extra or {}
        if not isinstance(extra, dict):
            yield f"client.extra={extra} must be a mapping or null: try client.extra={{top_p: 0.95}}"
        elif reserved := [name for name in OF_THE_RUN if extra.get(name) is not None]:
            yield f"client.extra={extra} sets {reserved[0]}, which the run itself decides: leave it out"

    @property
    def side_by_side(self) -> int:
        """Number of replies requested at the same time."""
        return self.replies if self.strategy in ("best_of_n", "hybrid") else 1

    @property
    def most_spent(self) -> str:
        """What a run may spend at most, as overrides."""
        bounds = vars(self.budget).items()
        return ", ".join(f"budget.{name}={bound:g}" for name, bound in bounds if bound is not None)

    @property
    def converses(self) -> bool:
        """Whether the model learns what its programs scored."""
        return self.strategy in ("refine", "hybrid")
