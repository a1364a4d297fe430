"""Topology of one node as NCCL_TOPO_DUMP_FILE writes it (XML); describes hardware, no timing."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING
from xml.parsers import expat

from paro_advise.errors import BrokenInputError, HostileInputError
from paro_advise.trace_parsers.nccl.constants import MAX_DEPTH, MAX_ELEMENTS, MAX_LISTED, MAX_TOPOLOGY_BYTES
from paro_advise.trace_parsers.notice import NoticeList
from paro_advise.trace_parsers.side_rows import parsed_source
from paro_advise.trace_parsers.tables import SourceHeader

if TYPE_CHECKING:
    from paro_advise.trace_parsers.bytes.readable import Readable
    from paro_advise.trace_parsers.tables import ParsedSource, SourceFile


class _Topology:
    """Counts what the elements say."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.root = ""
        self.num_elements = 0
        self.depth = 0
        self.gpus: Counter[str] = Counter()  # per host
        self.nvlinks: list[int] = []
        self.net_mbps: list[str] = []
        self.pci: Counter[str] = Counter()
        self.architectures: set[str] = set()
        self._host = ""
        self._links: list[str] = []

    def start_element(self, name: str, attributes: dict[str, str]) -> None:
        self.num_elements += 1
        self.depth += 1
        if self.depth > MAX_DEPTH or self.num_elements > MAX_ELEMENTS:
            raise HostileInputError(
                f"a topology must hold at most {MAX_ELEMENTS} elements, nested {MAX_DEPTH} deep, got more",
                where=self.path,
            )
        self.root = self.root or name
        if name == "cpu":
            self._host = attributes.get("host_hash", "")[:40]
        elif name == "pci":
            speed, width = attributes.get("link_speed", "")[:40], attributes.get("link_width", "")[:10]
            self._links.append(f"{speed} x{width}" if speed else "")
        elif name == "gpu":
            self.gpus[self._host] += 1
            self.nvlinks.append(0)
            self.architectures.add(attributes.get("sm", "")[:10])
            self._count_link()
        elif name == "nvlink" and self.nvlinks:
            count = attributes.get("count", "")
            self.nvlinks[-1] += int(count) if count.isdecimal() and len(count) < 6 else 0
        elif name == "net":
            self.net_mbps.append(attributes.get("speed", "")[:12])
            self._count_link()

    def end_element(self, name: str) -> None:
        self.depth -= 1
        if name == "pci" and self._links:
            self._links.pop()

    def _count_link(self) -> None:
        if self._links and self._links[-1]:
            self.pci[self._links[-1]] += 1

    def refuse_declaration(self, *_: object) -> None:
        raise HostileInputError(
            "a topology must not declare a document type or entities, this one does", where=self.path
        )


def looks_like(head: bytes) -> bool:
    """Return whether the first 64 KiB are a topology of NCCL."""
    return head.lstrip()[:1] == b"<" and b"<system" in head and (b"<cpu" in head or b"<gpu" in head)


def parse(data: Readable, source: SourceFile) -> ParsedSource:
    """Read GPUs per node, NVLinks per GPU and network ports (Mbit/s) into the header.

    Raises:
        HostileInputError: it declares entities, or is too large or too deep.
        BrokenInputError: it is no topology.
    """
    content = data.read_all(MAX_TOPOLOGY_BYTES)
    topology = _Topology(source.path)
    problem = _read(content, topology)
    if topology.root != "system" or not topology.gpus:
        raise BrokenInputError(
            f"a topology must be a <system> with <gpu> elements, got <{topology.root[:40]}> {problem}",
            where=source.path,
            hint="set NCCL_TOPO_DUMP_FILE=topology.xml in the job to have one written",
        )
    notices = NoticeList()
    if problem:
        notices.warn("Q201", f"the topology ends early or is damaged {problem}; what came before was kept")
    notices.info("Q290", "a topology describes the node only; it holds no measurement")
    header = SourceHeader(
        gpus_per_node=max(topology.gpus.values()),
        num_nodes=len(topology.gpus) if len(topology.gpus) > 1 else None,
        remarks=_remarks(topology),
    )
    return parsed_source(source, header, notices, topology.num_elements)


def _read(content: bytes, topology: _Topology) -> str:
    """Feed the elements; return what is wrong with the XML, "" when nothing is."""
    parser = expat.ParserCreate()
    parser.StartElementHandler = topology.start_element
    parser.EndElementHandler = topology.end_element
    parser.StartDoctypeDeclHandler = topology.refuse_declaration
    parser.EntityDeclHandler = topology.refuse_declaration
    try:
        parser.Parse(content, True)  # noqa: FBT003 - expat takes the flag by position only
    except expat.ExpatError as error:
        return f"({error})"[:120]
    return ""


def _remarks(topology: _Topology) -> dict[str, str]:
    out = {
        "gpus": str(sum(topology.gpus.values())),
        "nvlinks_per_gpu": ",".join(map(str, topology.nvlinks[:MAX_LISTED])),
        "network_ports": str(len(topology.net_mbps)),
        "network_port_mbps": ",".join(topology.net_mbps[:MAX_LISTED]),
        "gpu_architecture_sm": ",".join(sorted(topology.architectures)),
    }
    out.update({f"pci_link_{link}": str(count) for link, count in sorted(topology.pci.items())[:MAX_LISTED]})
    return out
