"""Analyses in one call."""

from __future__ import annotations

from paro_advise.advisor.analysis.build import build_analysis
from paro_advise.advisor.analysis.model import Options
from paro_advise.advisor.facts.frames import read_table
from paro_advise.advisor.facts.rank_facts import rank_facts
from paro_advise.advisor.facts.reading.all_inputs import read_all
from paro_advise.advisor.facts.reading.choice import EngineChoice
from paro_advise.trace_parsers.bytes.blocks import SourceRef
from paro_advise.trace_parsers.discover import find_inputs
from paro_advise.trace_parsers.read import read_source


def read(path):
    return read_source(SourceRef(path=path))


def facts_of(path):
    return rank_facts(read(path))


def collectives_of(path):
    return read_table(facts_of(path).collectives_ipc)


def gathered(*paths, cache=None, jobs=1):
    refs, is_collection = find_inputs([str(path) for path in paths])
    found = read_all(refs, is_collection=is_collection, cache=cache, choice=EngineChoice(jobs=jobs))
    found.require_facts()
    return found


def analyze(*paths, **options):
    found = gathered(*paths)
    return build_analysis(found.facts, found.notices, Options(**options))


def write_run(folder, builders, suffix=".json"):
    folder.mkdir(exist_ok=True)
    for builder in builders:
        builder.write(folder / f"rank{builder.rank}{suffix}")
    return folder
