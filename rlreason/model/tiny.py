"""A very small Llama with its own tokenizer, made at run time, so that no model has to be downloaded."""

from collections.abc import Iterable

from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rlreason.config.model import TINY_CONTEXT
from rlreason.model.alone import alone
from rlreason.model.tiny_formats import END, PAD, TAGS, train_tokenizer


def build_tokenizer(texts: Iterable[str], vocab_size: int = 512) -> PreTrainedTokenizerFast:
    """`train_tokenizer`'s for transformers. The four r1_zero tags are one token each, and stay in the decoded text."""
    core = train_tokenizer(texts, vocab_size)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END, pad_token=PAD)
    tokenizer.add_tokens(list(TAGS))
    return tokenizer


def build_model(
    vocab_size: int, width: int = 128, layers: int = 2, heads: int = 4, init_scale: float = 0.06, seed: int = 0
) -> LlamaForCausalLM:
    """A Llama with random weights drawn by `seed`. A larger initial scale than usual lets a small model learn fast."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=TINY_CONTEXT,
        initializer_range=init_scale,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
    )
    with alone(seed):
        return LlamaForCausalLM(config)
