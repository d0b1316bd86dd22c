"""The model being trained: load it, encode text for it, compute log-probabilities, save it."""

import contextlib
import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache, DynamicCache

from rlreason.errors import ConfigError
from rlreason.model.attention import NAMES, select_kernel
from rlreason.model.log_probs import chunked_log_probs, operand, product, use_fast_products, without_padding
from rlreason.model.packing import PackedBatch, Pair, divide, pack
from rlreason.model.parameters import (
    BASE,
    choose_dtype,
    hardware_here,
    load_model,
    load_tokenizer,
    model_size,
    pick_device,
    round_weights,
    seeded,
)
from rlreason.runtime.files import alive, whole
from rlreason.runtime.text import first_line


class Policy:
    """A causal language model with its tokenizer; everything that turns token ids into log-probabilities uses it."""

    keeps_casts = True  # keep half-precision copies of trained weights until the block of `autocast` ends
    packs = True  # pack several sequences into a row; else each gets its own forward pass, the model's own
    logit_scale = 1.0  # the model multiplies its logits by this
    padded_from: int | None = None  # the first row of the output head without a token, if any
    #: (pairs, token budget, temperature) -> scores by all ranks, if several train this policy.
    deal: "Callable[[Pairs, int, float], list[TokenScores]] | None" = None

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        compute_dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        weights: torch.dtype = torch.float32,
        attention: str = "auto",
        head_dtype: torch.dtype = torch.float32,
        in_main_memory: bool = False,
    ) -> None:
        """Move the model to `device` and check it: `ConfigError` if packed sequences would be scored wrongly.

        `compute_dtype` is that of matrix products; `weights` of lower precision than float32 set it, too, and the
        output head keeps float32. `attention`: auto, or one of `attention.NAMES`. `head_dtype`: that of the output
        head's operands; its sums and its weights are float32. `in_main_memory`: the model stays there, and computes on
        `device` only as parts on several ranks.
        """
        self.device, self.in_main_memory = device or pick_device(), in_main_memory
        self.tokenizer = tokenizer
        self.logit_scale = getattr(model.config, "lm_head_multiplier", 1) / getattr(model.config, "logits_scaling", 1)
        self.appends_end = tokenizer.encode("How many?")[-1] == tokenizer.eos_token_id
        tokens, rows = max(tokenizer.get_vocab().values()) + 1, model.get_output_embeddings().weight
        self.padded_from = tokens if tokens < len(rows) else None
        self.remarks: list[str] = []  # measures to save memory, for `describe`
        self.model = model.float().eval()  # eval: dropout would make the first ratio differ from 1
        self.weights, self.compute_dtype, self.head_dtype = weights, torch.float32, torch.float32  # for the check
        # Of packed rows, which the layout defines: without one, transformers would derive them from the positions.
        self._no_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)
        products = compute_dtype if weights == torch.float32 else weights
        self.attention, self.why_attention = select_kernel(attention, self.device, products)
        #: Whether responses share one copy of their prompt in a row; decided by the kernel, then by a check.
        self.shares_prompts = self.attention == {"cuda": "varlen", "cpu": "sdpa"}.get(self.device.type)
        if weights == torch.float32:
            self._move()
        check_model(self)
        self.compute_dtype, self.head_dtype = products, head_dtype
        if weights != torch.float32:  # the float32 weights may not fit on the device
            round_weights(self.model, weights)
            self._move()
        if in_main_memory:
            self._check_first_layer()
        elif self.attention in ("varlen", "flash_attention_2"):
            check_kernel(self)

    def _check_first_layer(self) -> None:
        """Check on the device with one layer only: all of them may not fit there."""
        if not self.packs:  # its first layer differs from the others
            raise ConfigError("parallel=shard cannot train a model one sequence at a time: set parallel=replicate")
        layers = next(part for part in self.model.modules() if isinstance(part, nn.ModuleList))
        others = layers[1:]
        del layers[1:]
        short, dtype, head = copy.deepcopy(self.model), self.compute_dtype, self.head_dtype
        layers.extend(others)
        part = Policy(short, self.tokenizer, dtype, self.device, attention=self.attention, head_dtype=head)
        self.shares_prompts = self.shares_prompts and part.shares_prompts
        self.remarks += [remark for remark in part.remarks if remark not in self.remarks]
        del short, part
        torch.cuda.empty_cache()  # leave it to an engine that starts next

    def copy(self, shared: Iterable[nn.Parameter] = ()) -> "Policy":
        """Copy the policy with its model, but for the shared weights; what was checked of it holds for the copy."""
        policy = copy.copy(self)
        policy.model, policy.remarks = copy.deepcopy(self.model, {id(weight): weight for weight in shared}), []
        return policy

    @property
    def weights_device(self) -> torch.device:
        """The device of the weights: inputs are packed there."""
        return torch.device("cpu") if self.in_main_memory else self.device

    def _move(self) -> None:
        self.model.to(device=self.weights_device)  # type: ignore[arg-type, call-arg]  # the wrapper hides torch's signature
        use_fast_products(self.model)

    @property
    def head(self) -> Tensor:
        """The output weights (vocab, width)."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight

    @property
    def backbone(self) -> nn.Module:
        """The model without its output head: token ids -> hidden states."""
        decoder: nn.Module = self.model.get_decoder()
        return decoder

    @property
    def end_ids(self) -> frozenset[int]:
        """Every token that ends a response: the tokenizer's, and those of the model's generation config."""
        listed = self.model.generation_config.eos_token_id if self.model.generation_config else None
        several = listed if isinstance(listed, list) else [listed]
        return frozenset(i for i in (self.tokenizer.eos_token_id, *several) if i is not None)

    def ends_turns_with(self, token: int | None) -> None:
        """Let the model that is saved end its responses with a chat's token, which a base model does not name."""
        if token is not None and token not in self.end_ids and self.model.generation_config:
            self.model.generation_config.eos_token_id = sorted({*self.end_ids, token})

    @property
    def max_context(self) -> int:
        """Tokens that every position can attend to: the trained length, or the sliding window if one is active."""
        config = self.model.config.get_text_config()
        context = int(getattr(config, "max_position_embeddings", None) or 1 << 30)
        window, layers = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
        acts = "sliding_attention" in layers if layers else getattr(config, "use_sliding_window", True)
        return min(context, int(window)) if window and acts else context

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Context in which matrix products are computed in `compute_dtype`."""
        if self.compute_dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute_dtype, cache_enabled=self.keeps_casts)

    def logits(self, hidden: Tensor) -> Tensor:
        """(rows, width) -> (rows, vocab) float32, by the same product as `log_probs`: sums are never rounded."""
        with torch.autocast(self.device.type, enabled=False):
            logits = product(*(operand(x, self.head_dtype) for x in (hidden, self.head)))
            scaled = logits if self.logit_scale == 1 else logits.mul_(self.logit_scale)
            return without_padding(scaled, self.padded_from)

    def hidden_states(self, batch: PackedBatch, cache: Cache | None = None) -> Tensor:
        """Hidden states (total, width) of packed sequences; keys and values go into `cache` if given."""
        if not self.packs:
            assert len(batch.lengths) == 1  # a state would carry over from one sequence to the next
            return self.read(batch.input_ids, cache)[0]
        hidden: Tensor = self.backbone(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=self._no_mask,
            past_key_values=cache,
            use_cache=cache is not None,
            layout=batch.layout,
        ).last_hidden_state[0]
        return hidden

    def read(self, ids: Tensor, cache: Cache | None = None) -> Tensor:
        """Hidden states (rows, tokens, width) by the model's own pass, after what is cached; without padding."""
        hidden: Tensor = self.backbone(input_ids=ids, past_key_values=cache, use_cache=cache is not None)[0]
        return hidden

    def pack(self, pairs: Sequence[Pair]) -> PackedBatch:
        """Pack (prompt ids, response ids) pairs into one row on the device; neighbours share a prompt if possible."""
        return pack(pairs, self.weights_device, self.shares_prompts)

    def divide(
        self, pairs: Sequence[Pair], budget: int, max_rows: int | None = None, sharers: int = 1
    ) -> list[list[int]]:
        """Divide the pairs, by number, into rows of at most `budget` tokens; see `packing.divide`."""
        return divide(pairs, budget, max_rows if self.packs else 1, self.shares_prompts, sharers)

    def log_probs(self, batch: PackedBatch, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of every response token, both (scored,) float32, both with gradient."""
        alive()
        with self.autocast():
            hidden = self.hidden_states(batch)
        types = self.head_dtype, self.compute_dtype if self.head_dtype == torch.float32 else self.head_dtype
        scored, scale = hidden.index_select(0, batch.score_at), temperature / self.logit_scale
        return chunked_log_probs(scored, self.head, batch.labels, scale, types, self.padded_from)

    def describe(self) -> str:
        """Describe size, precision, device, attention kernel and measures to save memory, in one line."""
        where = "Apple's GPU"
        if self.device.type == "cuda":
            where = torch.cuda.get_device_name()
        elif self.device.type == "cpu":
            where = f"CPU, threads: {torch.get_num_threads()}"
        products, head = (str(dtype).removeprefix("torch.") for dtype in (self.compute_dtype, self.head_dtype))
        if (products, head) != ("float32", "float32"):
            products += f" products, output head in {head}"
        facts = [f"{model_size(self.model) / 1e6:.3g} M parameters, {products}, {where}"]
        return "; ".join([*facts, f"attention by {self.attention} ({self.why_attention})", *self.remarks])

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a prompt, with the tokenizer's prefix (a beginning-of-text token); at least one.

        An end token that the tokenizer appends is left out: a response follows.
        """
        ids = self.checked_ids(self.tokenizer.encode(text))
        ids = ids[:-1] if self.appends_end else ids
        if len(ids) > 1 and ids[0] == ids[1] == self.tokenizer.bos_token_id:
            ids = ids[1:]  # the text has its own
        return ids or [self.tokenizer.bos_token_id or self.tokenizer.eos_token_id]

    def encode_response(self, text: str, end: int | None = None) -> list[int]:
        """Token ids of a given response, with one end token: the tokenizer's, or a chat's own, `end`."""
        ids = self.checked_ids(self.tokenizer.encode(text, add_special_tokens=False))
        end = self.tokenizer.eos_token_id if end is None else end
        return ids if ids[-1:] == [end] else [*ids, end]

    def checked_ids(self, ids: list[int]) -> list[int]:
        """Return the ids unchanged; `ConfigError` if the model has no row for one of them."""
        rows = self.model.get_input_embeddings().num_embeddings
        if ids and max(ids) >= rows:
            raise ConfigError(
                f"a text holds the token {self.tokenizer.convert_ids_to_tokens(max(ids))!r}, number {max(ids)}, and "
                f"the model has {rows}: remove it from the text, or give the tokenizer that belongs to the model"
            )
        return ids

    def engine_weights(self) -> Iterator[tuple[str, Tensor]]:
        """`named_weights` for a separate engine, in its number format.

        It cannot sample a row without a token: it gets none of those.
        """
        by_token = {self.head.data_ptr(), self.model.get_input_embeddings().weight.data_ptr()}
        for name, weight in self.named_weights():
            held = weight[: self.padded_from] if weight.data_ptr() in by_token else weight
            yield name, held.to(self.compute_dtype)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight and saved buffer under its name in transformers, with adapters merged:

            W' = W + (alpha / rank) B A

        One at a time, without gradient: live tensors if nothing had to be merged, so copy before changing. Tied weights
        come once, under the first of their names, which is the one that transformers saves.
        """
        seen: set[int] = set()
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if id(tensor) in seen or ".lora_" in name:
                continue
            seen.add(id(tensor))
            weight = tensor.detach()
            if name.endswith(BASE + "weight"):
                layer: Any = self.model.get_submodule(name.removesuffix(BASE + "weight"))
                for adapter in layer.active_adapters:
                    weight = (weight + layer.get_delta_weight(adapter).detach()).to(weight.dtype)
            yield name.replace(BASE, "."), weight

    def save(self, folder: Path) -> None:
        """Write a model folder that `transformers` loads; it appears under its name once it is complete."""
        with seeded(), whole(folder) as partial:
            self.model.save_pretrained(partial, state_dict={name: w.cpu() for name, w in self.named_weights()})
            self.tokenizer.save_pretrained(partial)


def load_policy(path: str, dtype: str = "auto", head_dtype: torch.dtype = torch.float32) -> Policy:
    """Load a policy from a model folder or a hub name; `ConfigError` if it cannot be loaded or fails a check.

    `dtype` is that of matrix products (auto, or one of `parameters.DTYPES`).
    """
    tokenizer, model = load_tokenizer(path), load_model(path)
    return Policy(model, tokenizer, choose_dtype(dtype, hardware_here()), head_dtype=head_dtype)


Pairs = Sequence[Pair]  # (prompt ids, response ids)
#: Log-probabilities and entropies, in nats, of the tokens of a response.
TokenScores = tuple[list[float], list[float]]


@dataclass(frozen=True, slots=True)
class LogProbScorer:
    """Scores responses under a policy, with its weights at the time of the call."""

    policy: Policy
    token_budget: int  # tokens of one pass, into which several pairs are packed
    temperature: float = 1.0  # above 0

    def __call__(self, pairs: Pairs) -> list[TokenScores]:
        """Return log-probabilities and entropies of the response tokens of each (prompt ids, response ids) pair."""
        if self.policy.deal is not None:  # several ranks train it, and score together
            return self.policy.deal(pairs, self.token_budget, self.temperature)
        scores = scored_rows(self.policy, pairs, self.policy.divide(pairs, self.token_budget), self.temperature)
        return [scores[i] for i in range(len(pairs))]

    def log_probs(self, pairs: Pairs) -> list[list[float]]:
        """Return log-probabilities only."""
        return [log_probs for log_probs, _ in self(pairs)]


@torch.no_grad()
def scored_rows(
    policy: Policy, pairs: Pairs, rows: Sequence[Sequence[int]], temperature: float
) -> dict[int, TokenScores]:
    """Return the scores of some of the pairs, by number, in one pass for each of `rows`."""
    scores: dict[int, TokenScores] = {}
    for numbers in rows:
        batch = policy.pack([pairs[i] for i in numbers])
        sizes = batch.lengths.tolist()
        log_probs, entropies = (values.split(sizes) for values in policy.log_probs(batch, temperature))
        for i, of_tokens, of_choices in zip(numbers, log_probs, entropies, strict=True):
            scores[i] = of_tokens.tolist(), of_choices.tolist()
    return scores


def weights_hash(weights: Iterable[tuple[str, Tensor]]) -> str:
    """Return 8 hex digits from about a thousand numbers spread over each tensor: training changes all of them."""
    digest = hashlib.sha256()
    for name, weight in weights:
        flat = weight.detach().reshape(-1)
        some = flat[:: max(1, len(flat) // 1024)].to("cpu", torch.float32)
        digest.update(f"{name}{tuple(weight.shape)}".encode() + some.numpy().tobytes())
    return digest.hexdigest()[:8]


SAME = 1e-3  # nats; rounding in float32 mostly stays below a tenth of it, in float64 below a millionth


class _InFloat64(TorchFunctionMode):
    """Have a model in float64 compute in it what it asks for in float32: its norms, the softmax of its attention."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(asked: Any) -> Any:
            return torch.float64 if asked is torch.float32 else asked

        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(wide, args), **{name: wide(asked) for name, asked in (kwargs or {}).items()})


