"""The process itself: signals, streams, files that are never half written, processors."""
