"""Do the tests notice? Applies small mistakes to the objectives, one at a time, and runs their tests on each.

    python tests/mutate_objectives.py            all mutants, two at a time
    python tests/mutate_objectives.py losses     those of one module

Every mutant is a copy of the package in a temporary folder; the checkout is never touched. Exit code 1 if the
tests pass on any mutant, or if a mutation no longer fits the code.
"""
# ruff: noqa: E501  # a mutant stands on one line

import os
import shutil
import subprocess
import sys
import tempfile
from multiprocessing.pool import ThreadPool
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: The test files that run on a mutant of a module, where they are others than those of `terms`.
TESTS = {
    "advantages": ("advantages", "terms"),
    "losses": ("losses", "rules", "terms"),
    "aggregation": ("losses",),
    "published": ("rules",),
    "card": ("rules",),
}
#: Stop at the first failure and prepare no report on it: only the exit code is read.
QUICKLY = ("-x", "-q", "--tb=no", "--assert=plain", "-p", "no:cacheprovider", "-p", "no:hypothesispytest")
OUTCOMES = {0: "SURVIVED", 1: "killed"}

#: (module, text that stands there once, text instead)
MUTANTS: list[tuple[str, str, str]] = [
    # advantages: eps, bias of the std, groups, baselines
    ("advantages", ".sqrt()[groups.group_of] + advantage_eps", ".sqrt()[groups.group_of]"),
    ("advantages", ".sqrt()[groups.group_of] + advantage_eps", ".sqrt()[groups.group_of].clamp(min=advantage_eps)"),
    ("advantages", ").sqrt()[groups.group_of]", ")[groups.group_of]"),
    ("advantages", "(groups.sizes - 1).clamp(min=1)).sqrt()", "groups.sizes).sqrt()"),
    ("advantages", "(sums(rewards, groups) / groups.sizes)[groups.group_of] + advantage_eps", "(sums(rewards, groups) / groups.sizes)[groups.group_of]"),
    ("advantages", "(sums(rewards, groups) / groups.sizes)[groups.group_of]", "sums(rewards, groups)[groups.group_of]"),
    ("advantages", "(sums(raised, groups) / groups.sizes)", "sums(raised, groups)"),
    ("advantages", "return raised - (sums", "return raised + (sums"),
    ("advantages", "return rewards - lowest[groups.group_of]", "return rewards"),
    ("advantages", "(size / (size - 1).clamp(min=1))", "((size - 1).clamp(min=1) / size)"),
    ("advantages", "group_by_id(groups.group_of.new_zeros(groups.group_of.shape))", "groups"),
    ("advantages", "groups, function = group_by_id(group_ids)", "groups, function = group_by_id((rewards * 0 + 1).cumsum(0).long() // 4)"),
    ("advantages", "advantage_eps: float = 1e-6,", "advantage_eps: float = 1e-4,"),
    ("advantages", "Comparison(lambda rewards, groups: rewards,", "Comparison(mean_baseline,"),
    ("advantages", "sums(weights * raised, groups) / sums(weights, groups)", "sums(raised, groups) / groups.sizes"),
    ("advantages", "sums(weights, groups).clamp(min=1)", "sums(weights, groups)"),
    # ratio
    ("losses", "(log_probs - other_log_probs)", "(other_log_probs - log_probs)"),
    ("losses", "(log_probs - other_log_probs)", "(log_probs - other_log_probs.roll(1, -1))"),
    ("losses", ".masked_fill(~response_mask.bool(), 0.0)", ""),
    # losses: signs, clip, stop-gradients, what is averaged
    ("losses", "return -advantages * policy_log_probs, {}", "return -advantages * policy_log_probs.exp(), {}"),
    ("losses", "return -ratio * advantages, {", "return -ratio.detach() * advantages * policy_log_probs, {"),
    ("losses", "unclipped.minimum(clipped)", "unclipped.maximum(clipped)"),
    ("losses", "ratio.clamp(1 - cliprange_low, 1 + cliprange_high)", "ratio.clamp(1 - cliprange_high, 1 + cliprange_low)"),
    ("losses", "ratio.clamp(1 - cliprange_low, 1 + cliprange_high)", "ratio.clamp(1 - cliprange_low, 1 + cliprange_low)"),
    ("losses", "ratio.clamp(1 - cliprange_low, 1 + cliprange_high)", "ratio.clamp(max=1 + cliprange_high)"),
    ("losses", "lost = clipped < unclipped", "lost = clipped <= unclipped"),
    ("losses", '"clipped_low": lost & (ratio < 1)', '"clipped_low": lost & (ratio > 1)'),
    ("losses", ".where(advantages < 0, -math.inf)", ""),
    ("losses", "surrogate.maximum(floor)", "surrogate.minimum(floor)"),
    ("losses", 'lost = lost | stats["dual_clipped"]', "lost = lost"),
    ("losses", "return -surrogate, {", "return surrogate, {"),
    ("losses", "stat.detach().to(loss.dtype)", "stat.to(loss.dtype)"),
    ("losses", 'masked_mean(log_ratio, response_mask, dim=-1, empty="zero").exp()', "log_ratio.sum(-1).exp()"),
    ("losses", 'masked_mean(log_ratio, response_mask, dim=-1, empty="zero").exp()', 'masked_mean(log_ratio.exp(), response_mask, dim=-1, empty="zero")'),
    ("losses", 'masked_mean(log_ratio, response_mask, dim=-1, empty="zero").exp()', 'masked_mean(log_ratio, response_mask, dim=-1, empty="zero").exp().detach()'),
    ("losses", 'dim=-1, empty="zero").exp()', "dim=-1).exp()"),
    ("losses", "response_mask).exp().detach()", "response_mask).exp()"),
    ("losses", "-ratio.clamp(max=ratio_cap) * advantages * policy_log_probs", "-ratio.clamp(max=ratio_cap) * advantages"),
    ("losses", "-ratio.clamp(max=ratio_cap) * advantages", "-ratio.clamp(max=1 + ratio_cap) * advantages"),
    ("losses", '"clipped": ratio > ratio_cap', '"clipped": ratio < ratio_cap'),
    ("losses", "tau * (ratio - 1)", "tau * ratio"),
    ("losses", "where(advantages > 0, tau_neg)", "where(advantages < 0, tau_neg)"),
    ("losses", "return -4 / tau *", "return -4 *"),
    ("losses", ".sigmoid() * advantages, {", ".sigmoid(), {"),
    # aggregation: divisors, empty slices, what counts
    ("aggregation", "tensor.masked_fill(~mask.bool(), 0.0)", "tensor * mask"),
    ("aggregation", "tensor.masked_fill(~mask.bool(), 0.0)", "tensor.masked_fill(~mask.bool().roll(1, -1), 0.0)"),
    ("aggregation", "mask.bool().sum() if dim is None else mask.bool().sum(dim)", "mask.numel() / torch.ones(())"),
    ("aggregation", '(count.clamp(min=1) if empty == "zero" else count)', "count.clamp(min=1)"),
    ("aggregation", '(count.clamp(min=1) if empty == "zero" else count)', "count"),
    ("aggregation", "_masked_sum(tensor, mask, dim) / normalize_constant", "masked_mean(tensor, mask, dim) / normalize_constant"),
    ("aggregation", "numerator / divisor if divisor > 0 else numerator * 0.0", "numerator / divisor"),
    ("aggregation", 'dim=-1, empty="zero").sum(), n_sequences)', 'dim=-1, empty="zero").sum(), len(response_mask))'),
    ("aggregation", 'dim=-1, empty="zero").sum(), n_sequences)', "dim=-1).sum(), n_sequences)"),
    ("aggregation", 'dim=-1, empty="zero").sum(), n_sequences)', 'dim=None, empty="zero") * len(response_mask), n_sequences)'),
    ("aggregation", "masked_normalize(per_token_loss, response_mask, constant), n_sequences)", "masked_normalize(per_token_loss, response_mask, per_token_loss.shape[1]), n_sequences)"),
    ("aggregation", "constant is None or constant <= 0", "constant is None"),
    ("aggregation", "dim=None), n_tokens)", "dim=None), int(response_mask.sum()))"),
    ("aggregation", 'kept.new_ones(kept.shape) if length_norm == "constant" else kept', "kept"),
    ("aggregation", 'kept.new_ones(kept.shape) if length_norm == "constant" else kept', 'kept.new_ones(kept.shape) if length_norm != "token" else kept'),
    ("aggregation", "kept & (lengths > 0)", "kept"),
    ("aggregation", "int(lengths[kept].sum())", "int(lengths.sum())"),
    # KL, entropy
    ("terms", "lambda x: x,", "lambda x: -x,"),
    ("terms", "(-x).expm1() + x", "x.expm1() - x"),
    ("terms", "(-x).expm1() + x", "(-x).exp() - 1 + x"),
    ("terms", "    if old_log_probs is None:\n", "    if True:\n"),
    ("terms", "response_mask).exp().detach()", "response_mask).exp()"),
    ("terms", "masked_log_ratio(policy_log_probs, reference_log_probs,", "masked_log_ratio(reference_log_probs, policy_log_probs,"),
    ("terms", "kl_coef * kl.detach().sum(-1)", "kl_coef * kl.sum(-1)"),
    ("terms", "kl_coef * kl.detach().sum(-1)", "kl_coef * kl.detach().mean(-1)"),
    ("terms", "return -entropy_coef", "return entropy_coef"),
    ("terms", "not token_entropy.requires_grad", "token_entropy.requires_grad"),
    ("terms", "entropy_coef != 0 and torch.is_grad_enabled() and", "entropy_coef != 0 and"),
    # mismatch, overlong, zero variance
    ("terms", "ratio.clamp(max=cap)", "ratio.clamp(min=cap)"),
    ("terms", "ratio.clamp(max=cap)", "ratio"),
    ("terms", "ratio.masked_fill(over, 0.0)", "ratio.masked_fill(~over, 0.0)"),
    ("terms", "masked_log_ratio(old_log_probs, engine_log_probs,", "masked_log_ratio(engine_log_probs, old_log_probs,"),
    ("terms", ".detach().exp()", ".exp()"),
    ("terms", "weights = ratio.new_ones(ratio.shape)", "weights = ratio"),
    ("terms", "if cap is None:", "if False:"),
    ("advantages", "(max_length - cache_length - lengths)", "(max_length - lengths)"),
    ("advantages", ".clamp(-1.0, 0.0)", ".clamp(max=0.0)"),
    ("advantages", "if not 0 < cache_length <= max_length:", "if not 0 <= cache_length <= max_length:"),
    ("advantages", "kept = ~truncated", "kept = truncated"),
    ("advantages", "(values != 0)", "(values.abs() > 1e-6)"),
    ("advantages", 'reduce="amin", include_self=False', 'reduce="amin", include_self=True'),
    ("advantages", "groups = group_by_id(group_ids)\n    return sums", "groups = group_by_id((values * 0 + 1).cumsum(0).long() // 2)\n    return sums"),
    # scoring
    ("terms", ".masked_fill(probs == 0, 0.0)", ""),
    ("terms", "* log_probs.masked_fill(probs == 0, 0.0)).sum(-1)", "* log_probs.masked_fill(probs == 0, 0.0)).mean(-1)"),
    ("terms", "logits if logits.element_size() == 8 else logits.float()", "logits"),
    ("terms", "labels[..., None]", "labels.roll(-1, -1)[..., None]"),
    # rules and card
    ("published", 'o.loss.loss_type == "gspo" and o.length_norm.kind == "token"', 'o.loss.loss_type == "gspo" and o.length_norm.kind == "constant"'),
    ("published", 'placement == "none" and coef', "False"),
    ("published", "(coef is None or coef <= 0)", "coef is None"),
    ("published", 'o.kl_estimator == "k1"', 'o.kl_estimator == "k2"'),
    ("published", 'o.zero_variance == "skip" and', 'o.zero_variance == "keep" and'),
    ("published", "cliprange_high=0.28", "cliprange_high=0.2"),
    ("published", '"rloo",\n        baseline="leave_one_out",', '"rloo",'),
    ("losses", "{1 - cliprange_low:g}", "{1 + cliprange_low:g}"),
    ("card", 'o.std_norm == "none"', 'o.std_norm == "group_mean"'),
    ("card", '("k3", "loss"): "gradient on samples from pi: that of KL(ref || pi)', '("k3", "loss"): "gradient: that of KL(pi || ref)'),
    ("published", 'numbers["cliprange_low"] != numbers["cliprange_high"]', "False"),
]  # fmt: skip


