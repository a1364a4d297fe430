"""From which shares a regime or a finding is named, with unit and origin."""

from __future__ import annotations

NEGLIGIBLE_SHARE = 0.02  # of a step below which exposed communication is negligible; docs/formats.md, analysis
WAIT_SHARE = 0.5  # of a state that waits for it to be straggler bound: more than half
LATENCY_SHARE = 0.5  # of a transfer that is latency for it to be latency bound: more than half
CONTENTION_RATIO = 1.3  # of transfers while computing to those alone; assumed: less is noise
CONTENTION_SHARE = 0.5  # of a state that must be overlapped for contention to limit it: more than half
FAR_BELOW_SHARE = 0.1  # of a device's links below which a transfer inside a node is not limited by them; assumed
HOST_IDLE_SHARE = 0.2  # of a step that devices idle for the step to be host bound; assumed
ONE_UNIT_BYTES = 50 << 20  # bytes of one piece from which two would overlap; two of DDP's buckets (torch 2.13)
ONE_UNIT_SHARE = 0.7  # of the parameters that are reduced at once, from which a model is one piece; assumed
ONE_UNIT_PIECES = 2.5  # reductions for one of the largest; DDP's first bucket is a small one beside it (torch 2.13)
ONE_UNIT_GATHERS = 1.5  # gathers per forward pass up to which a model is one unit; half a gather is a share of steps
COMPUTE_SHARE = 0.05  # of a step with exposed communication below which it is compute bound; assumed
EVIDENCE_SHARE = 0.05  # of a state's time that evidence must carry to count; docs/formats.md, analysis
FINDING_SHARE = 0.02  # of a step or of communication from which a finding applies; as NEGLIGIBLE_SHARE
HOST_CAUSE_SHARE = 0.1  # of a step from which a cause of the host's is named; assumed
NAMED_CAUSE_SHARE = 1 / 3  # of the idle time that a cause of the host's must hold to be named as the cause; assumed
SLOW_STAGE_RATIO = 1.2  # of the median rank's computing from which a stage of a pipeline is slow; assumed
HARDLY_OVERLAPPED = 0.95  # exposed share of a state from which hardly any of it counts as overlapped; assumed
NONE_OVERLAPPED = 0.995  # the same, from which none does: what rounds to all of it, in percent
RARE_CHANCE = 0.05  # of an accident, up to which a finding does not speak of it; the usual level of a test
MANY_CALLS = 8  # calls of a state a step from which larger buckets need fewer; assumed
MAX_COLLECTIVE_KINDS = 240  # kinds of collectives in the JSON; bounds its size
MAX_UNITS = 1024  # pieces of a model in the JSON whose order is kept; bounds its size
MAX_MODULES = 200  # modules in the JSON, those exposed longest; bounds its size
MAX_LOGGED_KINDS = 60  # kinds of collectives of logs in the JSON; bounds its size
MAX_REMARKS = 200  # remarks of inputs about themselves in the JSON; bounds its size
MAJORITY_SHARE = 0.5  # of a time that must be known, or of one kind, to speak for the whole: more than half
REDUCTION_RATIO = 1.5  # calls for one reduction a step from which each micro-batch reduces; between 1 and 2
# Transfers beside computing and alone: exposed shares below and above which they count, and how many of each; assumed
OVERLAPPED_SHARE, ALONE_SHARE, LEAST_COMPARED = 0.1, 0.9, 3
# Typical cases: share of the intra-node bandwidth from which a network is fast, exposed shares of a step below which it
# binds nothing and from which it does, and nodes that are few; assumed
FAST_FABRIC_SHARE, UNBOUND_SHARE, BOUND_SHARE, FEW_NODES = 0.5, 0.1, 0.25, 2
STALLED_SHARE = 0.1  # of all steps' time that stalls take, from which it is said; assumed
FROZEN_RATIO = 1.5  # gathered over trained parameters from which some are frozen; padding makes less; assumed
NAMED_FROZEN_RATIO = 1.02  # the same where gathers name their units, which are padded alike when reduced; assumed
LEAST_REPEATED_SHARE = 0.9  # of the bytes of the largest pass that each reduces where they repeat one another; assumed
COPIED_SHARE = 0.5  # of what forward gathers, that backward gathers over fewer ranks where there is a copy; assumed
GATHERS_AGAIN_RATIOS = (1.5, 2.5)  # gathers to reduce-scatters; 2 where backward gathers again; assumed
SENDS_A_PASS = 2  # of a pipeline's stage in a micro-batch: activations on, gradients back; Megatron-LM's schedules
PATH_EXPOSED_SHARE = 0.05  # of a collective that must be exposed for the critical path to run over it; assumed
MAX_KEPT_NUMBER = (
    1e22  # none; largest number of an analysis: FLOPs of a device in half a year, more than bytes and us; assumed
)
MOSTLY_SHARE = 0.5  # of a step that computes, and of that what communication exposes at most, to say so first; assumed
