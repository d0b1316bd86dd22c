"""The courses' experiments have the handouts' models, data, prompts and numbers, and one can write one's own."""

import pytest
from hydra import compose, initialize_config_dir

from rlreason.cli.check import check_command_line
from rlreason.config.leaves import resource_dir
from rlreason.config.store import typed
from rlreason.training.progress import interim_due

CONF = resource_dir("conf")


@pytest.mark.parametrize(
    ("experiment", "model", "data", "prompt", "longest"),
    [
        ("cs336_2025", "Qwen/Qwen2.5-Math-1.5B", "math", "r1_zero", 1024),
        ("cs336_2026", "allenai/OLMo-2-0425-1B", "gsm8k", "question_boxed", 512),
        ("pku_hw3", "Qwen/Qwen3-0.6B", "gsm8k", "r1_zero", 1024),
    ],
)
def test_an_experiment_is_its_handout(composed, gsm8k, experiment, model, data, prompt, longest):
    path = f"data.path={gsm8k}"
    run = typed(composed(f"experiment={experiment}", path))
    assert (run.model.path, run.data.name, run.prompt.name, run.sampling.max_tokens) == (model, data, prompt, longest)
    assert (run.n_steps, run.learning_rate, run.advantage_eps) == (200, 1e-5, 1e-6)
    assert (run.rollout_batch_size, run.group_size, run.train_batch_size, run.epochs_per_rollout) == (256, 8, 256, 1)
    assert (run.sampling.temperature, run.sampling.min_tokens) == (1.0, 4)
    assert (run.weight_decay, list(run.adam_betas), run.max_grad_norm) == (0.0, [0.9, 0.95], 1.0)
    assert (run.loss.loss_type, run.length_norm.kind, run.std_norm, run.baseline) == (
        "reinforce_with_baseline", "masked_mean", "group_std", "mean",
    )  # fmt: skip
    assert (run.problems_on_the_way, run.eval_problems) == (1024, None)  # on the way, and the whole split at the end
    every, longest = run.eval_every, run.longest_without_evaluation
    due = [s for s in range(1, 201) if interim_due(s, 200, every, longest)]
    assert due == list(range(10, 201, 10))
    assert (run.kl_coef, run.lr_schedule) == (0.0, "constant")
    elsewhere = typed(composed(f"experiment={experiment}", path, "model=smollm2_135m"))
    assert (elsewhere.data.name, elsewhere.prompt.name, elsewhere.rollout_batch_size) == (data, prompt, 256)
    for algorithm in ("sft", "ei", "evaluate", "best_of_n"):
        other = typed(composed(f"experiment={experiment}", path, f"algorithm={algorithm}"))
        assert (other.model, other.data, other.prompt, other.sampling) == (
            run.model,
            run.data,
            run.prompt,
            run.sampling,
        )


def test_a_model_brings_the_data_of_its_course(composed, gsm8k):
    of_model = {name: composed(f"model={name}") for name in ("qwen2_5_math_1_5b", "qwen3_0_6b", "qwen3_0_6b_base")}
    assert {name: (cfg.model.path, cfg.data.name) for name, cfg in of_model.items()} == {
        "qwen2_5_math_1_5b": ("Qwen/Qwen2.5-Math-1.5B", "math"),
        "qwen3_0_6b": ("Qwen/Qwen3-0.6B", "gsm8k"),
        "qwen3_0_6b_base": ("Qwen/Qwen3-0.6B-Base", "gsm8k"),
    }


def test_gspo_has_the_papers_clip_range_and_the_courses(composed):
    ranges = {
        name: typed(composed(*words)).loss.numbers()
        for name, words in {
            "paper": ["loss=gspo"],
            "course": ["loss=gspo_2026"],
            "named": ["objective=gspo", "loss=gspo_2026"],
        }.items()
    }
    both = {"cliprange_low": 3e-4, "cliprange_high": 3e-4}
    assert ranges == {"paper": {**both, "cliprange_high": 4e-4}, "course": both, "named": both}


def test_an_experiment_may_set_the_numbers_of_the_loss(tmp_path):
    """Whether it chooses the loss itself, names its type, or leaves the choice to the command line."""
    numbers = "{cliprange_low: 3e-4, cliprange_high: 3e-4}"
    (tmp_path / "experiment").mkdir()
    for name, text in {
        "chosen": f"defaults: [override /loss: gspo]\nloss: {numbers}",
        "named": f"loss: {{loss_type: gspo, {numbers[1:]}",
        "open": f"loss: {numbers}",
    }.items():
        (tmp_path / f"experiment/{name}.yaml").write_text(f"# @package _global_\n{text}\n")
    mine = f"hydra.searchpath=[file://{tmp_path}]"
    with initialize_config_dir(str(CONF), version_base="1.3"):
        for words in (["experiment=chosen"], ["experiment=named"], ["experiment=open", "loss=gspo"]):
            run = typed(compose("config", [mine, *words]))
            assert (run.loss.loss_type, *run.loss.numbers().values()) == ("gspo", 3e-4, 3e-4)
    check_command_line(["-m", "loss=grpo_clip,gspo", "loss.cliprange_low=3e-4", "loss.cliprange_high=3e-4",
                 "loss.cliprange=null"])  # fmt: skip
