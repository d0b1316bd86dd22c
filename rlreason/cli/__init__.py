"""The command line: words, overrides and mistakes, checked before anything slow is loaded."""
