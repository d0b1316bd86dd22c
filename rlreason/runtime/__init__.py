"""The process itself: signals, streams, atomic files, processors, short forms of texts."""
