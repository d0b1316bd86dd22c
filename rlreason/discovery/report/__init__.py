"""The report of `algorithm=discover` runs: read their logs, compare them over seeds, write report.md and score.png.

    read.read_log  ->  log.Log  ->  draws (baseline), settings (seeds together)  ->  sections, picture  ->  write

Scores are whole numbers in the unit of the problem ("points"); 0 is what an invalid set is worth.
"""

from rlreason.discovery.report.read import Log, is_discover_run, read_log
from rlreason.discovery.report.write import report_of, runs_below, write_joint_report, write_run_report

__all__ = ["Log", "is_discover_run", "read_log", "report_of", "runs_below", "write_joint_report", "write_run_report"]
