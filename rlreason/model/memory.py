"""The memory of a run, in bytes: the shape of its model, read without loading it, and one formula of plain numbers."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from rlreason.config.leaves import may_be_hub_name
from rlreason.config.model import TINY_CONTEXT, ModelConfig, TinyModelConfig
from rlreason.config.run import RunConfig
from rlreason.runtime.machine import Device, place_of

CHUNK = 512  # positions whose logits exist at once: model/log_probs.py
PROMPT_TOKENS = 8192  # of prompts read in one pass of the in-process engine: engines/decoding.py
CACHE_BLOCK = 128  # tokens: vLLM allocates its cache in blocks of at most this; each sequence may leave one unfilled
PROMPT = 384  # tokens assumed for a question without its template, until the prompts are measured
TINY_PROMPT = 128
TINY_VOCABULARY = 2048 + 4  # most tokens of the built-in model: its tokenizer's, and the four tags
#: Bytes that norms of queries and keys keep for the gradient of each number of these, under half-precision products.
EACH_HEAD, ALL_HEADS = 6, 8
#: model_type in config.json -> these bytes.
FAMILIES = {"llama": 0, "qwen2": 0, "qwen3": EACH_HEAD, "olmo2": ALL_HEADS}
ATTENTION = {"full_attention", "sliding_attention"}  # entries of layer_types
#: Entries of a config.json with layers that the plan has no formula for: experts, and a state from token to token.
OF_OTHER_LAYERS = (
    "num_experts", "num_local_experts", "n_routed_experts", "mamba_d_state", "state_size", "linear_num_key_heads",
    "hybrid_override_pattern", "kv_lora_rank",
)  # fmt: skip
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A Llama-like decoder: grouped attention and a gated MLP of three matrices; norms and biases are left out."""

    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int  # width inside the MLP
    tied: bool  # the output head is the embedding
    norm_bytes: int = 0  # of the norms of queries and keys: 0, EACH_HEAD or ALL_HEADS
    context: int = 1 << 30  # tokens with positions

    @property
    def query_width(self) -> int:
        """Numbers in all queries of a token."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Numbers in all keys of a token, and in all its values."""
        return self.kv_heads * self.head_dim

    @property
    def outside_layers(self) -> int:
        """Parameters of embedding and output head, tied ones once."""
        return self.vocab * self.width * (1 if self.tied else 2)

    @property
    def numbers(self) -> int:
        """Number of parameters, tied ones once."""
        return self.outside_layers + sum(a * b for a, b in self.linear_layers().values())

    def linear_layers(self) -> dict[str, tuple[int, int]]:
        """Name, as in transformers -> (inputs, outputs) of every linear layer but the output head."""
        d, q, kv, inner = self.width, self.query_width, self.kv_width, self.intermediate
        of_layer = {
            "self_attn.q_proj": (d, q),
            "self_attn.k_proj": (d, kv),
            "self_attn.v_proj": (d, kv),
            "self_attn.o_proj": (q, d),
            "mlp.gate_proj": (d, inner),
            "mlp.up_proj": (d, inner),
            "mlp.down_proj": (inner, d),
        }
        return {f"model.layers.{n}.{name}": size for n in range(self.layers) for name, size in of_layer.items()}


#: The published shapes of the models in conf/model, for a plan before anything is downloaded.
PUBLISHED = {
    name: ModelShape(**sizes)
    for name, sizes in yaml.safe_load(Path(__file__).with_name("published.yaml").read_text()).items()
}


def shape_of(model: ModelConfig) -> tuple[ModelShape | None, str]:
    """Return a model's shape, if known, and where it was read or why it is unknown.

    A built-in model is assumed to have as many tokens as its tokenizer may; the run's texts decide.
    """
    if isinstance(model, TinyModelConfig):
        width, heads = model.width, model.heads
        sizes = width, model.layers, heads, heads, width // heads, 3 * width
        return ModelShape(TINY_VOCABULARY, *sizes, True, context=TINY_CONTEXT), "model=tiny"
    name = model.folder or ""
    file: Any = Path(name) / "config.json"
    if not Path(name).is_dir():
        from huggingface_hub import try_to_load_from_cache

        file = None
        with suppress(ValueError):  # not a valid name on the hub
            file = try_to_load_from_cache(name, "config.json")
    if isinstance(file, str | Path):
        shape = None
        with suppress(Exception):  # a file of any contents
            shape = shape_from(json.loads(Path(file).read_text(encoding="utf-8")))
        return shape, str(file) if shape else f"the shape is unknown: {file} has experts, a state, or no sizes"
    if name in PUBLISHED:
        return PUBLISHED[name], f"the published shape of {name}"
    cure = f": hf download {name} config.json" if may_be_hub_name(name) else ""
    return None, f"the shape of {name} is unknown until its config.json is here{cure}"


