"""Where files lie: those that come with the package, and how the settings name a source of problems."""

from pathlib import Path

SUFFIXES = ("", ".jsonl", ".json")  # of a file, where a split is named without one
SPLITS = ("train", "validation", "valid", "val", "dev", "test")  # where problems usually are


def locate(path: str | None, split: str) -> Path | None:
    """The file of a split: `split` in the folder `path`, with or without its suffix, or `split` as a path itself."""
    folder = Path(path).expanduser() if path else None
    if folder is not None and folder.is_dir():
        for suffix in SUFFIXES:
            if (file := folder / f"{split}{suffix}").is_file():
                return file
    direct = Path(split).expanduser()
    return direct if direct.suffix in SUFFIXES[1:] and direct.is_file() else None


def may_be_hub_name(path: str) -> bool:
    """One slash and no leading dot may be a hub name; anything else was meant as a folder."""
    return path.count("/") == 1 and not path.startswith((".", "/", "~")) and not Path(path).is_dir()


def resource_dir(name: str) -> Path:
    """`conf`, `prompts` or `multirun_sweeps`: inside the installed package, or next to it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / name
    return inside if inside.is_dir() else package.parent / name
