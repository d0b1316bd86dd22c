"""A very small Llama with its own tokenizer, and the cache of its start weights."""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, uint8
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rlreason.config.model import TINY_CONTEXT
from rlreason.model.parameters import seeded
from rlreason.runtime.text import first_line

END = "<|endoftext|>"
PAD = "<|pad|>"
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
VOCABULARY = 2048  # most tokens: enough for every word of every shipped prompt to be one token


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer on `texts`: any string survives encoding and decoding.

    A number of up to two digits is one token. `build_tokenizer` adds the tags.
    """
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d{1,2}| ?[^\s\d]+ ?|\s"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    return core


def build_tokenizer(texts: Iterable[str], vocab_size: int = 512) -> PreTrainedTokenizerFast:
    """Wrap `train_tokenizer`'s for transformers. The four r1_zero tags are one token each, and survive decoding."""
    core = train_tokenizer(texts, vocab_size)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END, pad_token=PAD)
    tokenizer.add_tokens(list(TAGS))
    return tokenizer


def build_model(
    vocab_size: int, width: int = 128, layers: int = 2, heads: int = 4, init_scale: float = 0.06, seed: int = 0
) -> LlamaForCausalLM:
    """Build a Llama with random weights from `seed`. Its larger initial scale lets a small model learn fast."""
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
    with seeded(seed):
        return LlamaForCausalLM(config)


Weights = dict[str, Tensor]

MAX_BYTES = 200 * 2**20  # of all entries together: about a hundred models of the default size
LOCK_TIMEOUT_S = 1800.0  # between looks at a lock, while another run makes the same model
SUFFIX = ".safetensors"


class BrokenWeightsError(Exception):
    """A weights file whose content is not what was written."""


def checksum(weights: Weights) -> str:
    """Return 16 hex digits of names, types, shapes and every bit of the values."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name]
        digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def copy_weights(named: Iterable[tuple[str, Tensor]]) -> Weights:
    """Copy the weights to main memory, without gradient."""
    return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in named}


def write_weights(path: Path, weights: Weights, key: str) -> None:
    """Write the weights with their key and checksum; `OSError` or `SafetensorError` if that fails.

    They are written under another name and renamed, so that no reader sees half a file.
    """
    partial = path.with_name(path.name + ".partial")
    save_file(weights, partial, metadata={"key": key, "checksum": checksum(weights)})
    partial.chmod(0o644)  # safetensors makes them private, but a package or a shared folder is read by others
    os.replace(partial, path)


def read_weights(path: Path, key: str) -> Weights:
    """Read the weights written under this key; `BrokenWeightsError` if the file holds anything else."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no dict
    except SafetensorError as error:
        raise BrokenWeightsError(str(error)) from error
    if metadata.get("key") != key or metadata.get("checksum") != checksum(weights):
        raise BrokenWeightsError("its checksum or its key is another")
    return weights


@dataclass(frozen=True)
class WeightCache:
    """Cached weights in `folder`, up to `max_bytes` in all. A folder that cannot be written is a warning, not an error.

    A process that makes an entry holds a lock on a file next to it; the system releases it when the process ends.
    """

    folder: Path
    say: Callable[[str], None]  # prints a line
    max_bytes: int = MAX_BYTES

    def get(self, key: str, make: Callable[[], Weights]) -> tuple[Weights, bool]:
        """Return (weights, whether they were cached). If two runs need the same entry at once, one makes it."""
        path = self.folder / f"{key}{SUFFIX}"
        if (found := self._read(path, key, quiet=True)) is not None:
            return found, True
        with self._locked(path) as usable:
            if (found := self._read(path, key)) is not None:  # made by the run we waited for
                return found, True
            weights = make()
            if usable:
                self._write(path, weights, key)
        return weights, False

    def _read(self, path: Path, key: str, quiet: bool = False) -> Weights | None:
        try:
            weights = read_weights(path, key)
            with suppress(OSError):  # a read-only folder
                os.utime(path)  # those unused longest are removed first
        except OSError:  # missing or unreadable
            return None
        except BrokenWeightsError as error:
            if not quiet:  # else it is read again under the lock, and reported then
                self.say(f"! {path} is broken ({error}): it is made anew")
            return None
        return weights

    def _write(self, path: Path, weights: Weights, key: str) -> None:
        try:
            write_weights(path, weights, key)
            self._tidy(path)
        except (OSError, SafetensorError) as error:
            self._cannot(error)

    @contextmanager
    def _locked(self, path: Path) -> Iterator[bool]:
        """Hold an entry's lock, or continue without it; yield whether the folder can be written."""
        lock, usable = FileLock(path.with_suffix(".lock")), True
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire(timeout=0)
            except Timeout:
                self.say("another run is making the same model: waiting for it ...")
                with suppress(Timeout):
                    lock.acquire(timeout=LOCK_TIMEOUT_S, poll_interval=0.2)
        except OSError as error:
            self._cannot(error)
            usable = False
        try:
            yield usable
        finally:
            lock.release()

    def _cannot(self, error: Exception) -> None:
        reason = getattr(error, "strerror", None) or first_line(error)
        self.say(f"! model.cache: {self.folder} cannot be written ({reason}): this model is not kept")

    def _tidy(self, newest: Path) -> None:
        """Remove the entries unused longest until the rest fits in `max_bytes`, and leftovers of killed runs."""
        ages = sorted((path.stat().st_mtime, path) for path in self.folder.glob(f"*{SUFFIX}") if path != newest)
        left = self.max_bytes - newest.stat().st_size
        for _, path in reversed(ages):
            left -= path.stat().st_size
            if left < 0:
                path.unlink(missing_ok=True)
        for path in self.folder.glob(f"*{SUFFIX}.partial"):
            if path.stat().st_mtime < newest.stat().st_mtime - LOCK_TIMEOUT_S:  # no longer being written
                path.unlink(missing_ok=True)
        for path in self.folder.glob("*.lock"):
            unused = path.stat().st_mtime < newest.stat().st_mtime - LOCK_TIMEOUT_S
            if unused and not path.with_suffix(SUFFIX).exists():
                path.unlink(missing_ok=True)
