"""The report of `algorithm=discover` runs: read their logs, compare them over seeds, write report.md and score.png.

    read.read_log  ->  log.Log  ->  draws (baseline), settings (seeds together)  ->  sections, picture  ->  write

Scores are whole numbers in the unit of the problem ("points"); 0 is what an invalid set is worth.
"""

from rlreason.report.discovery.answer import report_of
from rlreason.report.discovery.log import Log
from rlreason.report.discovery.read import is_discover_run, read_log
from rlreason.report.discovery.write import runs_below, write_joint_report, write_run_report

__all__ = ["Log", "is_discover_run", "read_log", "report_of", "runs_below", "write_joint_report", "write_run_report"]
