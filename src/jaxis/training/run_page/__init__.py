"""The HTML page of a training run."""

from jaxis.training.run_page.page import REPORT_FILE, write_report

__all__ = ["REPORT_FILE", "write_report"]
