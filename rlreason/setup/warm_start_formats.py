"""The formats that the warm start of a model made on the spot is taught in.

The prompts of the handouts' prompt ablation share one warm start that holds all of them, so that whichever of them a
run chooses, it starts from the same weights. Every other prompt, the default and a user's own, has a warm start to
itself.
"""

from itertools import cycle, islice

from omegaconf import OmegaConf

from rlreason.config.groups import NAMED_REWARDS, PromptConfig
from rlreason.config.model import SHARED_WARM_START
from rlreason.config.run import RunConfig
from rlreason.config.sources import resource_dir
from rlreason.data.stories_habits import R1_ZERO_TRACE
from rlreason.errors import ConfigError
from rlreason.grading import Grader
from rlreason.model.tiny_formats import Format
from rlreason.setup.templates import filling, template_of

#: Prompt options that share a warm start, one for each turn. A prompt with three worked examples is many times as long
#: as a bare question and ends like r1_zero's: one turn in sixteen suffices to learn it, and keeps the warm start short.
SHARED = 5 * SHARED_WARM_START[:3] + SHARED_WARM_START[3:]


def formats_of(run: RunConfig) -> list[Format]:
    """One for each turn. An evaluation's own prompt gets half of them, where training's does not bring it along."""
    asked, trained = run.eval.prompt, formats_with(run.prompt)
    if asked is None or template_of(asked) == template_of(run.prompt):
        return trained
    more = formats_with(asked)
    if len(trained) == len(more) > 1:  # both share one warm start
        return trained
    pairs = zip(cycle(trained), cycle(more), strict=False)
    return [form for pair in islice(pairs, max(len(trained), len(more))) for form in pair]


def formats_with(prompt: PromptConfig) -> list[Format]:
    """One for each turn: those of the shared warm start where this prompt is one of them, or its own alone."""
    shared = {name: shipped(name) for name in SHARED}
    same = [other for other in shared.values() if template_of(other) == template_of(prompt)]
    check_readable(prompt, trace_of(same[0] if same else prompt))
    if not same:
        return [format_of(prompt)]
    formats = {name: format_of(prompt) for name, prompt in shared.items()}
    return [formats[name] for name in SHARED]


def shipped(name: str) -> PromptConfig:
    """A prompt option as it stands in `conf/`, whatever a run has changed."""
    file = resource_dir("conf") / "prompt" / f"{name}.yaml"
    prompt = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(PromptConfig), OmegaConf.load(file)))
    assert isinstance(prompt, PromptConfig)
    return prompt


def format_of(prompt: PromptConfig) -> Format:
    """How this prompt asks, and how a trace answers it."""
    return Format(filling(prompt), trace_of(prompt))


def trace_of(prompt: PromptConfig) -> str:
    """The prompt's own trace; where that does not say how to answer, in answer tags."""
    return prompt.trace if "{answer}" in prompt.trace else R1_ZERO_TRACE


def check_readable(prompt: PromptConfig, trace: str) -> None:
    """`ConfigError` where the prompt's reward would find no answer in what the warm start teaches, in no response."""
    if prompt.reward not in NAMED_REWARDS:  # what a reward of the user's own reads is not known
        return
    if Grader(reward=prompt.reward).read(trace.format(solution="1+1=2", answer="2")).answer != "2":
        raise ConfigError(
            f"prompt.reward={prompt.reward} with model=tiny: the tiny model is taught to answer in the form {trace!r}, "
            "where this reward finds no answer: choose prompt.reward and prompt.trace of one form, as every prompt has"
        )
