"""The blocks of the documents, and how each is made small enough to be executed by a test."""

import ast
import json
import re
import shlex
import shutil
import textwrap
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hydra import compose
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from rlreason.cli.aliases import translated
from rlreason.cli.as_words import key_of
from rlreason.cli.check_sweep import words_of_stage
from rlreason.cli.design import design_of, file_of
from rlreason.cli.flags import composing, read
from rlreason.cli.multirun import composed, fixed
from rlreason.cli.sweep_words import without_sweep_words
from rlreason.cli.verbs import named_verb
from rlreason.config.store import typed

ROOT = Path(__file__).parents[1]
SHELLS = ("bash", "zsh", "fish")
#: A number of a run is brought down to these; and so is the bound on evaluations where there is none.
MOST = {
    "n_steps": 1, "rollout_batch_size": 16, "question_batch_size": 8, "group_size": 4, "train_batch_size": 8,
    "eval_problems": 8, "eval.problems": 8, "sampling.max_tokens": 32, "eval.sampling.max_tokens": 32, "data.limit": 8,
    "data.n_validation": 16, "eval.data.n_validation": 16,
}  # fmt: skip
UNBOUNDED = "eval_problems"  # None means all
#: A command within a text, or in a table.
INLINE = re.compile(
    r"`((?:python -m |python [\w/]+\.py|pip |uv |make |eval |(?:rlreason|tensorboard|trackio|wandb) )[^`]*)`"
)
#: A table of what is typed before Tab, which is no command yet.
TYPED = re.compile(r"^\| typed \|[^\n]*\n(?:\|[^\n]*\n)*", re.M)


@dataclass(frozen=True)
class Block:
    """A fenced block of a document."""

    document: str  # its path in the repository
    line: int  # of its first line
    heading: str
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.document}:{self.line}"


@dataclass(frozen=True)
class Command:
    """One command line of a document, without its comment."""

    place: str
    shell: str
    text: str