@torch.no_grad()
def check_model(policy: Policy) -> None:
    """Switch the model to packed attention; `ConfigError` if that changes its log-probabilities.

    They are compared with the model's own forward pass, on short sequences and in float32; where they differ, once more
    in float64. A model is refused whose logits are capped or shifted after the output head, or whose attention has
    caps or sinks. One with recurrent layers is scored a sequence at a time, and refused if sampling from its cache
    gives other numbers.
    """
    # The kinds of layers with a convolution over tokens (short ones, state spaces), or else linear attention.
    layers = [m for m in policy.model.modules() if any(isinstance(child, nn.Conv1d) for child in m.children())]
    linear = {"linear_attention"}.intersection(getattr(policy.model.config, "layer_types", None) or ())
    states = ", ".join(sorted({type(layer).__name__ for layer in layers} or linear))
    if states:
        policy.packs = policy.shares_prompts = False
        policy.attention, policy.why_attention = "sdpa" if policy.model._supports_sdpa else "eager", "the model's own"
        policy.remarks.append(f"one sequence to a pass, which is slower ({states}: a state goes from token to token)")
    apart = _largest_difference(policy, states)
    if apart >= SAME and policy.device.type != "mps":  # which has no float64
        # Rounding alone does it where single numbers in a state are large, as in many pretrained models.
        policy.model.double()
        with _InFloat64():
            apart = _largest_difference(policy, states)
        policy.model.float()
    if not apart < SAME:  # also a diverged run's weights, which give NaN
        raise ConfigError(
            f"model {type(policy.model).__name__} gives other log-probabilities here than in its own forward pass, "
            f"because of caps, scales, sinks, or a state of {states or 'a layer'}: choose another model, such as "
            "Qwen2, Qwen3, Llama, OLMo 2 or SmolLM2"
        )


