"""The checker: each check examines the evidence of a run and reports violations.

`test_checker.py` shows for each check that it finds its violation.
"""

from tests.chaos import checks_jobs, checks_workers
from tests.chaos.verdict import CHECKS

__all__ = ["CHECKS", "checks_jobs", "checks_workers"]
