"""The lab: a cluster of several nodes on one machine, with real packets and limited ports.

Each node is a network and process namespace; a virtual cable with a token bucket on both ends
joins it to one switch. Ranks of a node talk over loopback, ranks of different nodes cross the
limited port. Nothing is left behind: namespaces vanish with the process that holds them, even
when this one is killed.
"""

from paro_advise.runtime.lab.cluster import Lab, LabResult, NodeResult
from paro_advise.runtime.lab.spec import Isolation, LabSpec

__all__ = ["Isolation", "Lab", "LabResult", "LabSpec", "NodeResult"]