def _largest_difference(policy: Policy, states: str) -> float:
    """Compare log-probabilities with the model's own, and leave the policy's attention behind.

    `states`: the layers with a state, which is then compared token by token too; "" without.
    """
    policy.model.set_attn_implementation("eager")
    theirs = _model_log_probs(policy)
    policy.model.set_attn_implementation(NAMES[policy.attention] if policy.packs else policy.attention)
    found = [_packed_log_probs(policy)]
    if policy.shares_prompts and theirs.device.type == "cpu":  # on a GPU in half precision: `check_kernel`
        found.append(_packed_log_probs(policy, share=True))
    if states:
        try:
            found.append(_model_log_probs(policy, by_token=True))
        except Exception as error:  # a model with a cache of its own kind
            raise ConfigError(f"model: sampling from the cache of {states} fails ({first_line(error)})") from error
    return float((torch.stack(found) - theirs).abs().max())


def _model_log_probs(policy: Policy, by_token: bool = False) -> Tensor:
    """Log-probabilities of the short sequences by the model itself: all at once, or token by token from its cache."""
    found = list[Tensor]()
    for prompt, response in _short_pairs(policy):
        parts = [prompt, *([token] for token in response)] if by_token else [[*prompt, *response]]
        cache = {"past_key_values": DynamicCache(config=policy.model.config)} if by_token else {"use_cache": False}
        ids = [torch.tensor([part], device=policy.head.device) for part in parts]
        logits = torch.cat([policy.model(part, **cache).logits[0].float() for part in ids])
        log_probs = without_padding(logits, policy.padded_from).log_softmax(-1)
        found += [log_probs[len(prompt) + t - 1, token] for t, token in enumerate(response)]
    return torch.stack(found)


