"""Where files lie: those that come with the package, and how the settings name a source of problems."""

import glob
from pathlib import Path

SUFFIXES = ("", ".jsonl", ".json")  # of a file, where a split is named without one
SPLITS = ("train", "validation", "valid", "val", "dev", "test")  # where problems usually are
#: Formats that are not read: what of pandas reads them, and what unpacks them.
READERS = {
    "parquet": "read_parquet", "csv": "read_csv", "feather": "read_feather", "arrow": "read_feather",
    "xlsx": "read_excel", "pkl": "read_pickle",
}  # fmt: skip
UNPACKERS = {"gz": "gunzip -k", "zst": "unzstd", "xz": "unxz -k", "bz2": "bunzip2 -k", "zip": "unzip", "tar": "tar xf"}


def locate(path: str | None, split: str) -> Path | None:
    """The file of a split: `split` in the folder `path`, with or without its suffix, or `split` as a path itself."""
    folder = Path(path).expanduser() if path else None
    if folder is not None and folder.is_dir():
        for suffix in SUFFIXES:
            file = folder / f"{split}{suffix}"
            if file.is_file() and file.suffix.lower()[1:] not in READERS | UNPACKERS:
                return file
    direct = Path(split).expanduser()
    return direct if direct.suffix in SUFFIXES[1:] and direct.is_file() else None


def unread_format(path: str | None, split: str) -> str:
    """Which file of another format stands where the split is looked for, and how to convert it; empty where none does.

    `path` may itself be such a file, and so may `split`, or a file of the split's name in the folder `path`.
    """
    folder = Path(path).expanduser() if path else Path()
    beside = sorted(folder.glob(f"{glob.escape(split)}.*")) if path and Path(split).name == split else []
    files = [file for file in (Path(split).expanduser(), folder / split, folder, *beside) if file.is_file()]
    return next((described_format(file) for file in files if file.suffix not in SUFFIXES[1:]), "")


def described_format(file: Path) -> str:
    """What a file that is not read is by its name, and how to make one of it that is."""
    name = str(file)
    stem, _, suffix = name.rpartition(".") if file.suffix else (name, "", "")
    kind = suffix.lower()
    target = f"{stem}.jsonl"
    if kind in READERS:
        how = f"import pandas; pandas.{READERS[kind]}('{name}').to_json('{target}', orient='records', lines=True)"
        cure = f'convert it with python -c "{how}"'
    elif kind in UNPACKERS:
        cure = f"unpack it with {UNPACKERS[kind]} {name}"
    else:
        cure = f"rename it to {target} if each line is one JSON row, or convert it"
    called = f"a {kind} file" if kind else "a file without a suffix"
    return f"{name} is {called}, and .jsonl and .json are read: {cure}"


def may_be_hub_name(path: str) -> bool:
    """One slash and no leading dot may be a hub name; anything else was meant as a folder, and a file is none."""
    return path.count("/") == 1 and not path.startswith((".", "/", "~")) and not Path(path).exists()


def resource_dir(name: str) -> Path:
    """`conf`, `prompts` or `multirun_sweeps`: inside the installed package, or next to it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / name
    return inside if inside.is_dir() else package.parent / name
