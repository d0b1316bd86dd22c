"""The process itself: signals, streams, atomic files, processors, short forms of texts.

Depends on the errors alone; nothing in it loads a library.
"""
