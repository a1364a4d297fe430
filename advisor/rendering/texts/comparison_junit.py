"""A comparison as JUnit XML, which CI systems show as test results."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING

from paro_advise.advisor.comparison.model import ChangeVerdict
from paro_advise.advisor.wording.escaping import plain

if TYPE_CHECKING:
    from paro_advise.advisor.comparison.model import Comparison

_SUITE = "paro-advise compare"


def comparison_junit(comparison: Comparison) -> bytes:
    """Return one test case for the step time and one for each acceptance criterion; those not judged are skipped."""
    suite = ET.Element("testsuite", name=_SUITE)
    is_judged = comparison.verdict != ChangeVerdict.UNCLEAR
    differ = f" The runs differ: {comparison.unlike_text}." if comparison.unlike else ""
    _case(suite, "step time", passed=not comparison.is_too_slow if is_judged else None, text=comparison.text + differ)
    for item in comparison.acceptance:
        _case(suite, item.criterion, passed=item.passed, text=item.text)
    cases = suite.findall("testcase")
    suite.set("tests", str(len(cases)))
    suite.set("failures", str(sum(case.find("failure") is not None for case in cases)))
    suite.set("skipped", str(sum(case.find("skipped") is not None for case in cases)))
    ET.indent(suite)
    document: bytes = ET.tostring(suite, encoding="utf-8", xml_declaration=True)
    return document + b"\n"


def _case(suite: ET.Element, name: str, *, passed: bool | None, text: str) -> None:
    case = ET.SubElement(suite, "testcase", classname=_SUITE, name=name)
    if passed is None:
        ET.SubElement(case, "skipped", message=plain(text))
    elif passed:
        ET.SubElement(case, "system-out").text = plain(text)
    else:
        ET.SubElement(case, "failure", message=plain(text))
