"""The model being trained: load it, encode text for it, compute log-probabilities under it, save it."""

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache
from transformers.utils import logging as hf_logging

from rlreason.errors import ConfigError
from rlreason.model.attention import NAMES
from rlreason.model.kernels import pick
from rlreason.model.logprobs import chunked_log_probs
from rlreason.model.lora import merged_weights
from rlreason.model.memory import model_size, round_weights
from rlreason.model.packing import PackedBatch, pack
from rlreason.runtime.atomic_files import whole

hf_logging.disable_progress_bar()  # a run shows its own progress

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def pick_device() -> torch.device:
    """The GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of matrix products."""
    if name == "auto":
        half = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if half else torch.float32
    return DTYPES[name]


class Policy:
    """A causal language model with its tokenizer; the one place that turns token ids into log-probabilities."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        compute_dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        weights: torch.dtype = torch.float32,
        attention: str = "auto",
    ) -> None:
        """Weights of lower precision than float32 also set the precision of products; the output head keeps float32.

        `attention`: the kernel for packed sequences, auto or one of `attention.NAMES`.
        """
        self.device = device or pick_device()
        self.tokenizer = tokenizer
        self.remarks: list[str] = []  # what was done to the model to save memory, for `describe`
        self.model = model.float().eval()  # eval: dropout would make the first ratio differ from 1
        self.weights, self.compute_dtype = weights, compute_dtype
        products = compute_dtype if weights == torch.float32 else weights
        self.attention, self.why_attention = pick(attention, self.device, products)
        if weights == torch.float32:
            self._move()
            self.check_model()
        else:  # the float32 weights may be more than the device holds
            self.check_model()
            round_weights(self.model, weights)
            self.compute_dtype = weights
            self._move()
        if self.attention != "sdpa":
            self.check_kernel()

    def _move(self) -> None:
        self.model.to(device=self.device)  # type: ignore[arg-type, call-arg]  # the wrapper hides torch's signature

    @property
    def head(self) -> Tensor:
        """(vocab, width) output weights."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight

    @property
    def backbone(self) -> nn.Module:
        """The model without its output head: token ids -> hidden states."""
        decoder: nn.Module = self.model.get_decoder()
        return decoder

    @property
    def end_ids(self) -> frozenset[int]:
        """Every token that ends a response: the tokenizer's, and those the model's makers list."""
        listed = self.model.generation_config.eos_token_id if self.model.generation_config else None
        several = listed if isinstance(listed, list) else [listed]
        return frozenset(i for i in (self.tokenizer.eos_token_id, *several) if i is not None)

    @property
    def max_context(self) -> int:
        """Tokens that every position can attend to: the trained length, or the sliding window where one acts."""
        config = self.model.config
        context = int(getattr(config, "max_position_embeddings", None) or 1 << 30)
        window = getattr(config, "sliding_window", None)
        layers = getattr(config, "layer_types", None)
        acts = "sliding_attention" in layers if layers else getattr(config, "use_sliding_window", True)
        return min(context, int(window)) if window and acts else context

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """The context in which matrix products have the compute dtype."""
        if self.compute_dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute_dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """(rows, width) -> (rows, vocab) float32. The head's product is never rounded to half precision."""
        with torch.autocast(self.device.type, enabled=False):
            return F.linear(hidden.to(self.head.dtype), self.head).float()

    def read(self, batch: PackedBatch, cache: Cache | None = None) -> Tensor:
        """Hidden states (total, width) of packed sequences; keys and values go into `cache` where one is given."""
        hidden: Tensor = self.backbone(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            past_key_values=cache,
            use_cache=cache is not None,
            cu_seq_lens_q=batch.bounds,
            cu_seq_lens_k=batch.bounds,
            max_length_q=batch.longest,
            max_length_k=batch.longest,
        ).last_hidden_state[0]
        return hidden

    def log_probs(
        self, batch: PackedBatch, temperature: float = 1.0, want_entropy: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of every response token, both (scored,) float32, both with gradient."""
        with self.autocast():
            hidden = self.read(batch)
        scored = hidden.index_select(0, batch.score_at).to(self.head.dtype)
        return chunked_log_probs(scored, self.head, batch.labels, temperature, want_entropy=want_entropy)

    @torch.no_grad()
    def check_model(self) -> None:
        """Switch to packed attention, and refuse a model that this changes: its log-probabilities would be wrong.

        Compared with the model's own plain forward pass. What differs in a refused one: logits that are capped,
        scaled or shifted after the output head, attention with caps or sinks.
        """
        here, pairs = self.head.device, self._short_pairs()
        self.model.set_attn_implementation("eager")
        plain = [torch.tensor([[*p, *r]], device=here) for p, r in pairs]
        logits = [self.model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1) for ids in plain]
        theirs = [lp[len(p) + t - 1, y] for lp, (p, r) in zip(logits, pairs, strict=True) for t, y in enumerate(r)]
        self.model.set_attn_implementation(NAMES[self.attention])
        dtype, self.compute_dtype = self.compute_dtype, torch.float32
        ours, _ = self.log_probs(pack(pairs, here))
        self.compute_dtype = dtype
        worst = (ours - torch.stack(theirs)).abs().max().item()
        if math.isnan(worst):
            raise ConfigError(
                f"model {type(self.model).__name__} gives log-probabilities that are no numbers, as weights do that a "
                "diverged run has left: give another model"
            )
        if not worst < 1e-3:  # float32 rounding stays below a tenth of this
            raise ConfigError(
                f"model {type(self.model).__name__} gives other log-probabilities here than in its own forward pass "
                f"(by up to {worst:.3g} nats), because of caps, scales or attention sinks: choose a model without "
                "them, such as Qwen2, Qwen3, Llama, OLMo 2 or SmolLM2"
            )

    def _short_pairs(self) -> list[tuple[list[int], list[int]]]:
        """Two short sequences that every model can read."""
        size = self.head.shape[0]
        return [([3 % size, 5 % size, 7 % size], [11 % size, 13 % size, 2 % size]), ([4 % size], [9 % size] * 3)]

    @torch.no_grad()
    def check_kernel(self) -> None:
        """Refuse a kernel that gives other log-probabilities than one causal call per sequence, in the same dtype."""
        pairs = self._short_pairs()
        ours, _ = self.log_probs(pack(pairs, self.device))
        self.model.set_attn_implementation(NAMES["sdpa"])
        plain, _ = self.log_probs(pack(pairs, self.device))
        self.model.set_attn_implementation(NAMES[self.attention])
        worst = (ours - plain).abs().max().item()
        if not worst < 0.5:  # what rounding in half precision may do to a token, as between engine and trainer
            raise ConfigError(
                f"model.attention={self.attention} gives other log-probabilities here than one call per sequence (by "
                f"up to {worst:.3g} nats): choose model.attention=sdpa"
            )

    def describe(self) -> str:
        """Size, precision, place and what was done to save memory, for a person."""
        where = (
            torch.cuda.get_device_name() if self.device.type == "cuda" else f"CPU, threads: {torch.get_num_threads()}"
        )
        size = f"{model_size(self.model) / 1e6:.3g} M parameters"
        products = f"{str(self.compute_dtype).removeprefix('torch.')} products"
        attention = f"attention by {self.attention} ({self.why_attention})"
        return "; ".join([f"{size}, {products}, {where}", attention, *self.remarks])

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a prompt, with whatever the tokenizer puts in front (a beginning-of-text token)."""
        ids: list[int] = self.tokenizer.encode(text)
        if len(ids) > 1 and ids[0] == ids[1] == self.tokenizer.bos_token_id:
            ids = ids[1:]  # the text brought its own
        return ids or [self.tokenizer.bos_token_id or self.tokenizer.eos_token_id]

    def encode_response(self, text: str, end: int | None = None) -> list[int]:
        """Token ids of a given response with its end token, which some data carries along; `end`: a chat's."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        end = self.tokenizer.eos_token_id if end is None else end
        return ids if ids[-1:] == [end] else [*ids, end]

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight under the name that transformers saves it with, tied ones once, adapters added in.

        One at a time, without gradient: the live tensors where nothing had to be added, so copy before changing.
        """
        yield from merged_weights(self.model)

    def save(self, folder: Path) -> None:
        """Write a model folder that `transformers` loads. Written beside its place and renamed when whole."""
        with whole(folder) as partial:
            self.model.save_pretrained(partial, state_dict={name: w.cpu() for name, w in self.named_weights()})
            self.tokenizer.save_pretrained(partial)


@contextlib.contextmanager
def _loading(path: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"model.path={path} cannot be loaded ({reason}): give a folder with config.json, safetensors weights and "
            "a tokenizer, or a hub name that this machine can reach"
        ) from error


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or a hub name; refused where it is empty or names no end token."""
    with _loading(path):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path)
    if not tokenizer.encode(
        "How many?", add_special_tokens=False
    ):  # for some models transformers makes up an empty one
        raise ConfigError(
            f"model.path={path} holds no tokenizer: copy tokenizer.json and tokenizer_config.json of the model that "
            "it was made from into it"
        )
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"model.path={path}: its tokenizer names no end-of-text token; set eos_token in its config")
    return tokenizer


def load_policy(path: str, dtype: str = "auto", weights: str = "float32", attention: str = "auto") -> Policy:
    """A policy from a model folder or a hub name."""
    device, tokenizer = pick_device(), load_tokenizer(path)
    with _loading(path):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    return Policy(model, tokenizer, pick_dtype(dtype, device), device, DTYPES[weights], attention)
