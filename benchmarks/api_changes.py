"""Prints what changed in the public Python interface since a revision, by griffe: ``make api``.

Public is what ``__all__`` of the public modules names (docs/releases.md, versions). Exit code 1: something that users
may rely on is gone or means something else.
"""

from __future__ import annotations

import subprocess
import sys

import griffe

MODULES = (
    "paro_advise",
    "paro_advise.errors",
    "paro_advise.runtime",
    "paro_advise.runtime.capture",
    "paro_advise.runtime.ho_ring",
    "paro_advise.runtime.redirect",
)


def newest_tag() -> str:
    """Return the newest tag before this commit, or "" if the clone has none."""
    command = ["git", "describe", "--tags", "--abbrev=0", "--match", "v[0-9]*", "HEAD^"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def public_paths(package: griffe.Module) -> set[str]:
    """Return where all public objects are defined."""
    paths = set()
    for name in MODULES:
        module = package if name == "paro_advise" else package[name.removeprefix("paro_advise.")]
        for member in module.exports or ():
            found = module.members.get(str(member))
            paths.add(found.target_path if isinstance(found, griffe.Alias) else f"{name}.{member}")
    return paths


def main(since: str) -> int:
    """Print the changes; return the exit code."""
    before = griffe.load_git("paro_advise", ref=since, search_paths=["src"], resolve_aliases=True)
    after = griffe.load("paro_advise", search_paths=["src"], resolve_aliases=True)
    if not isinstance(before, griffe.Module) or not isinstance(after, griffe.Module):
        print("no package named paro_advise was found in src", file=sys.stderr)
        return 2
    public = public_paths(before)
    found = [
        change
        for change in griffe.find_breaking_changes(before, after)
        if any(change.obj.path == path or change.obj.path.startswith(path + ".") for path in public)
    ]
    for change in found:
        print(change.explain(griffe.ExplanationStyle.ONE_LINE))
    print(f"{len(found)} changes that break something of {len(public)} public objects since {since}")
    return 1 if found else 0


if __name__ == "__main__":
    revision = sys.argv[1] if len(sys.argv) > 1 else newest_tag()
    if not revision:
        print("this clone has no tag to compare with: make api SINCE=REVISION", file=sys.stderr)
        sys.exit(2)
    sys.exit(main(revision))
