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
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, TextIO

HERE = Path(__file__).resolve().parent
# Not there under python -P.
sys.path.insert(0, str(HERE))

import _site  # noqa: E402
from _patchlib import PatchSet, Problem, Report, State, __version__, load  # noqa: E402

# Of --check; the worst wins.
EXIT_CODES = {State.DRIFT: 2, State.PARTIAL: 2, State.OUTDATED: 1, State.APPLY: 1, State.NOOP: 0, State.SHIPPED: 0}
ENVIRONMENT, INTERRUPTED = 3, 130


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # argparse exits with 2, which means drift here.
        self.exit(ENVIRONMENT, f"{self.format_usage()}{self.prog}: {message}\n")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="apply_all.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", metavar="SITE_PACKAGES", help="folder that holds vllm/; this Python's own by default")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="write nothing; exit with 1 if applying would")
    what.add_argument("--status", action="store_true", help="as --check, but exit with 0")
    what.add_argument("--revert", action="store_true", help="take our lines and files out")
    what.add_argument("--drift", nargs="+", metavar="VERSION", help="judge releases that are not installed")
    parser.add_argument(
        "--force",
        action="store_true",
        help="with --revert: discard others' edits of our lines and files",
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--tree", metavar="DIR", help="with --drift: read this checkout instead of the package index")
    source.add_argument("--git", metavar="CLONE", help="with --drift: read tags of this clone")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
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

    read = _site.reader(HERE)
    installed = _site.list_installed(HERE, patches.INSTALLED)
    return load(patches.PATCHES, installed, read, patches.SUPPORTED, patches.SHIPPED_FROM)


def run(given: argparse.Namespace) -> tuple[Report, int]:
    """Do what was asked; the report is on the tree as it is afterwards."""
    patch_set = own_patches()
    site = _site.locate(given.root)
    reads_only = given.check or given.status
    with _site.locked(site.root, exclusive=not reads_only):
        if given.revert:
            return _revert(site, patch_set, given.force)
        report = _site.survey(_site.reader(site.root), site.version, patch_set)
        if not reads_only and report.verdict in (State.APPLY, State.OUTDATED):
            written = len({change.path for change in (*report.back, *report.changes)})
            message = f"Applied to vLLM {site.version} in {site.root} and checked: {written} files written."
            report = replace(_site.apply(site, report, patch_set), message=message)
        return report, 0 if given.status else EXIT_CODES[report.verdict]


def _revert(site: _site.Site, patch_set: PatchSet, force: bool) -> tuple[Report, int]:
    done = _site.revert(site, patch_set, force)
    message = _what_was_reverted(site, done)
    try:
        after = _site.survey(_site.reader(site.root), site.version, patch_set)
    except Problem as problem:
        raise Problem(f"{message} What can be applied to it now is not known: {problem}", problem.state) from None
    if not done.recorded and after.verdict == State.PARTIAL:
        return replace(after, message=f"{message} Some of our text is still there: reinstall vLLM."), 2
    return replace(after, message=message), 0


def _what_was_reverted(site: _site.Site, done: _site.Reverted) -> str:
    undone = done.undone
    count = len(undone.exact if done.recorded else undone.changes)
    if not done.recorded:
        if not count:
            return f"Nothing to revert in {site.root}."
        return (
            f"Reverted vLLM {site.version} in {site.root} without a record: {count} files had text of ours, which is "
            "out; nothing tells whether they are as they were before this tool."
        )
    message = f"Reverted vLLM {site.version} in {site.root}: {count} files are as they were before this tool."
    if undone.others:
        message += f" Edits by others were kept in {', '.join(undone.others)}."
    if undone.missing:
        message += f" Missing, and not brought back: {', '.join(undone.missing)}; reinstall vLLM."
    return message


def show(report: Report) -> None:
    """One aligned line per patch, then one sentence; what is wrong goes to stderr in full."""
    width = max(len(row.name) for row in report.patches)
    for row in report.patches:
        print(f"{row.name:<{width}}  {row.state:<8}  {row.detail.split(chr(10))[0]}".rstrip())
    print(report.message)
    for row in report.patches:
        if row.state in (State.DRIFT, State.PARTIAL):
            print(f"{row.name}: {row.state}: {row.detail}", file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    ready_streams()
    given = parse(arguments)
    try:
        if given.drift:
            return drift(given)
        report, code = run(given)
        with unread_output():
            if given.json:
                print(json.dumps(as_object(report, code), indent=1))
            else:
                show(report)
            sys.stdout.flush()
        return code
    except BrokenPipeError:
        silence(sys.stdout)
        return ENVIRONMENT
    except (Problem, OSError) as error:
        return complain(error, given)
    except KeyboardInterrupt:
        print("apply_all.py: interrupted", file=sys.stderr)
        return INTERRUPTED


def drift(given: argparse.Namespace) -> int:
    import _drift

    patch_set = own_patches()
    results = _drift.survey_releases(patch_set, given.drift, given.tree, given.git)
    code = drift_exit_code(results.values())
    if given.json:
        versions = {
            version: failure_object(None, ENVIRONMENT, result, version)
            if isinstance(result, str)
            else as_object(result, EXIT_CODES[result.verdict])
            for version, result in results.items()
        }
        print(json.dumps({"versions": versions, "exit_code": code}, indent=2))
    else:
        print("\n".join(_drift.lines(results, patch_set)))
    print("".join(f"{line}\n" for line in _drift.faults(results)), end="", file=sys.stderr)
    return code


def drift_exit_code(results: Iterable[Report | str]) -> int:
    """0 if every version is fine, 2 on drift, 3 if one could not be read: the worst wins."""
    fine = (State.APPLY, State.NOOP, State.SHIPPED)
    return max(ENVIRONMENT if isinstance(r, str) else 0 if r.verdict in fine else 2 for r in results)


def as_object(report: Report, code: int) -> dict[str, object]:
    """What `--json` prints for one tree."""
    rows = [{**vars(row), "files": list(row.files)} for row in report.patches]
    return {**failure_object(report.verdict, code, report.message, report.version), "patches": rows}


def failure_object(verdict: State | None, code: int, message: str, version: str | None = None) -> dict[str, object]:
    """What `--json` prints for a tree that could not be judged."""
    return {"verdict": verdict, "exit_code": code, "version": version, "message": message, "patches": []}


def complain(error: Problem | OSError, given: argparse.Namespace) -> int:
    problem = error if isinstance(error, Problem) else Problem(str(error))
    code = EXIT_CODES[problem.state] if problem.state else ENVIRONMENT
    code = 0 if given.status and problem.state else code
    with unread_output():
        if given.json:
            print(json.dumps(failure_object(problem.state, code, str(problem)), indent=1))
        print(f"apply_all.py: {problem}", file=sys.stderr)
        sys.stdout.flush()
    return code


def ready_streams() -> None:
    for name in ("stdout", "stderr"):
        # Closed ones (>&-) are None, and print would send errors to the other one.
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (it stays open)
        # A diff may quote text that an ASCII locale cannot print.
        getattr(sys, name).reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def unread_output() -> Iterator[None]:
    """The exit status is about the tree, also if the reader of our output has seen enough or its disk is full."""
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
