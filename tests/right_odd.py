"""Right functions in odd styles: other names, places, float64, a named tuple."""
# ruff: noqa: B905  # as a student writes it

from collections import namedtuple

import torch

Scored = namedtuple("Scored", "loss metadata")  # a named tuple is a tuple


def run_compute_entropy(x):
    x = x.double()
    x = x - x.max(-1, keepdim=True).values
    z = x.exp().sum(-1)
    return (z.log() - (x.exp() * x).sum(-1) / z).float()


def run_tokenize_prompt_and_output(prompts, outputs, tok, /):
    p = [tok(t, add_special_tokens=False).input_ids for t in prompts]
    o = [tok(t, add_special_tokens=False).input_ids for t in outputs]
    rows = [torch.tensor(a + b) for a, b in zip(p, o)]
    full = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=tok.pad_token_id)
    at = torch.arange(1, full.shape[1]).unsqueeze(0)
    begin, end = (torch.tensor(n).unsqueeze(1) for n in ([len(a) for a in p], [len(r) for r in rows]))
    return {
        "response_mask": ((at >= begin) & (at < end)).float(),
        "labels": full[:, 1:].clone(),
        "input_ids": full[:, :-1].clone(),
        "extra": None,
    }


def run_get_response_log_probs(*, model, input_ids, labels, return_token_entropy):
    logits = model(input_ids, attention_mask=torch.ones_like(input_ids)).logits.float()
    b, t, v = logits.shape
    lp = -torch.nn.functional.cross_entropy(logits.reshape(-1, v), labels.reshape(-1), reduction="none").view(b, t)
    return {"log_probs": lp, "token_entropy": run_compute_entropy(logits)}


def run_compute_grpo_clip_loss(advantages, policy_log_probs, old_log_probs, cliprange):
    r = (policy_log_probs - old_log_probs).exp()
    both = torch.stack([r * advantages, r.clamp(1 - cliprange, 1 + cliprange) * advantages])
    return Scored(-both.min(dim=0).values, {})
