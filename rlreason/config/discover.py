"""The settings of `algorithm=discover`: an external language model proposes programs, a verifier scores them."""

from dataclasses import dataclass, field
from typing import Any

from rlreason.config.fields import choice
from rlreason.config.run import AnyRunConfig

SIDE_BY_SIDE = ("best_of_n", "hybrid")  # strategies that request several replies at once
CONVERSING = ("refine", "hybrid")  # strategies that tell the model what its program was worth
DISCOVERY_BUDGETS = ("calls", "tokens", "cost", "hours")


@dataclass
class ClientConfig:
    """Which model gets the requests, and how: any endpoint for OpenAI's chat completions."""

    base_url: str | None = None  # as in http://127.0.0.1:8000/v1; null: OPENAI_BASE_URL of the environment
    model: str | None = None  # its name at the endpoint; null: the only one listed there
    env_variable: str = "OPENAI_API_KEY"  # the environment variable with the key; none is sent without it
    temperature: float | None = None  # null: the endpoint's
    max_tokens: int = 16384  # of one reply, thinking included
    thinking: bool | None = None  # of models with this switch; null leaves it to the endpoint
    timeout_s: float = 600.0  # seconds for one whole call
    retries: int = 4  # more calls for one reply, after an error, a time-out, an empty reply or one without a program
    # Most seconds before the first of them; twice as long before each further one. A server's own Retry-After wins.
    pause_s: float = 2.0
    system: str | None = None  # the system message; null: none
    prompt_price: float | None = None  # of a million prompt tokens, in the currency of budget.cost
    completion_price: float | None = None  # of a million tokens of replies
    # More of the request's body, as {top_p: 0.95}; a field that is null there is left out of it.
    extra: Any = field(default=None, metadata={"type": "mapping or null"})


@dataclass
class PromptFilesConfig:
    """The model's prompts: files in the problem's folder, in prompts/, or anywhere by their paths."""

    first: str | None = None  # the task, with {starter}, {score}, {hints}; null: the problem's own
    error: str = "discover_error.prompt"  # after a program that gave no valid set: {error}, {raw_points}, {best}
    extend: str = "discover_extend.prompt"  # after a valid set: {score}, {best}, {max_squared_norm}
    no_code: str = "discover_no_code.prompt"  # after a reply that held no whole program
    hints: bool = False  # whether the first one contains the problem's hints


@dataclass
class ScoreConfig:
    """The limits of every program, and of the check of its set."""

    timeout_s: float = 600.0  # seconds for the program
    check_timeout_s: float = 120.0  # seconds for the check
    memory_mb: int = 2048  # megabytes of memory, all processes of the program together
    workers: int = 2  # programs that run at the same time, each in its own folder
    cpus: int = 2  # processors that each may use, if there are as many


@dataclass
class DiscoverBudgetConfig:
    """What a run may spend, all its parts and every retry included; null: no limit. None of them is ever exceeded."""

    calls: int | None = 20  # requests sent
    tokens: int | None = None  # of prompts and replies; a call that was never answered counts as its longest reply
    cost: float | None = None  # by the client's prices
    hours: float | None = None  # wall clock, of calls and programs


@dataclass
class DiscoverConfig(AnyRunConfig):
    """A model and a verifier in a loop, on a problem whose answers can be checked but not looked up."""

    algorithm: str = "discover"
    problem: str = "kissing_11"  # one that comes with the package, or a folder with a problem.yaml
    # simple: the same question anew, every time. refine: one conversation, each verdict the next question. best_of_n:
    # several replies to the question at a time, the verifier chooses. hybrid: the same within a conversation.
    strategy: str = choice("simple", "refine", "best_of_n", "hybrid")
    replies: int = 4  # requested at the same time
    start: str | None = None  # a program to begin with; null: the problem's starter
    history: int = 4  # previous turns in the conversation, besides the first and the best
    # Turns without a better program after which a conversation starts over; null: it never does.
    restart_after: int | None = None
    client: ClientConfig = field(default_factory=ClientConfig)
    prompts: PromptFilesConfig = field(default_factory=PromptFilesConfig)
    score: ScoreConfig = field(default_factory=ScoreConfig)
    budget: DiscoverBudgetConfig = field(default_factory=DiscoverBudgetConfig)

    @property
    def side_by_side(self) -> int:
        """Number of replies requested at the same time."""
        return self.replies if self.strategy in SIDE_BY_SIDE else 1

    @property
    def most_spent(self) -> str:
        bounds = {name: getattr(self.budget, name) for name in DISCOVERY_BUDGETS}
        return ", ".join(f"budget.{name}={bound:g}" for name, bound in bounds.items() if bound is not None)

    @property
    def converses(self) -> bool:
        """Whether the model learns what its programs scored."""
        return self.strategy in CONVERSING

    def problems(self) -> list[str]:
        """Every violated rule between settings, one line each."""
        bad = super().problems()
        if all(getattr(self.budget, name) is None for name in DISCOVERY_BUDGETS):
            bad.append("budget.calls=null, and no other budget is set: a run needs an end: try budget.calls=20")
        priced = self.client.prompt_price is not None and self.client.completion_price is not None
        if self.budget.cost is not None and not priced:
            bad.append(
                f"budget.cost={self.budget.cost:g} needs client.prompt_price and client.completion_price, the prices "
                "of a million tokens: set both"
            )
        if (tokens := self.budget.tokens) is not None and tokens <= self.client.max_tokens:
            bad.append(
                f"budget.tokens={tokens} must be above client.max_tokens={self.client.max_tokens}, which one reply may "
                "take: raise it, or lower client.max_tokens"
            )
        url = self.client.base_url
        if url is not None and not url.startswith(("http://", "https://")):
            bad.append(f"client.base_url={url} must begin with http:// or https://: try client.base_url=http://{url}")
        extra = self.client.extra
        if extra is not None and not isinstance(extra, dict):
            bad.append(f"client.extra={extra} must be a mapping or null: try client.extra={{top_p: 0.95}}")
        elif reserved := sorted(
            name for name in ("model", "messages", "n", "max_tokens") if (extra or {}).get(name) is not None
        ):
            bad.append(
                f"client.extra={self.client.extra} sets {reserved[0]}, which the run itself decides: leave it out"
            )
        return bad
