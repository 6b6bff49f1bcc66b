"""Makes one self-contained page of a run's results: plots, and a browser of trajectories.

The page fetches nothing and runs no script but its own, whose hash its Content-Security-Policy names. What agents and
models wrote reaches it as JSON data and is put into the page as text only.
"""

from producer.report.page import ReportOptions, Written, write_report

__all__ = ["ReportOptions", "Written", "write_report"]
