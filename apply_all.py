"""Put DFlash2 into an installed vLLM 0.27.1, or say what state that vLLM is in.

Exit status: 0 the tree is as wanted, 1 --check: it would be changed, 2 drift or partial,
3 no vLLM, not readable, not writable, or wrong arguments.
"""

import argparse
import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TextIO

HERE = Path(__file__).resolve().parent
# Not there under python -P.
sys.path.insert(0, str(HERE))

import _patchlib  # noqa: E402
import _tree  # noqa: E402
from _patchlib import PatchSet, Problem, Report  # noqa: E402


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        # argparse exits with 2, which means drift here.
        self.exit(3, f"{self.format_usage()}{self.prog}: {message}\n")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="apply_all.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", metavar="SITE_PACKAGES", help="folder that holds vllm/; this Python's own by default")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="write nothing; exit with 1 if applying would")
    what.add_argument("--status", action="store_true", help="as --check, but exit with 0")
    what.add_argument("--revert", action="store_true", help="put the original files back")
    what.add_argument("--drift", nargs="+", metavar="VERSION", help="judge releases that are not installed")
    parser.add_argument("--force", action="store_true", help="with --revert: discard what others edited since")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--tree", metavar="DIR", help="with --drift: read this checkout instead of the package index")
    source.add_argument("--git", metavar="CLONE", help="with --drift: read tags of this clone")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(arguments)
    if given.force and not given.revert:
        parser.error("--force goes with --revert")
    if (given.tree or given.git) and not given.drift:
        parser.error("--tree and --git go with --drift")
    if given.drift and given.root:
        parser.error("--drift judges releases, not an installed tree: leave --root out")
    return given


def own_patches() -> PatchSet:
    """The patches and files of this copy of the tool."""
    import patches

    return _patchlib.load(patches.PATCHES, patches.INSTALLED, _tree.reader(HERE))


def run(given: argparse.Namespace) -> Report:
    """Do what was asked; the report is on the tree as it is afterwards."""
    patch_set = own_patches()
    site = _tree.locate(given.root)
    reads_only = given.check or given.status
    with _tree.locked(site.root, exclusive=not reads_only):
        report = _patchlib.survey(_tree.reader(site.root), site.version, patch_set)
        if given.status:
            return replace(report, exit_code=0)
        if given.check:
            return report
        return _revert(site, report, patch_set, given.force) if given.revert else _apply(site, report, patch_set)


def _apply(site: _tree.Site, report: Report, patch_set: PatchSet) -> Report:
    if report.verdict not in ("APPLY", "OUTDATED"):
        return report
    after = _tree.apply(site, report, patch_set)
    message = f"Applied to vLLM {site.version} in {site.root} and checked: {len(report.changes)} files written."
    return replace(after, exit_code=0, message=message)


def _revert(site: _tree.Site, report: Report, patch_set: PatchSet, force: bool) -> Report:
    count = _tree.revert(site, force)
    if count:
        message = f"Reverted vLLM {site.version} in {site.root}: {count} files are as they were before this tool."
        try:
            after = _patchlib.survey(_tree.reader(site.root), site.version, patch_set)
        except Problem as problem:
            raise Problem(f"{message} What can be applied to it now is not known: {problem}", problem.verdict) from None
        return replace(after, exit_code=0, message=message)
    if any(row.state in ("NOOP", "PARTIAL") for row in report.patches):
        raise Problem(f"{site.root} holds text of ours but no record of what was there: reinstall vLLM", "PARTIAL")
    return replace(report, exit_code=0, message=f"Nothing to revert in {site.root}.")


def show(report: Report) -> None:
    """One aligned line a patch, then one sentence; what is wrong goes to stderr in full."""
    width = max(len(row.name) for row in report.patches)
    for row in report.patches:
        print(f"{row.name:<{width}}  {row.state:<8}  {row.detail.split(chr(10))[0]}".rstrip())
    print(report.message)
    for row in report.patches:
        if row.state in ("DRIFT", "PARTIAL"):
            print(f"{row.name}: {row.state}: {row.detail}", file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    ready_streams()
    given = parse(arguments)
    try:
        if given.drift:
            import _drift

            return _drift.main(own_patches(), given.drift, given.tree, given.git, given.json)
        report = run(given)
        with unread_output():
            if given.json:
                print(json.dumps(report.as_json(), indent=1))
            else:
                show(report)
            sys.stdout.flush()
        return report.exit_code
    except BrokenPipeError:
        silence(sys.stdout)
        return 3
    except (Problem, OSError) as error:
        return complain(error, given)
    except KeyboardInterrupt:
        print("apply_all.py: interrupted", file=sys.stderr)
        return 130


def complain(error: Problem | OSError, given: argparse.Namespace) -> int:
    problem = error if isinstance(error, Problem) else Problem(str(error))
    code = 0 if given.status and problem.verdict else problem.exit_code
    with unread_output():
        if given.json:
            print(json.dumps(_patchlib.tree_object(problem.verdict, code, None, str(problem)), indent=1))
        print(f"apply_all.py: {problem}", file=sys.stderr)
        sys.stdout.flush()
    return code


def ready_streams() -> None:
    for name in ("stdout", "stderr"):
        # Closed ones (>&-) are None, and print would send errors to the other one.
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))
        # A diff may quote text that an ASCII locale cannot print.
        getattr(sys, name).reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def unread_output() -> Iterator[None]:
    """The exit status is about the tree, also where the reader of our output has seen enough or its disk is full."""
    try:
        yield
    except OSError as error:
        silence(sys.stdout)
        if not isinstance(error, BrokenPipeError):
            with contextlib.suppress(OSError):
                print(f"apply_all.py: the output could not be written: {error}", file=sys.stderr)


def silence(stream: TextIO) -> None:
    """Keep the interpreter from trying again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):
        # Stopped from outside we roll back as after Ctrl-C; under nohup, SIGHUP stays ignored.
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
    raise SystemExit(main())
