"""What is released: the tag's version, the same bytes each time, all that git tracks, and a program that starts anywhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest
from conftest import ROOT
from helpers import write_run
from trace_builder import fsdp_rank

pytest.importorskip("build")
pytest.importorskip("setuptools_scm")
pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the history of a clone")

A_DAY = "1700000000"  # seconds since 1970, the time of every file in an archive


def do(*command, cwd):
    environment = {**os.environ, "SOURCE_DATE_EPOCH": A_DAY, "PYTHONPATH": ""}
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


def tracked():
    """Names of all files that git tracks and that lie here."""
    return [name for name in do("git", "ls-files", "-z", cwd=ROOT).split("\0") if name and os.path.lexists(ROOT / name)]


def cloned(folder, *, tag):
    """The tracked files as they lie here, in a repository of their own with one commit."""
    for name in tracked():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    do("git", "init", "--quiet", cwd=folder)
    do("git", "add", "--all", "--force", cwd=folder)
    do(
        *["git", "-c", "user.name=a", "-c", "user.email=a@example.org", "commit", "--quiet", "--message", "all"],
        cwd=folder,
    )
    if tag:
        do("git", "tag", tag, cwd=folder)
    return folder


def built(folder, *kinds):
    do(sys.executable, "-m", "build", "--no-isolation", *kinds, "--outdir", folder / "made", ".", cwd=folder)
    return sorted((folder / "made").iterdir())


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    """The wheel and the source distribution of a tagged clone; the wheel is made from the source distribution."""
    return built(cloned(tmp_path_factory.mktemp("release"), tag="v7.8.9"))


def test_the_version_is_the_tag(release):
    assert [path.name for path in release] == ["paro_advise-7.8.9-py3-none-any.whl", "paro_advise-7.8.9.tar.gz"]


def test_a_clone_without_tags_comes_after_the_newest_release_of_the_changelog(tmp_path):
    from packaging.version import Version

    made = Version(do(sys.executable, "-m", "setuptools_scm", cwd=cloned(tmp_path, tag=None)).split()[-1])
    heading = next(line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## [0"))
    released = Version(heading.split("[")[1].split("]")[0])
    assert made.is_devrelease
    assert made.release == (*released.release[:2], released.release[2] + 1)


def test_a_wheel_is_the_same_bytes_wherever_it_is_made(release, tmp_path):
    (again,) = built(cloned(tmp_path, tag="v7.8.9"), "--wheel")
    assert again.read_bytes() == release[0].read_bytes()


def test_a_source_distribution_holds_all_that_git_tracks(release):
    with tarfile.open(release[1]) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    links = {name for name in tracked() if (ROOT / name).is_symlink()}
    assert set(tracked()) - links <= held
    assert {"src/paro_advise/advisor/cli.py", "src/paro_advise/templates/style.css"} <= held


def test_a_wheel_holds_no_tests(release):
    tops = {name.split("/")[0] for name in zipfile.ZipFile(release[0]).namelist()}
    assert tops == {"paro_advise", "paro_advise-7.8.9.dist-info"}


@pytest.mark.parametrize("kind", [0, 1], ids=["wheel", "source"])
def test_what_is_installed_starts_and_reads_a_trace(release, kind, tmp_path):
    """In a folder of its own, away from the sources."""
    traces = write_run(tmp_path / "traces", [fsdp_rank(0), fsdp_rank(1)])
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    do(*pip, "--target", "here", release[kind], cwd=tmp_path)
    # -I ignores PYTHONPATH and the working folder: the program finds what was installed, not what is developed.
    start = "import sys; sys.path.insert(0, 'here'); from paro_advise.advisor.cli import main; main()"
    said = do(sys.executable, "-I", "-c", start, "analyze", traces, "-o", "report.html", cwd=tmp_path)
    assert said.strip()
    assert "paro-advise 7.8.9" in (tmp_path / "report.html").read_text()
