"""Settings that take one of a few words: the words stand on the field, and one check holds every setting to them."""

from dataclasses import field
from typing import Any

from omegaconf import MISSING

from rlreason.config.leaves import leaves


def choice(*words: str, default: str | None = MISSING, cure: str = "choose one") -> Any:
    """A field of a settings dataclass that takes one of these words; `cure` ends the complaint about any other."""
    return field(default=default, metadata={"choices": words, "cure": cure})


def wrong_words(settings: Any, prefix: str = "") -> list[str]:
    """Complaints about settings that hold none of their words, one line each. null is the type's business.

    >>> from rlreason.config.rollout import RolloutConfig
    >>> wrong_words(RolloutConfig(engine="sglang"), "rollout.")
    ['rollout.engine=sglang is none of hf, vllm: choose one']
    """
    return [
        f"{leaf.key}={leaf.value} is none of {', '.join(leaf.metadata['choices'])}: {leaf.metadata['cure']}"
        for leaf in leaves(settings, prefix)
        if leaf.value is not None and leaf.value not in leaf.metadata.get("choices", (leaf.value,))
    ]
