"""The output head's product: rounded operands, float32 sums, and the same numbers in training and in sampling."""

import json

import torch
from conftest import random_pairs
from torch.nn import functional as F

from rlreason.engines.base import Prompt, Sampling
from rlreason.engines.hf.engine import HFEngine
from rlreason.model.log_probs import chunked_log_probs, operand, product
from rlreason.model.parameters import build_model
from rlreason.model.policy import LogProbScorer, Policy
from tests.starts import SMALL, rlreason

HALF, FULL = torch.bfloat16, torch.float32


def given(positions=48, width=64, vocab=300):
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(positions, width, generator=g), torch.randn(vocab, width, generator=g) / 4
    return hidden, weight, torch.randint(vocab, (positions,), generator=g), torch.randn(positions, generator=g)


def exact(hidden, weight, labels, along):
    """Log-probabilities and the gradients of their weighted sum, all in float64."""
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    found = F.log_softmax(hidden @ weight.t() / 0.7, -1).gather(1, labels[:, None])[:, 0]
    return found.detach(), *torch.autograd.grad(found @ along.double(), [hidden, weight])


def computed(hidden, weight, labels, along, chunk=16, **types):
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    found, _ = chunked_log_probs(hidden, weight, labels, 0.7, chunk, want_entropy=False, **types)
    return found.detach(), *torch.autograd.grad(found @ along, [hidden, weight])


def apart(a, b):
    """The distance of a from b as a share of b's norm."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def test_operands_are_rounded_and_sums_are_not():
    a, b, *_ = given()
    found = product(operand(a, HALF), operand(b, HALF))
    assert found.dtype == FULL
    assert apart(found, a.to(HALF).double() @ b.to(HALF).double().t()) < 1e-6
    assert apart(found, a.double() @ b.double().t()) > 1e-3  # operands were rounded
    assert apart(found.to(HALF), found) > 1e-3  # and rounded sums would have shown
    into = torch.ones(len(a), len(b))
    assert product(operand(a, HALF), operand(b, HALF), add_to=into) is into
    torch.testing.assert_close(into, found + 1, atol=1e-5, rtol=0)


def test_the_error_of_gradients_is_that_of_rounding_and_does_not_grow_with_the_chunks():
    """As the docstring says: about 0.2%, of three roundings to 8 bits, whatever the number of chunks."""
    hidden, weight, labels, along = given(positions=256)
    log_probs, *expected = exact(hidden.to(HALF), weight.to(HALF), labels, along)
    assert (computed(hidden, weight, labels, along, head=HALF)[0] - log_probs).abs().max() < 1e-5
    errors = {chunk: computed(hidden, weight, labels, along, head=HALF, chunk=chunk)[1:] for chunk in (256, 4)}
    for found in errors.values():
        for mine, theirs in zip(found, expected, strict=True):
            assert 1e-4 < apart(mine, theirs) < 4e-3
    for one, other in zip(errors[256], errors[4], strict=True):
        assert apart(one, other) < 1e-6  # summed in float32: sums in bfloat16 lose 1e-2 over 64 chunks


def test_in_float32_nothing_is_rounded():
    hidden, weight, labels, along = given()
    for mine, theirs in zip(computed(hidden, weight, labels, along), exact(hidden, weight, labels, along), strict=True):
        assert apart(mine, theirs) < 1e-6
    half, *gradients = computed(hidden, weight, labels, along, head=FULL, products=HALF)
    torch.testing.assert_close(half, computed(hidden, weight, labels, along)[0], atol=0, rtol=0)
    assert [g.dtype for g in gradients] == [FULL, FULL]


def test_the_engine_in_this_process_samples_with_the_trainers_head(tokenizer, policy):
    rounding = Policy(build_model(len(tokenizer), width=32, init_scale=0.3, seed=1), tokenizer, head_dtype=HALF)
    prompts = [Prompt(str(i), p, seed=i) for i, (p, _) in enumerate(random_pairs(policy.head.shape[0], 4))]
    responses = HFEngine(rounding).generate(prompts, Sampling(0.8, 0, 12), n=3)
    pairs = [(r.prompt_ids, r.token_ids) for r in responses]

    def gap(scored_by):
        """The median: a number that lies between two of bfloat16's is rounded up in one pass and down in the other."""
        scores = LogProbScorer(scored_by, 256, 0.8).log_probs(pairs)
        gaps = [abs(a - b) for r, s in zip(responses, scores, strict=True) for a, b in zip(r.log_probs, s, strict=True)]
        return sorted(gaps)[len(gaps) // 2]

    assert gap(rounding) < 5e-5
    assert gap(policy) > 5e-4  # the same weights under the other head


def test_a_run_records_its_head_and_measures_its_gap_with_it(tmp_path):
    done = rlreason(*SMALL, "model.head=bfloat16", "hydra.run.dir=run", "save_model=false", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "output head in bfloat16 products, float32 sums" in " ".join(done.stdout.split())
    told = json.loads((tmp_path / "run/provenance.json").read_text())
    assert told["device"]["head"] == "bfloat16"
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    gaps = [row["rollout/mismatch_max"] for row in rows if "rollout/mismatch_max" in row]
    assert len(gaps) == 2
    assert max(gaps) < 1e-4
