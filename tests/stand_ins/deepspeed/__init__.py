"""What a plan replaces of DeepSpeed, for where it is not installed."""

import sys
from types import ModuleType, SimpleNamespace


class _Init:
    """``zero.Init``."""


class _GatheredParameters:
    """``zero.GatheredParameters``."""


_contexts = SimpleNamespace(GatheredParameters=_GatheredParameters, Init=_Init)
zero = SimpleNamespace(**vars(_contexts), partition_parameters=_contexts)
utils = SimpleNamespace()


class _Comm(ModuleType):
    """``deepspeed.comm``: remembers how it was set up."""

    backends: list[str] = []  # noqa: RUF012 - one module, one list

    def is_initialized(self):
        return bool(self.backends)

    def init_distributed(self, dist_backend=None):
        self.backends.append(dist_backend)


comm = sys.modules["deepspeed.comm"] = _Comm("deepspeed.comm")


def initialize(
    args=None,
    model=None,
    optimizer=None,
    model_parameters=None,
    training_data=None,
    lr_scheduler=None,
    distributed_port=None,
    mpu=None,
    dist_init_required=None,
    collate_fn=None,
    config=None,
    mesh_param=None,
    config_params=None,
):
    """As DeepSpeed 0.19 declares it."""
    raise NotImplementedError
