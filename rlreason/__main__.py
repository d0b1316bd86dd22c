"""`python -m rlreason`."""

from rlreason.main import cli

cli()
