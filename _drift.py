"""Ask releases that are not installed: would the patches apply, or does the release ship them?

A reader maps a path below site-packages to the file's bytes, or to None if the release has no such
file. There is one for wheels on the index that pip is configured for (ranged reads: megabytes, not
300 MB per version), one for a folder and one for a git clone with tags. Nothing is written anywhere.
"""

import ast
import ssl
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from _patchlib import PatchSet, Problem, Report, State, release
from _site import reader, survey
from _source import Read

UNREADABLE = "UNREADABLE"
CONNECTIONS = 8
TIMEOUT_S = 60


def tree_reader(tree: Path) -> Read:
    """Read a source checkout or an unpacked site-packages folder."""
    if not (tree / "vllm" / "__init__.py").is_file():
        raise Problem(f"{tree} holds no vllm/__init__.py; --tree takes the folder that contains vllm/")
    return reader(tree)


def _git(clone: Path, *arguments: str, given: str = "") -> subprocess.CompletedProcess:
    command = ["git", "-C", str(clone), *arguments]
    try:
        return subprocess.run(command, input=given.encode(), capture_output=True)
    except FileNotFoundError:
        raise Problem("--git needs the git command, which is not on PATH") from None


def git_reader(clone: Path, version: str) -> Read:
    """Read tag v{version} of a clone, which may be bare or partial, without a checkout."""
    if not clone.is_dir():
        raise Problem(f"{clone} is not a folder; --git takes a clone of vLLM with its tags")
    if (opened := _git(clone, "rev-parse", "--git-dir")).returncode:
        raise Problem(f"{clone} is not a git clone: {_last_line(opened.stderr)}")
    tag = f"v{version}"
    found = _git(clone, "rev-parse", "--verify", "--quiet", f"refs/tags/{tag}^{{commit}}")
    if found.returncode:
        raise Problem(f"{clone} has no tag {tag}; fetch it with git -C {clone} fetch --tags")
    return partial(_git_read, clone, found.stdout.decode().strip())


def _git_read(clone: Path, commit: str, path: str) -> bytes | None:
    # --batch tells a path that is not there (exit 0) from a blob that a partial clone failed to fetch.
    got = _git(clone, "cat-file", "--batch", given=f"{commit}:{path}\n")
    if got.returncode:
        raise Problem(f"git could not read {path} in {clone}: {_last_line(got.stderr)}")
    header, _, rest = got.stdout.partition(b"\n")
    return None if header.endswith(b" missing") else rest[: int(header.split()[-1])]


def _last_line(text: bytes) -> str:
    return (text.decode(errors="replace").strip().splitlines() or ["no reason given"])[-1]


def pip_options(listing: str) -> dict[str, str]:
    """The options of `pip install`, from what `pip config list` prints; the environment wins, as in pip."""
    options: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in listing.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section in options:
            options[section][name] = ast.literal_eval(value)
    return {**options["global"], **options["install"], **options[":env:"]}


def _ask_pip() -> dict[str, str]:
    command = [sys.executable, "-m", "pip", "config", "list"]
    asked = subprocess.run(command, capture_output=True)
    if asked.returncode:
        raise Problem(f"{' '.join(command)} failed, and it names the index: {_last_line(asked.stderr)}")
    return pip_options(asked.stdout.decode(errors="replace"))


def _default_index() -> str:
    try:
        from pip._internal.models.index import PyPI
    except ImportError:
        raise Problem("this pip does not say which index it defaults to; set PIP_INDEX_URL") from None
    return PyPI.simple_url


def sources(options: dict[str, str]) -> tuple[list[str], list[str]]:
    """(index URLs, find-links URLs) of pip's options; local paths become file URLs, missing ones go, as in pip."""
    indexes = []
    if options.get("no-index", "").lower() not in ("1", "true", "yes", "on", "y", "t"):
        indexes = [options.get("index-url") or _default_index(), *options.get("extra-index-url", "").split()]
    links = options.get("find-links", "").split()
    return [_as_url(place) for place in indexes], [_as_url(place) for place in links if _is_there(place)]


def _as_url(place: str) -> str:
    return place if "://" in place else Path(place).expanduser().absolute().as_uri()


def _is_there(place: str) -> bool:
    return "://" in place or Path(place).expanduser().exists()


