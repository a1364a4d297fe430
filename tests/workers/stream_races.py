"""A device with streams that is not there: what runs on a CPU is judged as if streams were only ordered by events.

Every operator of torch belongs to the stream that its thread works on. It may read what another stream has written,
or write what another has read, only if events put it after. What the host frees goes back to the stream that
allocated it, whose next operator may get that memory, as from CUDA's caching allocator: it must come after all that
used it. Collectives belong to the stream that waits for them, as with NCCL.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HOST_WAITS = ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero")


class Event:
    def __init__(self, clock):
        self.clock = clock


class Stream:
    """Work in order; its clock holds how far it knows each stream to have come before it."""

    def __init__(self, device, number):
        self.device, self.number = device, number
        self.clock = {number: 0}
        self.freed = []

    def record_event(self):
        self.device.notice_freed()
        return Event(dict(self.clock))

    def wait_event(self, event):
        self.device.notice_freed()
        for number, count in event.clock.items():
            self.clock[number] = max(self.clock.get(number, 0), count)

    def knows(self, use):
        return self.clock.get(use.stream, 0) >= use.count


def is_memory(value):
    return isinstance(value, torch.Tensor) and not value.is_meta and not isinstance(value, FakeTensor)


@dataclass(frozen=True)
class Use:
    stream: int
    count: int
    operator: str


@dataclass
class Memory:
    storage: StorageWeakRef
    owner: Stream
    written: Use | None = None
    read: list[Use] = field(default_factory=list)


class SimulatedDevice(TorchDispatchMode):
    """Streams for an executor, and a judge of what is done on them.

    Attributes:
        problems: what was not ordered.
        host_waits: operators for which a host would have to wait.
    """

    def __init__(self):
        super().__init__()
        self._streams = [Stream(self, 0)]
        self._stack = [self._streams[0]]
        self._memory = {}
        self.problems = []
        self.host_waits = []

    # ---- what an executor asks of it ------------------------------------------------------------

    def current(self):
        return self._stack[-1]

    def create(self):
        self._streams.append(Stream(self, len(self._streams)))
        return self._streams[-1]

    @contextlib.contextmanager
    def using(self, stream):
        self._stack.append(stream)
        try:
            yield
        finally:
            self._stack.pop()

    # ---- what it judges ------------------------------------------------------------------------

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its parts come back here
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        schema = func._schema
        if any(issubclass(kind, FakeTensor) for kind in types):
            return found  # torch works out shapes
        if schema.name in HOST_WAITS:
            self.host_waits.append(schema.name)
        makes_views = any(one.alias_info is not None and not one.alias_info.is_write for one in schema.returns)
        if makes_views and not schema.is_mutable:
            return found
        self.notice_freed()
        written = [tensor for tensor in tree_leaves(found) if is_memory(tensor)]
        read = []
        named = [*zip(schema.arguments, args, strict=False)]
        named += [(one, kwargs[one.name]) for one in schema.arguments if one.name in kwargs]
        for argument, value in named:
            tensors = [tensor for tensor in tree_leaves(value) if is_memory(tensor)]
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            (written if is_written or schema.name.startswith("c10d::") else read).extend(tensors)
        self._use(schema.name, read, written)
        return found

    def _use(self, operator, read, written):
        stream = self.current()
        stream.clock[stream.number] += 1
        use = Use(stream.number, stream.clock[stream.number], operator)
        for earlier in stream.freed:
            if not stream.knows(earlier):
                self.problems.append(f"{operator} on {stream.number} may get memory that {earlier} still uses")
        stream.freed.clear()
        for tensor in read:
            memory = self._memory_of(tensor)
            if memory.written and not stream.knows(memory.written):
                self.problems.append(f"{operator} on {stream.number} reads what {memory.written} has not written yet")
            memory.read.append(use)
        for tensor in written:
            memory = self._memory_of(tensor)
            for earlier in [*memory.read, *([memory.written] if memory.written else [])]:
                if not stream.knows(earlier):
                    self.problems.append(f"{operator} on {stream.number} writes what {earlier} still uses")
            memory.read, memory.written = [], use

    def _memory_of(self, tensor):
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._memory:
            self._memory[key] = Memory(StorageWeakRef(storage), self.current())
        return self._memory[key]

    def notice_freed(self):
        """Give what the host has let go since it was asked last back to the streams that allocated it."""
        for key, memory in list(self._memory.items()):
            if memory.storage.expired():
                memory.owner.freed += [*memory.read, *([memory.written] if memory.written else [])]
                del self._memory[key]