def judge(mutant: tuple[str, str, str]) -> str:
    """Say what became of one mutant: a copy of the package in which the new text stands for the old one."""
    module, old, new = mutant
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(ROOT / "rlreason", folder / "rlreason", ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "tests").mkdir()
        files = [f"tests/test_objectives_{part}.py" for part in TESTS.get(module, ("terms",))]
        for file in files:
            shutil.copy(ROOT / file, folder / file)
        source = folder / f"rlreason/objectives/{module}.py"
        if source.read_text().count(old) != 1:
            return "DOES NOT FIT"
        source.write_text(source.read_text().replace(old, new))
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": name}
        argv = [sys.executable, "-m", "pytest", *QUICKLY, *files]
        done = subprocess.run(argv, cwd=folder, env=environment, capture_output=True, check=False)
        return OUTCOMES.get(done.returncode, "DOES NOT RUN")


def main(modules: list[str]) -> int:
    """Judge every mutant (of the named modules), print one line each, and return the exit code."""
    mutants = [mutant for mutant in MUTANTS if not modules or mutant[0] in modules]
    survived = 0
    with ThreadPool(2) as pool:
        for (module, old, new), outcome in zip(mutants, pool.imap(judge, mutants), strict=True):
            survived += outcome != "killed"
            print(f"{outcome:<12} {module}: {old!r} -> {new!r}", flush=True)
    print(f"{len(mutants) - survived} of {len(mutants)} mutants killed")
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