def shape_from(config: Mapping[str, Any]) -> ModelShape | None:
    """Read the shape from a config.json, or from its text part; None unless every layer is attention and one MLP.

    A family that is not in `FAMILIES` is taken for a Llama, which has no norms of queries and keys: a few percent.
    """
    config = config.get("text_config") or config
    heads, kinds = config.get("num_attention_heads", 0), set(config.get("layer_types") or ())
    if kinds - ATTENTION or any(config.get(key) for key in OF_OTHER_LAYERS):
        return None
    return ModelShape(
        vocab=config["vocab_size"],
        width=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or max(1, config["hidden_size"] // heads),
        intermediate=config["intermediate_size"],
        tied=bool(config.get("tie_word_embeddings")),
        norm_bytes=FAMILIES.get(config.get("model_type", ""), 0),
        context=config.get("max_position_embeddings") or 1 << 30,
    )


@dataclass(frozen=True, slots=True)
class Sampled:
    """Responses requested at once."""

    count: int
    group: int  # per prompt
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """The memory-relevant settings of a run, as plain numbers. Sizes are bytes per number, lengths are tokens."""

    shape: ModelShape
    weights: int = 4
    products: int = 4
    trained: int = 0  # numbers
    gradients: int = 0  # bytes of one for every trained number
    adapters: bool = False  # the trained numbers are separate from the model's weights
    optimizer: str = "adamw"
    checkpointing: bool = False
    tokens: int = 8192  # of the longest micro-batch
    reference: bool = False
    restarts: bool = False
    prompt: int = PROMPT
    sampled: tuple[Sampled, ...] = ()
    max_rows: int = 256
    on_gpu: bool = False
    engine: str = "hf"
    compiled: bool = False
    resident: bool = False  # the engine keeps its memory during training
    elsewhere: bool = False  # the engine has its own GPU, or several
    engines: int = 1  # that share the sampling
    cache_gb: float | None = None
    ranks: int = 1  # processes that train
    parallel: str = "auto"  # replicate | shard | auto: what fits

    @property
    def casts(self) -> int:
        """Bytes of autocast's half-precision copies of the linear layers' wider weights, without the head."""
        return 2 * (self.shape.numbers - self.shape.outside_layers) if self.products < self.weights else 0

    @property
    def kept_casts(self) -> int:
        """Those that autocast keeps until a pass ends: of trained weights."""
        return 0 if self.adapters else self.casts

    @property
    def head_gradient(self) -> int:
        """Bytes of the output head's gradient, which is summed in float32."""
        return 0 if self.adapters else 4 * self.shape.vocab * self.shape.width

    @property
    def longest(self) -> int:
        """Tokens of the longest sampled sequence."""
        return min(self.shape.context, self.prompt + max((s.max_tokens for s in self.sampled), default=0))


def workload_of(run: RunConfig, shape: ModelShape, device: Device, prompt: int | None = None) -> Workload:
    """Return the workload of a run; `prompt`: tokens of its longest prompt, if known."""
    settings: Any = run
    model, rollout, trains, place = run.model, run.rollout, run.trains, place_of()
    on_gpu, weights = device.kind == "cuda", 2 if model.weights == "bfloat16" else 4
    half = model.dtype in ("bfloat16", "float16") or (model.dtype == "auto" and on_gpu and device.bf16)
    lora, trained, gradients = model.lora, 0, 0
    prompt = prompt or (TINY_PROMPT if model.made_on_the_spot else PROMPT)
    asked = [(one.responses_at_the_end, one.evaluation) for one in (run, *run.by_set().values())]
    sampled = [Sampled(responses, of.samples, of.sampling.max_tokens) for responses, of in asked]
    tokens = most = run.micro_batch_tokens
    if run.samples_to_learn:
        most = min(most, shape.context, prompt + run.sampling.max_tokens)
        sampled.append(Sampled(run.responses_per_step, settings.group_size, run.sampling.max_tokens))
    if trains:
        trained, gradients = trained_numbers(shape, weights, model.freeze, lora.rank, lora.targets)
        tokens = min(tokens, (settings.sequences_per_micro_batch() or settings.train_batch_size) * most)
    return Workload(
        shape=shape,
        weights=weights,
        products=2 if half or weights == 2 else 4,
        trained=trained,
        gradients=gradients,
        adapters=trains and lora.rank > 0,
        optimizer=run.optimizes_by or "adamw",
        checkpointing=model.gradient_checkpointing,
        tokens=tokens,
        reference=getattr(run, "kl_placement", "none") != "none",
        restarts=getattr(run, "restarts", False),
        prompt=prompt,
        sampled=tuple(sampled),
        max_rows=rollout.max_rows,
        on_gpu=on_gpu,
        engine=rollout.engine,
        compiled=rollout.compile,
        resident=rollout.engine == "vllm" and not (on_gpu and rollout.sleep and rollout.shares_gpu),
        elsewhere=rollout.engine == "vllm" and rollout.placement == "second_gpu",
        engines=rollout.gpus if rollout.engine == "vllm" else 1,
        cache_gb=rollout.kv_cache_gb,
        ranks=(place.world if place else run.ranks_requested) if trains else 1,
        parallel=getattr(run, "parallel", "auto"),
    )


def weight_bytes(shape: ModelShape, weights: int) -> int:
    """Weights of `weights` bytes each (4 or 2). The output head, and an embedding tied to it, stays float32.

    weights x (numbers - head) + 4 head
    """
    head = shape.vocab * shape.width
    return weights * (shape.numbers - head) + 4 * head


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a shell pattern matches the name entirely or from a dot on."""
    return any(fnmatchcase(name, p) or fnmatchcase(name, f"*.{p}") for p in patterns)


def trained_numbers(
    shape: ModelShape, weights: int, freeze: Sequence[str] = (), rank: int = 0, targets: Sequence[str] | None = None
) -> tuple[int, int]:
    """Return how many numbers are trained, all but the frozen ones or those of adapters, and the bytes of a gradient.

    An adapter of rank r on a layer of `in` and `out` numbers has r (in + out), in float32 (arXiv:2106.09685). A
    gradient has its weight's precision.
    """
    layers = shape.linear_layers()
    if rank:
        numbers = sum(rank * sum(size) for name, size in layers.items() if matches(name, targets or ["*"]))
        return numbers, 4 * numbers
    table, head = shape.vocab * shape.width, EMBEDDING if shape.tied else HEAD
    sizes = {EMBEDDING: table, head: table} | {f"{name}.weight": a * b for name, (a, b) in layers.items()}
    if shape.tied and matches(HEAD, freeze):  # tied weights have two names
        del sizes[EMBEDDING]
    kept = {name: size for name, size in sizes.items() if not matches(name, freeze)}
    return sum(kept.values()), sum(size * (4 if name == head else weights) for name, size in kept.items())


def moment_bytes(trained: int, gradients: int, optimizer: str) -> int:
    """Both moments of every trained number: adamw in its precision; adamw_8bit in one byte each, and their scales.

    adamw: 2 gradients;    adamw_8bit: 2 (1 + 4 / 256) trained
    """
    return 2 * gradients if optimizer == "adamw" else 2 * trained + 8 * -(-trained // 256)


def head_bytes(work: Workload, scored: int, with_gradient: bool = True) -> int:
    """Peak bytes of the output head for `scored` positions. n = min(512, scored).

        forward:   8 n V + r (V + scored) d
        backward:  4 scored d + 4 V d + max(12 n V, 4 n V + 4 V d) + r (V + scored) d

    Logits, their exponentials and what an entropy's gradient adds, or one chunk's gradient of the weight beside their
    sum; without the terms 4 V d under adapters. r: 2 for operands rounded to half precision, else 0.
    """
    n, v, d = min(CHUNK, scored), work.shape.vocab, work.shape.width
    operands, weight = 2 * (v + scored) * d if work.products == 2 else 0, work.head_gradient
    if not with_gradient:
        return 8 * n * v + operands
    return 4 * scored * d + weight + max(12 * n * v, 4 * n * v + weight) + operands


def saved_by_layer(shape: ModelShape, products: int) -> int:
    """Bytes that autograd keeps of one token in one layer, with products of `products` bytes a number.

        float32:  4 (6 d + 2 q + 2 k + 4 m + h) + 8 (q + k)
        bfloat16: 4 (4 d + h) + 2 (5 d + 2 q + 2 k + 4 m) + norm (q + k)

    d: width; q, k: all queries and all keys of a token; m: inside the MLP; h: heads (log-sum-exps). A norm keeps its
    input and its output before the weight; a product keeps its input, which autocast rounds once for each layer that
    reads it (three of attention, two of the MLP). Attention keeps queries, keys, values and outputs; the MLP the
    outputs of gate, SiLU and up, and their product. The last term is of norms of queries and keys, where there are any.
    """
    d, q, k, m = shape.width, shape.query_width, shape.kv_width, shape.intermediate
    norm = shape.norm_bytes * (q + k)
    if products == 4:
        return 4 * (6 * d + 2 * q + 2 * k + 4 * m + shape.heads) + (8 * (q + k) if norm else 0)
    return 4 * (4 * d + shape.heads) + 2 * (5 * d + 2 * q + 2 * k + 4 * m) + norm


def training_bytes(work: Workload) -> tuple[int, int, int]:
    """Return (activations, casts, further bytes) at the peak of a forward and backward pass, without gradients.

    Of activations the layers', or with gradient checkpointing their inputs; then the last norm, the rotary table and
    the head's input, in float32.
    The peak is in the head's backward pass; or in that of a layer, once checkpointing has recomputed it, beside the
    head's gradient, which waits for that of a tied embedding. The graph holds the casts of all layers; with
    checkpointing they last as long as the forward pass, or a layer's.
    """
    s, of_layer = work.shape, saved_by_layer(work.shape, work.products)
    input_of_layer = 4 * s.width
    of_layers = s.layers * (input_of_layer if work.checkpointing else of_layer)
    kept = work.tokens * (of_layers + 4 * (3 * s.width + 2 * s.head_dim))
    # in one layer's backward pass, two gradients inside the MLP and two of the stream
    layer = work.tokens * (2 * work.products * s.intermediate + 4 * s.width) + work.head_gradient
    head = head_bytes(work, work.tokens)
    if not work.checkpointing:
        return kept, work.casts, max(head, layer)
    again = work.tokens * (of_layer - input_of_layer)
    return kept, 0, max(head, layer + again + work.casts // s.layers, work.kept_casts + again)


def forward_bytes(work: Workload, tokens: int, scored: int) -> int:
    """A pass without gradients: one layer's numbers, or hidden states and the logits of a chunk."""
    s = work.shape
    layer = tokens * (3 * work.products * s.intermediate + 4 * 3 * s.width)
    return max(layer, 4 * (tokens + scored) * s.width + head_bytes(work, scored, with_gradient=False))


def kv_of_token(layers: int, kv_width: int, size: int) -> int:
    """Keys and values of one token in all layers: 2 L k numbers of `size` bytes, k = key heads x their size.

    >>> kv_of_token(28, 2 * 128, 2)
    28672
    """
    return 2 * layers * kv_width * size


def in_process_bytes(work: Workload, request: Sampled) -> tuple[int, int]:
    """Return the bytes of (the in-process engine's cache, what it takes beside it at its peak) for a request.

        cache = (P prompt + rows response) kv,    P = rows / group, rounded up; one more for each row if compiled

    Beside it, of each row tokens, log-probabilities and random numbers, and a step or the reading of prompts: logits
    and probabilities in float32 and, of small vocabularies, sums of these in float64, with a layer's attention scores
    three times; or keys and values of a layer once more, when the cache moves; or the prompts' keys and values and the
    numbers of a pass. Prompts are read before the cache of their responses is there, unless more responses are
    requested than there are rows.
    """
    s, group, response, prompt = work.shape, max(1, request.group), request.max_tokens, work.prompt
    rows = min(max(work.max_rows // group * group, group), request.count)
    prompts, columns = -(-rows // group), prompt + response
    token = kv_of_token(s.layers, s.kv_width, work.products)
    responses = rows * response * token
    cache = (prompts + (rows if work.compiled else 0)) * prompt * token + responses
    logits = 4 * rows * s.vocab
    step = (4 if s.vocab <= 8 * 256 else 2) * logits + 3 * 4 * rows * s.heads * columns
    # while being read, keys are float32, because of rotary positions, and values have the products' type
    as_read = prompts * prompt * kv_of_token(s.layers, s.kv_width, (4 + work.products) // 2)
    read = logits + as_read + forward_bytes(work, min(PROMPT_TOKENS, prompts * prompt), prompts)
    before = 0 if request.count > rows else responses
    beside = max(step, logits + responses // s.layers, read - before)
    return cache, rows * (20 * response + 4 * columns) + beside


def vllm_cache(token: int, room: int, max_len: int, max_rows: int, cache_gb: float | None) -> tuple[int, int]:
    """Return (bytes of vLLM's cache, bytes of one sequence); `token`: bytes of one token.

        one = token (max_len + 128),    cache = max(one, min(one max_rows, 0.4 room))

    As much as `max_rows` sequences of `max_len` tokens need, at most 40% of `room`: of what is free without the weights
    and what the trainer takes later. `cache_gb` (of 2^30 bytes) overrides it.
    """
    one = token * (max_len + CACHE_BLOCK)
    if cache_gb is not None:
        return int(cache_gb * 2**30), one
    return max(one, min(one * max_rows, int(0.4 * room))), one
