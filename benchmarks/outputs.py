"""What the commands write for every input at hand, and how two versions of the product differ in it.

`outputs.py write DIR` runs analyze, recommend and compare on ../shared and keeps their JSON; with another
version first on PYTHONPATH it keeps that version's. `outputs.py diff BEFORE AFTER` prints every difference:
numbers and keys one by one, changed sentences once each with how often they occur.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import os
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from paro_advise.advisor.comparison.comparability import FACTS

SHARED = Path("../shared")
# Made from the sentences themselves or from the clock, so they differ whenever a sentence does.
UNLIKE = [word for fact in FACTS for word in ("--allow-unlike", fact)]
VOLATILE_KEYS = frozenset({"plan_id", "created_at", "sha256_of_analysis"})


def cases() -> dict[str, list[str]]:
    """Return command lines by name; ``{out}`` stands for the JSON file."""
    runs = sorted(path.parent for path in SHARED.glob("*_*/*/truth.json"))
    corpus = sorted(path for path in (SHARED / "corpus").rglob("*") if path.is_file() and path.name != "INDEX.tsv")
    folders = sorted({path.parent for path in corpus})
    found = {f"analyze {path}": ["analyze", str(path), "--json", "{out}"] for path in (*runs, *corpus, *folders)}
    for run in runs:
        source = str(run / "traces") if (run / "traces").is_dir() else str(run)
        found[f"recommend {run}"] = ["recommend", source, "-o", "{out}"]
        found[f"recommend budget {run}"] = [
            "recommend", source, "-o", "{out}", "--device-memory", "80GiB", "--redundancy-budget", "4GiB",
        ]  # fmt: skip
        found[f"compare itself {run}"] = ["compare", str(run), str(run), "--json", "{out}"]
    for before, after in itertools.pairwise(runs):
        found[f"compare {before} {after}"] = ["compare", str(before), str(after), "--json", "{out}", *UNLIKE]
    return found


def write(folder: Path) -> None:
    """Run every case and keep its JSON and exit code under ``folder``."""
    from paro_advise.advisor.cli import run

    folder.mkdir(parents=True, exist_ok=True)
    os.environ["PARO_ADVISE_CACHE"] = tempfile.mkdtemp()
    for name, words in cases().items():
        out = folder / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.json"
        partial = out.with_suffix(".partial")
        partial.unlink(missing_ok=True)
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            try:
                code = run([word.format(out=partial) for word in words])
            except SystemExit as error:
                code = int(error.code or 0)
        content = json.loads(partial.read_text()) if partial.exists() else None
        partial.unlink(missing_ok=True)
        messages = sorted(set(re.findall(r"\b[EQ]\d{3}\b", said.getvalue())))
        out.write_text(json.dumps({"case": name, "exit": code, "codes": messages, "output": content}, sort_keys=True))
        print(code, name, flush=True)


def differences(before: Any, after: Any, where: str = "") -> list[tuple[str, Any, Any]]:
    """Return (path, before, after) of every leaf that differs; a missing one is the word absent."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = sorted(before.keys() | after.keys())
        pairs = [(f"{where}.{key}", before.get(key, "absent"), after.get(key, "absent")) for key in keys]
        return [row for path, old, new in pairs if path.rsplit(".", 1)[-1] not in VOLATILE_KEYS
                for row in differences(old, new, path)]  # fmt: skip
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return [row for old, new in zip(before, after, strict=True) for row in differences(old, new, f"{where}[]")]
    same = before == after or (before != before and after != after)
    return [] if same else [(where, before, after)]


def compare(before: Path, after: Path) -> int:
    """Print how two folders of outputs differ; return how many values other than sentences do."""
    values = 0
    sentences: Counter[tuple[str, str]] = Counter()
    names = sorted({path.name for path in (*before.glob("*.json"), *after.glob("*.json"))})
    for name in names:
        sides = [folder / name for folder in (before, after)]
        if not all(side.exists() for side in sides):
            print(f"only in one folder: {name}")
            values += 1
            continue
        old, new = (json.loads(side.read_text()) for side in sides)
        for where, was, now in differences(old, new):
            if isinstance(was, str) and isinstance(now, str) and (" " in was or " " in now):
                sentences[was, now] += 1
            else:
                values += 1
                print(f"{old['case']}: {where}: {str(was)[:160]} -> {str(now)[:160]}")
    for (was, now), count in sentences.most_common():
        print(f"{count} x {was}\n     -> {now}")
    print(f"{len(names)} outputs, {values} values and {len(sentences)} sentences differ")
    return values


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(Path(sys.argv[2]))
    else:
        sys.exit(1 if compare(Path(sys.argv[2]), Path(sys.argv[3])) else 0)