def _packed_log_probs(policy: Policy, share: bool = False) -> Tensor:
    """Log-probabilities of the short sequences, in one row, or in a row each if the policy scores that way."""
    pairs = _short_pairs(policy)
    rows = [pairs] if policy.packs else [[pair] for pair in pairs]
    return torch.cat([policy.log_probs(pack(row, policy.head.device, share))[0] for row in rows])


def _short_pairs(policy: Policy) -> list[Pair]:
    """Short sequences that every model can read, two with the same prompt; a longer one, where a state may drift."""
    size = policy.padded_from or len(policy.head)
    spans = [(3, 6, 11, 14), (3, 6, 6, 10), (4, 5, 9, 12)]
    if not policy.packs:
        spans.append((5, 8, 20, 60))
    return [([i % size for i in range(a, b)], [i % size for i in range(c, d)]) for a, b, c, d in spans]


def check_kernel(policy: Policy) -> None:
    """Compare the policy's kernel, in its own dtype, with one causal call per sequence.

    Stop sharing prompts if that changes log-probabilities or gradients, or cannot be computed here; `ConfigError` if
    they are other ones without sharing too. Half precision may change log-probabilities by a tenth of these bounds.
    """
    policy.model.set_attn_implementation(NAMES["sdpa"])
    log_probs, gradient = _with_gradient(policy)
    policy.model.set_attn_implementation(NAMES[policy.attention])
    for share in (True, False) if policy.shares_prompts else (False,):
        try:
            found = _with_gradient(policy, share)
        except Exception as error:  # this torch or GPU has another kernel, or none
            why = first_line(error)
        else:
            worst = (found[0] - log_probs).abs().max().item()
            apart = ((found[1] - gradient).norm() / gradient.norm()).item()
            if worst < 0.5 and apart < 0.1:
                continue
            why = f"log-probabilities differ by up to {worst:.2g}, gradients by {apart:.2g} of their norm"
        if not share:
            raise ConfigError(f"model.attention={policy.attention} is wrong here ({why}): choose model.attention=sdpa")
        policy.shares_prompts = False
        policy.remarks.append(f"each response is computed behind a prompt of its own ({why})")


def _with_gradient(policy: Policy, share: bool = False) -> tuple[Tensor, Tensor]:
    """Log-probabilities of short sequences, and the gradient of their sum by the input embeddings, in float32."""
    weight = policy.model.get_input_embeddings().weight
    is_trained = weight.requires_grad
    weight.requires_grad_(True)  # even for a frozen reference model
    log_probs = _packed_log_probs(policy, share)
    (gradient,) = torch.autograd.grad(log_probs.sum(), [weight])
    weight.requires_grad_(is_trained)
    return log_probs.detach(), gradient.float()