class Index:
    """The wheels of vLLM that the user's pip would see, opened for reading where they lie."""

    def __init__(self, options: dict[str, str]):
        self._trusted = options.get("trusted-host", "").split()
        self._cert = options.get("cert")
        self._indexes, self._find_links = sources(options)
        if not self._indexes + self._find_links:
            raise Problem("pip is configured with no-index and without find-links: there is nowhere to look")
        self._packages = self._find()

    def _find(self) -> list:
        from unearth import PackageFinder
        from unearth.auth import MultiDomainBasicAuth
        from unearth.fetchers.sync import PyPIClient

        with _network_errors("the package index could not be read"):
            client: Any = PyPIClient(
                trusted_hosts=self._trusted,
                verify=ssl.create_default_context(cafile=self._cert) if self._cert else True,
                timeout=TIMEOUT_S,
                follow_redirects=True,
                auth=MultiDomainBasicAuth(prompting=False, index_urls=self._indexes),
            )
            # Only Python sources are read, so a wheel for any platform and any Python will do.
            finder = PackageFinder(
                client, index_urls=self._indexes, find_links=self._find_links, ignore_compatibility=True
            )
            with client:
                return list(finder.find_all_packages("vllm", allow_yanked=True))

    def open(self, version: str) -> zipfile.ZipFile:
        """The wheel of one version; 0.28.0 stands for 0.28.0+local if only that exists."""
        links = self._links(version)
        wheels = [link for link in links if link.is_wheel]
        if not wheels:
            found = "only as a source archive" if links else "not"
            raise Problem(f"vllm {version} is {found} on the index that pip is configured for")
        # A wheel on this disk costs no network.
        link = min(wheels, key=lambda link: not link.is_file)
        if link.is_file:
            with _network_errors(f"{link.file_path} could not be read"):
                return zipfile.ZipFile(link.file_path)
        return self._open_remote(link)

    def _links(self, version: str) -> list:
        exact = [package.link for package in self._packages if package.version == version]
        return exact or [package.link for package in self._packages if release(package.version) == release(version)]

    def _open_remote(self, link) -> zipfile.ZipFile:
        from remotezip import RangeNotSupported, RemoteZip

        with _network_errors(f"{link.filename} could not be read"):
            try:
                return RemoteZip(_without_login(link.url), session=self._session(link.url), timeout=TIMEOUT_S)
            except RangeNotSupported:
                # Whoever wants 300 MB per version can ask for them; the drift check does not.
                raise Problem(
                    f"the server of {link.filename} answers no ranged reads; "
                    "download the wheel with pip and name its folder in PIP_FIND_LINKS"
                ) from None

    def _session(self, url: str):
        """Trust, certificates and the index's login as pip has them, and patience with a busy server."""
        import requests
        from requests.adapters import HTTPAdapter, Retry

        session = requests.Session()
        retry = Retry(3, backoff_factor=0.5, status_forcelist=(429, 500, 502, 503, 504))
        session.mount("https://", HTTPAdapter(max_retries=retry))
        place = urlsplit(url)
        trusted = place.hostname in self._trusted or place.netloc.rpartition("@")[2] in self._trusted
        session.verify = not trusted and (self._cert or True)
        session.auth = _login(url, self._indexes)
        return session


def _login(url: str, indexes: list[str]) -> tuple[str, str] | None:
    """The login in the URL, or in that of an index on the same host, as pip reuses it."""
    for known in map(urlsplit, (url, *indexes)):
        if known.username and known.hostname == urlsplit(url).hostname:
            return unquote(known.username), unquote(known.password or "")
    return None


def _without_login(url: str) -> str:
    # Errors of the HTTP library print the URL, and a build log is no place for a password.
    place = urlsplit(url)
    return place._replace(netloc=place.netloc.rpartition("@")[2], fragment="").geturl()


@contextmanager
def _network_errors(what: str):
    try:
        yield
    except Problem:
        raise
    except Exception as error:  # two HTTP libraries and zipfile, each with errors of its own kind
        raise Problem(f"{what}: {error or type(error).__name__}") from None


def wheel_reader(wheel: zipfile.ZipFile) -> Read:
    names = set(wheel.namelist())

    def read(path: str) -> bytes | None:
        with _network_errors(f"{path} of the wheel could not be read"):
            return wheel.read(path) if path in names else None

    return read


def survey_all(read_version, versions: list[str], patch_set: PatchSet) -> dict[str, Report | str]:
    """{version: its Report, or the sentence that says why it could not be read}, several at a time.

    read_version  context manager of a version that gives its Read
    """
    from tqdm import tqdm

    def one(version: str) -> Report | str:
        try:
            with read_version(version) as read:
                return survey(read, version, patch_set)
        except Problem as problem:
            return str(problem)

    with ThreadPoolExecutor(CONNECTIONS) as pool:
        # disable=None: a bar on a terminal, nothing in a pipe.
        bar = tqdm(pool.map(one, versions), total=len(versions), unit="version", leave=False, disable=None)
        return dict(zip(versions, bar))


