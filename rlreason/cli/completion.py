"""Complete the words of rlreason with Tab: print what a shell needs for it, or the completions of one command line.

For bash, a line in ~/.bashrc, and for zsh in ~/.zshrc:

    eval "$(rlreason completion bash)"        eval "$(rlreason completion zsh)"

For fish, in ~/.config/fish/config.fish:

    rlreason completion fish | source
"""

import argparse
import re
import shlex
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from io import StringIO

from rlreason.cli.candidates import of_subcommand
from rlreason.cli.subcommands import SUBCOMMANDS, named_subcommand
from rlreason.records.console import Console
from rlreason.runtime.subcommand import Answer, Parser

#: Shell -> the script that makes it call `rlreason completion SHELL LINE` with the command as it was typed. Nothing
#: that was typed is evaluated, and errors are not shown.
SCRIPTS = {
    "bash": r"""_rlreason() {
    local found
    COMPREPLY=()
    while IFS= read -r found; do
        COMPREPLY+=("$found")
    done < <("${1/#\~/$HOME}" completion bash -- "${COMP_LINE:0:COMP_POINT}" "$2" 2> /dev/null)
}
complete -o nospace -F _rlreason rlreason
""",
    "zsh": r"""_rlreason() {
    local -a command=("${words[1]/#\~/$HOME}")
    [[ $service == python* ]] && command+=(-m rlreason)
    local line="${(j: :)words[1,CURRENT-1]} $QIPREFIX$PREFIX"
    local -a found=("${(@f)$($command completion zsh -- "$line" 2> /dev/null)}")
    compadd -S '' -- ${(M)found:#(*[=./,]|*=\[*)}
    compadd -- ${found:#(*[=./,]|*=\[*)}
}
_rlreason_or_python() {
    if [[ $CURRENT -gt 3 && "$words[2,3]" == "-m rlreason" ]]; then _rlreason; else _python; fi
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit -i }
compdef _rlreason rlreason
compdef _rlreason_or_python python python3
""",
    "fish": r"""function __rlreason_complete
    set -l command (string replace -r '^~' $HOME -- (commandline -cpo)[1])
    string match -q '*python*' -- $command; and set command $command -m rlreason
    $command completion fish -- (commandline -cp | string collect) 2> /dev/null
end
complete -c rlreason -f -a '(__rlreason_complete)'
for python in python python3
    complete -c $python -n "string match -qr -- '^\S+ +-m +rlreason ' (commandline -cp)" -f -a '(__rlreason_complete)'
end
""",
}
_OPEN_ENDED = re.compile(r".*[=./,]|.*=\[.*", re.DOTALL)  # incomplete words: no space follows
_CURSOR = "\0"


def add_arguments(parser: Parser) -> None:
    """Add SHELL, and the line to answer."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("shell", metavar="SHELL", choices=sorted(SCRIPTS), help=" | ".join(sorted(SCRIPTS)))
    help_line = "answer this command line, up to the cursor, instead"
    parser.add_argument("line", metavar="LINE", nargs="?", help=help_line)
    parser.add_argument("tail", metavar="TAIL", nargs="?", help="of its last word, the part that bash replaces")


def main(arguments: argparse.Namespace, console: Console) -> Answer:
    """Return the script of a shell, or the completions of a line, one per line of text."""
    if arguments.line is None:
        script = SCRIPTS[arguments.shell]
        return Answer(script.rstrip("\n"), {"shell": arguments.shell, "script": script})
    found = answers(arguments.line)
    shown = in_bash(found, arguments.line, arguments.tail) if arguments.shell == "bash" else found
    return Answer("\n".join(shown), {"shell": arguments.shell, "candidates": found})


def answers(line: str) -> list[str]:
    """Return the completions of the last word of a command line; [] if something in it is wrong.

    The user is still typing: no error message may appear among the completions.
    """
    with suppress(Exception, SystemExit), redirect_stdout(StringIO()):
        return candidates(typed_words(line))
    return []


def candidates(words: Sequence[str]) -> list[str]:
    """Return what the last word may become, as whole words, in order.

    They come from where the command itself reads them: subcommands from the table, flags from parsers, settings and
    options from what Hydra composes.
    """
    *before, word = words
    if subcommand := named_subcommand(before):
        found = of_subcommand(subcommand, before[1:], word)
    else:
        from rlreason.cli.setting_candidates import of_runs  # slow to import: Hydra

        found = ([] if before else [subcommand.name for subcommand in SUBCOMMANDS]) + of_runs(before, word)
    return sorted({one for one in found if one.startswith(word) and one.isprintable()})


def typed_words(line: str) -> list[str]:
    """Return the words after the program's name, without quotes, the last as far as it was typed.

    >>> typed_words("rlreason loss=gspo 'model.path=my mo"), typed_words("A=1 python3 -m rlreason ")
    (['loss=gspo', 'model.path=my mo'], [''])
    """
    words = _split(line)[0]
    while len(words) > 1 and re.match(r"\w+=", words[0]):  # environment variables
        del words[0]
    is_module = words[1:3] == ["-m", "rlreason"]
    return words[3 if is_module else 1 :] or [""]


def _split(line: str) -> tuple[list[str], str]:
    """Return the words of a line and the quote that is still open at its end; ([""], "") if it cannot be read."""
    for quote in ("", "'", '"'):
        with suppress(ValueError):
            words = shlex.split(f"{line}{_CURSOR}{quote}")
            return [word.replace(_CURSOR, "") for word in words], quote
    return [""], ""


def in_bash(found: list[str], line: str, tail: str | None) -> list[str]:
    r"""Return the completions as bash inserts them: in place of `tail`, quoted, with a space after complete words.

    bash breaks a word at = and : and replaces only the last part.

    >>> in_bash(["model.path=my model/"], "rlreason model.path=m", "m"), in_bash(["loss=gspo"], "rlreason lo", "lo")
    (['my\\ model/'], ['loss=gspo '])
    """
    words, quote = _split(line)
    word, ends = words[-1], [tail or "", _split(tail or "")[0][-1]]  # bash has removed quotes, but not backslashes
    end = word if tail is None else next((end for end in ends if word.endswith(end)), None)
    if end is None:
        return []
    start = len(word) - len(end)
    if quote == "'":
        return [one[start:].replace("'", r"'\''") for one in found]
    if quote:
        return [re.sub(r'(["$`\\])', r"\\\1", one[start:]) for one in found]
    return [
        re.sub(r"([^\w@%+=:,./~\[\]-])", r"\\\1", one[start:]) + " " * (not _OPEN_ENDED.fullmatch(one)) for one in found
    ]