def documents() -> dict[str, str]:
    """Path -> Markdown: the pages, the notebook's text, and the examples' docstrings with their commands as blocks."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    texts = {path: path.read_text() for path in pages}
    for path in sorted((ROOT / "docs").glob("*.ipynb")):
        cells = json.loads(path.read_text())["cells"]
        texts[path] = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    for path in sorted((ROOT / "examples").glob("*.py")):
        said = ast.get_docstring(ast.parse(path.read_text())) or ""
        texts[path] = re.sub(r"(?m)^(?: {4}.*\n)+", lambda m: f"```bash\n{textwrap.dedent(m[0])}```\n", said)
    return {str(path.relative_to(ROOT)): text for path, text in texts.items()}


def blocks_of(name: str, text: str) -> Iterator[Block]:
    """The fenced blocks of a document. An indented block, whose language nobody names, fails."""
    heading, block = "", None
    for number, line in enumerate(text.splitlines(), 1):
        fence = re.fullmatch(r"```(\w*)", line)
        if block and line == "```":
            yield block
            block = None
        elif block:
            block = replace(block, text=f"{block.text}{line}\n")
        elif fence:
            block = Block(name, number + 1, heading, fence[1], "")
        elif line.startswith("#"):
            heading = line.strip("# ")
        elif line.startswith(("    ", "~~~", "```")) and not re.match(r" +([-*]|\d+\.) ", line):
            raise AssertionError(f"{name}:{number}: write a block between ``` and name its language\n{line}")
    assert not block, f"{name}:{block.line}: the block has no end"


def blocks() -> list[Block]:
    return [block for name, text in documents().items() for block in blocks_of(name, text)]


def commands() -> list[Command]:
    """Every command of the shell blocks, and of the text where one is written out; each text once."""
    found: dict[str, Command] = {}
    for block in blocks():
        line = block.line
        for part in re.split(r"(?<!\\)\n", block.text) if block.language in SHELLS else []:
            text = re.sub(r"(^|\s)#.*", "", re.sub(r"\\\n\s*", "", part)).strip()
            if text:
                found.setdefault(text, Command(f"{block.document}:{line}", block.language, text))
            line += part.count("\n") + 1
    for name, whole in documents().items():
        prose = re.sub(rf"^```.*?^```$|{TYPED.pattern}", lambda m: "\n" * m[0].count("\n"), whole, flags=re.M | re.S)
        for match in INLINE.finditer(prose):
            text, line = match[1].replace("\\|", "|"), prose.count("\n", 0, match.start()) + 1  # in a table \| is |
            shell = re.search(rf"completion ({'|'.join(SHELLS)})", text)
            found.setdefault(text, Command(f"{name}:{line}", shell[1] if shell else "bash", text))
    return list(found.values())


def typed_before_tab() -> list[str]:
    """The beginnings of commands in the first cells of those tables."""
    tables = [table for text in documents().values() for table in TYPED.findall(text)]
    return [text for table in tables for text in re.findall(r"^\| `(rlreason [^`]+)`", table, re.M)]


def words_of(command: str) -> list[str] | None:
    """The words that a command gives to rlreason; None where it is no plain call of it."""
    if re.search(r"[|&;<>$`]", re.sub(r"'[^']*'", "", command)):
        return None
    words = shlex.split(command)
    for call in (["python", "-m", "rlreason"], ["rlreason"]):
        if words[: len(call)] == call:
            return words[len(call) :]
    return None


def with_real_things(text: str, real: Mapping[str, str]) -> str:
    """The text with what its placeholders stand for."""
    return re.sub(rf"\b({'|'.join(sorted(real, key=len, reverse=True))})\b", lambda m: real[m[1]], text)


def small(words: Sequence[str], real: Mapping[str, str]) -> list[str]:
    """The words of a command line that starts runs, made small; other command lines as they are.

    Of a sweep, two values of its first axis and one of every other are left; of a chain one, since its sweeps have axes
    of their own. What would come from the hub, or from a run before, is among the `real` things.
    """
    asked = read(words)
    if not asked.starts:
        return list(words)
    with composing(asked):
        rest, _ = without_sweep_words(asked.overrides, asked.multirun)
        no_settings = [word for word in asked.overrides if word not in rest]
        ours = translated(rest, note=lambda text: None)
        cfg = composed(fixed(ours), asked.config_name)
        params = [f"{key}={value}" for key, value in (cfg.hydra.sweeper.get("params") or {}).items()]
        parsed = OverridesParser.create().parse_overrides([*params, *ours])
        file = file_of(ours)
        chained = bool(asked.multirun and file.chain)
        of_cells = {key_of(w) for of in (file, file.embedded) if of is not None for cell in of.cells for w in cell}
    axes = {o.get_key_element(): list(o.sweep_string_iterator()) for o in parsed if o.is_sweep_override()}
    two = None if chained else next((key for key in axes if key not in MOST), None)
    fewer = [f"{key}={','.join(values[: 2 if key == two else 1])}" for key, values in axes.items() if key not in MOST]
    kept = [word for word in ours if word.partition("=")[0] not in axes]
    flags = ["--multirun"] if asked.multirun else []
    kept += no_settings
    less = [word for word in (*barely_taught(cfg, axes), *lowered(cfg, axes)) if key_of(word) not in of_cells]
    return [*flags, *asked.sources(), *kept, *fewer, *local(cfg, real), *less]


def runs(words: Sequence[str]) -> list[list[str]]:
    """The overrides of each run that a command line asks for."""
    asked = read(words)
    with composing(asked):
        rest, own = without_sweep_words(asked.overrides, asked.multirun)
        asked = replace(asked, overrides=translated(rest, note=lambda text: None), own=own)
        if not asked.multirun or own.dry:
            return [] if own.dry else [asked.overrides]
        asked = replace(asked, chain=tuple(file_of(asked.overrides).chain))
        each = [words_of_stage(asked, stage) for stage in asked.chain] or [asked]
        return [run.words for one in each for run in design_of(one, note=lambda text: None).runs]


def resumed(words: Sequence[str], place: Path) -> list[str]:
    """The words of a command that goes on with a run, for a copy of it in `place`, which was killed at its very end.

    Where more steps are asked for, it is a copy of the finished run, which gets one more.
    """
    run = Path(next(word for word in words if key_of(word) == "resume").partition("=")[2])
    copy = Path(shutil.copytree(run, place / "resumed"))
    others = [word for word in words if key_of(word) not in ("resume", "n_steps")]
    if len(others) + 1 < len(words):
        return [f"resume={copy}", f"n_steps={MOST['n_steps'] + 1}", *others]
    (copy / "summary.json").unlink()
    (copy / "status.json").write_text('{"status": "running", "reason": "", "time": ""}\n')
    return [f"resume={copy}", *others]


def keep_the_rules(words: Sequence[str], real: Mapping[str, str]) -> None:
    """`ConfigError` where a run that a command line asks for breaks a rule at its own size; the first ones of many."""
    asked = read(words)
    for overrides in runs(words)[:6]:
        with composing(asked):
            cfg = compose(asked.config_name, [*overrides, *local(compose(asked.config_name, overrides), real)])
            OmegaConf.resolve(cfg)
            typed(cfg, asked.multirun)


def local(cfg: DictConfig, real: Mapping[str, str]) -> list[str]:
    """The overrides that put real things in the place of models and data which are not on this machine."""
    paths = {"model.path": real["RUN"], "data.path": real["GSM8K_DIR"]}
    given = {key: OmegaConf.select(cfg, key) for key in paths}
    return [f"{key}='{paths[key]}'" for key, path in given.items() if path and not Path(path).is_dir()]


def barely_taught(cfg: DictConfig, axes: Container[str] = ()) -> list[str]:
    """The overrides under which a start model is made quickly, where it is another than the one that is shipped."""
    tiny = OmegaConf.select(cfg, "model.warm_start") is not None
    other = "prompt" in axes or cfg.prompt.name != "r1_zero_short"
    return ["model.width=32", "model.warm_start.steps=4"] if tiny and other else []


def lowered(cfg: DictConfig, axes: Container[str] = ()) -> list[str]:
    """The overrides under which no number of a config is larger than `MOST` says."""
    words = []
    for key, most in MOST.items():
        group, _, name = key.rpartition(".")
        node = OmegaConf.select(cfg, group) if group else cfg
        if node is None or name not in node:
            continue
        if OmegaConf.is_interpolation(node, name) and key not in axes:  # it follows another one, which is lowered
            continue
        if key == "sampling.max_tokens" and "n_steps" not in cfg and cfg.eval.sampling.max_tokens is not None:
            continue  # nobody reads it
        value = node[name]
        if key in axes or (key == UNBOUNDED if value is None else value > most):
            words.append(f"{key}={most}")
    return words


def is_verb(words: Sequence[str]) -> bool:
    return named_verb(words) is not None


def small_python(text: str, real: Mapping[str, str]) -> str:
    """A block of Python in which every call of `train`, `evaluate` and `compose` has more words, after its own."""
    return ast.unparse(_Small(real).visit(ast.parse(text)))


class _Small(ast.NodeTransformer):
    def __init__(self, real: Mapping[str, str]) -> None:
        self.real = real

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name in ("train", "evaluate", "compose"):
            given = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            asked = read(["algorithm=evaluate", *given] if name == "evaluate" else given)
            with composing(asked):
                cfg = composed(translated(asked.overrides, note=lambda text: None), asked.config_name)
            node.args += [ast.Constant(word) for word in (*local(cfg, self.real), *barely_taught(cfg), *lowered(cfg))]
        return node