@contextmanager
def _wheel_of(index: Index, version: str):
    with index.open(version) as wheel:
        yield wheel_reader(wheel)


def how_to_read(versions: list[str], tree: str | None, git: str | None):
    """For `survey_all`: version -> context manager that gives its Read."""
    if tree and len(versions) > 1:
        raise Problem(f"--tree holds one version, {len(versions)} are named: {', '.join(versions)}")
    if tree:
        return lambda version: nullcontext(tree_reader(Path(tree)))
    if git:
        return lambda version: nullcontext(git_reader(Path(git), version))
    return partial(_wheel_of, Index(_ask_pip()))


def survey_releases(
    patch_set: PatchSet, versions: list[str], tree: str | None = None, git: str | None = None
) -> dict[str, Report | str]:
    """What each version is to us, or the sentence that says why it could not be read."""
    versions = list(dict.fromkeys(version.removeprefix("v") for version in versions))
    try:
        return survey_all(how_to_read(versions, tree, git), versions, patch_set)
    except ImportError as error:
        message = f"--drift needs {error.name}; run: {sys.executable} -m pip install -r requirements-drift.txt"
        return dict.fromkeys(versions, message)
    except Problem as problem:
        return dict.fromkeys(versions, str(problem))


# What is printed.

HEADINGS = {
    State.APPLY: "can be patched",
    State.NOOP: "patched already",
    State.SHIPPED: "ships DFlash2",
    State.OUTDATED: "patched by an older version of this tool",
    State.PARTIAL: "patched in part",
    State.DRIFT: "drifted",
    UNREADABLE: "could not be read",
}


def verdict(result: Report | str) -> str:
    return UNREADABLE if isinstance(result, str) else result.verdict


def lines(results: dict[str, Report | str], patch_set: PatchSet) -> list[str]:
    """The matrix, what an upgrade to each release that ships DFlash2 costs, what is wrong, one sentence."""
    reports = [result for result in results.values() if isinstance(result, Report)]
    upgrades = [upgrade_report(report, patch_set) for report in reports if report.verdict == State.SHIPPED]
    verdicts = [report.message for report in reports if report.verdict in (State.DRIFT, State.PARTIAL, State.OUTDATED)]
    parts = [matrix(results), upgrades, verdicts, [sentence(results)]]
    return [line for part in parts if part for line in (*part, "")][:-1]


def faults(results: dict[str, Report | str]) -> list[str]:
    """What drifted and why versions could not be read, one line per reason; the diffs are in the JSON."""
    found: dict[str, list[str]] = {}
    for version, result in results.items():
        if isinstance(result, str):
            found.setdefault(result, []).append(version)
            continue
        for row in result.patches:
            if row.state in (State.DRIFT, State.PARTIAL):
                reason = row.detail.splitlines()[0]
                found.setdefault(reason, []).append(f"{version} {row.name} {row.state}")
    return [f"{', '.join(subjects)}: {reason}" for reason, subjects in found.items()]


def matrix(results: dict[str, Report | str]) -> list[str]:
    """Aligned: one row per patch, one column per version, the verdicts below."""
    states = {
        version: {} if isinstance(result, str) else {row.name: row.state for row in result.patches}
        for version, result in results.items()
    }
    names = dict.fromkeys(name for column in states.values() for name in column)
    rows = [["patch", *results]]
    rows += [[name, *(column.get(name, "-") for column in states.values())] for name in names]
    rows.append(["verdict", *map(verdict, results.values())])
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def upgrade_report(report: Report, patch_set: PatchSet) -> str:
    """What someone who has all our patches keeps and loses by moving to a release that ships DFlash2."""
    further = {patch.name for patch in patch_set.patches if not patch.core}
    rows = [row for row in report.patches if row.name in further]
    ships = [row.name for row in rows if row.state == State.SHIPPED]
    loses = [row.name for row in rows if row.state == State.MISSING]
    return (
        f"{report.version} ships {len(ships)} of our {len(rows)} further fixes ({_names(ships)}); "
        f"moving to it loses {len(loses)} ({_names(loses)})."
    )


def _names(names: list[str]) -> str:
    return ", ".join(names) or "none"


def sentence(results: dict[str, Report | str]) -> str:
    """Every version under its verdict."""
    groups = []
    for state, heading in HEADINGS.items():
        versions = [version for version, result in results.items() if verdict(result) == state]
        if versions:
            groups.append(f"{heading}: {', '.join(versions)}")
    text = "; ".join(groups)
    return text[0].upper() + text[1:] + "."
