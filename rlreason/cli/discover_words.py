"""The words of `algorithm=discover`, which shares no settings with the other algorithms: its short names."""

from collections.abc import Callable, Sequence

from rlreason.cli.flags import OWN_CONFIGS
from rlreason.errors import ConfigError

#: Short names, and the courses', for settings that have another meaning or none in other algorithms.
NAMES = {
    "model": "client.model",
    "base_url": "client.base_url",
    "temperature": "client.temperature",
    "max_tokens": "client.max_tokens",
    "enable_thinking": "client.thinking",
    "thinking": "client.thinking",
    "timeout": "score.timeout_s",
}
#: Groups of options that only algorithms with a model of their own have.
OF_MODELS = (
    "experiment", "data", "scale", "loss", "objective", "prompt", "rollout", "eval", "logger", "baseline", "std_norm",
    "length_norm", "off_policy",
)  # fmt: skip


def own_names(words: Sequence[str], note: Callable[[str], object] = print) -> list[str]:
    """The words with discovery's names of settings where it was chosen; `ConfigError` where others were chosen beside.

    >>> own_names(["algorithm=discover", "model=Qwen/Qwen3-32B"], note=lambda line: None)
    ['algorithm=discover', 'client.model=Qwen/Qwen3-32B']
    >>> own_names(["algorithm=grpo", "model=tiny"])
    ['algorithm=grpo', 'model=tiny']
    """
    chosen = [word.partition("=")[2].lower().split(",") for word in words if word.startswith("algorithm=")]
    names = {name.strip() for values in chosen for name in values}
    if not names & OWN_CONFIGS.keys():
        return list(words)
    if len(names) > 1:
        raise ConfigError(
            f"algorithm={','.join(sorted(names))}: discover shares no settings with the others: give it a command of "
            "its own"
        )
    found = []
    for word in words:
        key, equals, value = word.partition("=")
        if key in OF_MODELS:
            raise ConfigError(
                f"{word} belongs to algorithms that work on a model here, and algorithm=discover asks one elsewhere "
                "(client.base_url, client.model): leave it out"
            )
        if ours := NAMES.get(key):
            note(f"note: {key} is {ours} here")
        found.append(f"{ours or key}{equals}{value}")
    return found
