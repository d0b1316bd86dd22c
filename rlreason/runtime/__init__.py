"""The process itself: signals, streams, atomic files, processors, short forms of texts."""

__version__ = "0.1.0"
