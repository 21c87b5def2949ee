"""A pytest plugin for runner.py: writes what is collected and how each test ended, a line of JSON each, to a file."""

import json
import os

LINES = open(os.environ["DFLASH2_PROGRESS"], "a", buffering=1)  # noqa: SIM115  open as long as the process


def write(**line):
    print(json.dumps(line), file=LINES)


def pytest_collection_finish(session):
    write(collected=[item.nodeid for item in session.items])


def pytest_collectreport(report):
    if report.failed:
        write(test=report.nodeid, outcome="failed")


def pytest_runtest_logreport(report):
    """A test that must fail, and does, has passed. The phases of a test add up."""
    if report.failed:
        outcome = "failed"
    elif hasattr(report, "wasxfail"):
        outcome = "passed"
    elif report.skipped:
        outcome = "skipped"
    else:
        outcome = "passed" if report.when == "call" else None
    write(test=report.nodeid, outcome=outcome, seconds=report.duration, over=report.when == "teardown")
